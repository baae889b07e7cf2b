"""Connections that fail at every call of a socket: a transfer may be lost, an instance never is.

A call meets a connection that was reset, raises an error of its own, or sends half of its bytes first. The
calls are those of control links, of a registry's HTTP and of data connections, on both sides. `connect` to no
address ends a TCP connection as `ss -K` does: the peer gets a reset, and calls on this end fail with
"Transport endpoint is not connected".
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.session.handoff_world import AUX, PATIENCE_S, Side, World, until, without_leaks, worlds
from tests.session.test_link_tls import make_authority, make_certificate

from baton.errors import LocalProtocolError
from baton.protocol.outcomes import Failed, Ready
from baton.session.event_loop import EventLoop
from baton.session.links import SocketConfig
from baton.settings import Tls

SENDS = ("send", "sendall", "sendmsg")
CONNECTED = (*SENDS, "recv", "recv_into", "recvmsg", "recvmsg_into", "shutdown", "setsockopt", "getsockopt")
NEW = ("accept", "connect", "connect_ex")
"""Calls on sockets without a peer."""
CONNECTIONS = ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_UNIX, socket.SOCK_SEQPACKET))
ERRORS = (errno.ENOTCONN, errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT)
LIBC = ctypes.CDLL(None, use_errno=True)
NOWHERE = (ctypes.c_char * 16)()
"""A socket address of the family AF_UNSPEC."""


@pytest.fixture(autouse=True)
def no_leaks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    check = without_leaks()
    next(check)
    yield
    # asyncio leaves a socket that fails at once to the garbage collector; a logged error holds its frames.
    caplog.get_records("call").clear()
    next(check, None)


def has_peer(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


def reset(sock: socket.socket) -> None:
    if sock.family == socket.AF_UNIX:
        LIBC.shutdown(sock.fileno(), socket.SHUT_RDWR)
    elif LIBC.connect(sock.fileno(), NOWHERE, len(NOWHERE)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Resetter:
    """Counts the calls of sockets, and breaks the connection of one."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.at = -1
        """The number of the call."""
        self.name = ""
        """Or what is called; once."""
        self.how = "reset"
        """Or "error", or "half"."""
        self.error = 0
        self._lock = threading.Lock()

    @property
    def has_struck(self) -> bool:
        return self.at < 0 and not self.name

    def call(self, call: Callable[..., Any], name: str, sock: socket.socket, *args: Any) -> Any:
        is_watched = (sock.family, sock.type) in CONNECTIONS and (name in NEW or has_peer(sock))
        if not is_watched or not self._is_hit(name):
            return call(sock, *args)
        if self.how == "error":
            if name not in NEW:
                reset(sock)
            raise OSError(self.error, os.strerror(self.error))
        if name in NEW:
            done = call(sock, *args)
            reset(done[0] if name == "accept" else sock)
            return done
        if self.how == "half" and name in SENDS:
            data = b"".join(args[0]) if name == "sendmsg" else bytes(args[0])
            socket.socket.send(sock, data[: len(data) // 2])
        reset(sock)
        return call(sock, *args)

    def _is_hit(self, name: str) -> bool:
        with self._lock:
            is_hit = self.num_calls == self.at or name == self.name
            self.num_calls += 1
            if is_hit:
                self.at, self.name, self.error = -1, "", ERRORS[self.num_calls % len(ERRORS)]
        return is_hit


@pytest.fixture
def resetter(monkeypatch: pytest.MonkeyPatch) -> Resetter:
    found = Resetter()

    def wrapped(name: str) -> Any:
        call = getattr(socket.socket, name)
        return lambda self, *args: found.call(call, name, self, *args)

    for name in CONNECTED + NEW:
        monkeypatch.setattr(socket.socket, name, wrapped(name))
    return found


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    make_authority(folder, "ours")
    return make_certificate(folder, "here", "ours", "127.0.0.1")


def hand_off(world: World) -> bool:
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


def check_next(world: World) -> None:
    """What was reset after a transfer needed it is found by the next one, and its writers are replaced."""
    assert any(hand_off(world) for _ in range(3))


def check_reset(resetter: Resetter, at: int, transport: str = "tcp", tls: Tls | None = None) -> bool:
    """Breaks the connection of one call; whether so many were made."""
    options: dict[str, Any] = {"sockets": SocketConfig(tls=tls)}
    # Its server is collected late, and the memory of its endpoint with it: of shm those are open files.
    registry = {"embed_registry": 0} if transport == "tcp" else {}
    with worlds(Side(options=options), Side(options=options | registry), transport=transport) as world:
        resetter.num_calls, resetter.at = 0, at
        is_there = hand_off(world)
        has_struck = resetter.has_struck
        check_next(world)
        assert has_struck or is_there, "it was lost without a reset"
        resetter.at = -1
    # Where the first calls on a new connection fail, asyncio leaves its socket to the collector.
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()
    return has_struck


HOW = pytest.mark.parametrize("how", ["reset", "error", "half"])
LINKS = pytest.mark.parametrize("links", ["tcp", "tcp and tls", "shm"])


@HOW
@LINKS
def test_some_calls(resetter: Resetter, tls: Tls, links: str, how: str) -> None:
    resetter.how, transport = how, links.split(maxsplit=1)[0]
    for at in range("reset error half".index(how), 40, 23):
        assert check_reset(resetter, at, transport, tls if "tls" in links else None)


@pytest.mark.long
@HOW
@LINKS
def test_every_call(resetter: Resetter, tls: Tls, links: str, how: str) -> None:
    resetter.how, transport = how, links.split(maxsplit=1)[0]
    num_struck = 0
    while check_reset(resetter, num_struck, transport, tls if "tls" in links else None):
        num_struck += 1
    assert num_struck > 40


def test_a_link_is_reset_just_before_it_hangs_up(resetter: Resetter) -> None:
    with worlds(Side(), Side(), transport="tcp") as world:
        assert hand_off(world)
        coordinator = world.source.first.coordinator
        assert coordinator is not None
        [session] = [link for link in coordinator.ports._links if link not in coordinator.members]
        resetter.name = "shutdown"
        world.source.first._loop.post(lambda: coordinator.ports.hang_up(session))
        until(lambda: resetter.has_struck, "the link is closed")
        assert any(hand_off(world) for _ in range(2))


@pytest.mark.long
def test_a_loop_that_ends_with_a_socket_is_caught(
    resetter: Resetter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: EventLoop, aio: object, context: dict[str, object]) -> None:
        self.end(f"the control loop failed: {context['exception']}")

    monkeypatch.setattr(EventLoop, "_on_escaped", end)
    resetter.how = "error"
    world = World(Side(), Side(), transport="tcp")
    try:
        resetter.name = "accept"
        with pytest.raises((AssertionError, LocalProtocolError)):
            check_next(world)
        assert "the control loop failed" in "".join(world.source.ended + world.target.ended)
    finally:
        world.close()
