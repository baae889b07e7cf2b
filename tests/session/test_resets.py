"""Connections that are reset at every call of a socket: a transfer may be lost, an instance never is.

`connect` to no address ends a TCP connection as `ss -K` does: the peer gets a reset, and calls on this end
fail with "Transport endpoint is not connected".
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.session.handover_world import AUX, PATIENCE_S, Side, World, until, without_leaks, worlds

from baton.protocol.outcomes import Failed, Ready

CALLS = ("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg_into", "shutdown", "setsockopt")
LIBC = ctypes.CDLL(None, use_errno=True)
NOWHERE = (ctypes.c_char * 16)()
"""A socket address of the family AF_UNSPEC."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


def is_connected(sock: socket.socket) -> bool:
    if sock.family != socket.AF_INET or sock.type != socket.SOCK_STREAM:
        return False
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def reset(sock: socket.socket) -> None:
    if LIBC.connect(sock.fileno(), NOWHERE, len(NOWHERE)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Resetter:
    """Counts the calls of connected sockets, and resets the connection of one just before it."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.at = -1
        """The number of the call."""
        self.name = ""
        """Or what is called; once."""
        self._lock = threading.Lock()

    def before(self, name: str, sock: socket.socket) -> None:
        if not is_connected(sock):
            return
        with self._lock:
            is_hit = self.num_calls == self.at or name == self.name
            self.num_calls += 1
            if is_hit:
                self.at, self.name = -1, ""
        if is_hit:
            reset(sock)

    @property
    def has_struck(self) -> bool:
        return self.at < 0 and not self.name


@pytest.fixture
def resetter(monkeypatch: pytest.MonkeyPatch) -> Resetter:
    found = Resetter()

    def wrapped(name: str) -> Any:
        call = getattr(socket.socket, name)

        def reset_first(self: socket.socket, *args: Any) -> Any:
            found.before(name, self)
            return call(self, *args)

        return reset_first

    for name in CALLS:
        monkeypatch.setattr(socket.socket, name, wrapped(name))
    return found


def hand_over(world: World) -> bool:
    """A transfer that is right in every byte, or lost on both sides; whether it is there."""
    found = world.transfer()
    found.receive()
    found.send()
    found.offer_all()
    found.commit()
    outcome = found.receiving.wait(PATIENCE_S)
    if isinstance(outcome, Failed):
        for sending in found.sendings.values():
            sending.abort("decode failed")  # it may never have heard of its target
    outcomes = [handle.wait(PATIENCE_S) for handle in found.handles]
    assert all(handle.wait_released(PATIENCE_S) for handle in found.handles), outcomes
    assert all(isinstance(each, Ready | Failed) for each in outcomes), outcomes
    if isinstance(outcome, Failed):
        assert not any(isinstance(each, Ready) for each in outcomes), outcomes
        return False
    # The last word to the source may be what was lost: it counts the transfer as failed then.
    assert outcome == Ready(AUX)
    num_bytes, num_right = found.compare()
    assert num_right == num_bytes
    return True


def check_reset(resetter: Resetter, at: int) -> bool:
    """Resets the connection of one call; whether so many were made."""
    with worlds(Side(), Side(), transport="tcp") as world:
        resetter.num_calls, resetter.at = 0, at
        is_there = hand_over(world)
        has_struck = resetter.has_struck
        # What was reset after the transfer needed it is found by the next one, and its writers are replaced.
        assert any(hand_over(world) for _ in range(3))
        assert has_struck or is_there, "it was lost without a reset"
        resetter.at = -1
    return has_struck


def test_some_calls(resetter: Resetter) -> None:
    assert [check_reset(resetter, at) for at in range(0, 80, 9)] == [True] * 9


@pytest.mark.long
def test_every_call(resetter: Resetter) -> None:
    num_struck = 0
    while check_reset(resetter, num_struck):
        num_struck += 1
    assert num_struck > 80


def test_a_link_is_reset_just_before_it_hangs_up(resetter: Resetter) -> None:
    with worlds(Side(), Side(), transport="tcp") as world:
        assert hand_over(world)
        coordinator = world.source.first.coordinator
        assert coordinator is not None
        [session] = [link for link in coordinator.ports._links if link not in coordinator.members]
        resetter.name = "shutdown"
        world.source.first._loop.post(lambda: coordinator.ports.hang_up(session))
        until(lambda: resetter.has_struck, "the link is closed")
        assert any(hand_over(world) for _ in range(2))
