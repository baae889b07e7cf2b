"""Endpoints in processes of their own: the calls and promises of `Endpoint`, over a socket pair.

Both processes have the pools. What a transfer brought is compared byte by byte, as in the other tests of
hand-overs.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import astuple
from tests.session.handoff_world import (
    AUX,
    CACHE,
    PATIENCE_S,
    SECRET,
    Job,
    Side,
    Transfer,
    World,
    until,
    without_leaks,
    worlds,
)

from baton.errors import ConfigError, LocalProtocolError
from baton.plan.ownership import buffers
from baton.protocol.outcomes import Failed, Finished, Ready, Waiting, Why
from baton.session import EndpointConfig, Sending, SocketConfig
from baton.session.process import Call, Changed, EndpointServer, FenceName, HostWait, TransportConfig
from baton.session.remote import EndpointProcess, RemoteEndpoint, RemoteSendings
from baton.transport import Fence, HostFence

PLAIN, STAGED = 0, 1 << 16
"""Bytes of staging: without any, a process does not import torch."""


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


def remote(layout: str = "tp1", **options: Any) -> Side:
    return Side(layout, has_process=True, **{"staging_bytes": PLAIN, **options})


def cut_in_half(world: World) -> Transfer:
    """Granted; the first half is offered, the second one waits for a fence that nobody sets."""
    found = world.transfer()
    found.receive()
    found.send()
    found.offer((0, 2), (0, 21))
    found.offer((2, 4), (0, 21), fence=HostFence())
    until(lambda: all(sending.is_granted for sending in found.sendings.values()), "no grant")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target", "transport"),
    [
        (remote("tp2"), remote("tp1"), "shm"),
        (remote("pp2"), Side("tp2", staging_bytes=PLAIN), "shm"),
        (Side("tp2", staging_bytes=PLAIN), remote("cp2"), "tcp"),
        (
            remote(dtype="fp32", page_tokens=8, staging_bytes=1 << 16),
            remote("tp2", staging_bytes=1 << 16),
            "tcp",
        ),
    ],
    ids=["tp2-tp1", "pp2-own", "own-cp2", "packed"],
)
def test_every_byte_arrives_through_processes(source: Side, target: Side, transport: str) -> None:
    with worlds(source, target, transport=transport) as world:
        for num_tokens in (21, 1, 13):
            world.hand_off(Job(num_tokens=num_tokens))
        assert all(
            copy.is_done and copy.ended_s >= copy.submitted_s > 0.0
            for transfer in world.transfers
            for sending in transfer.sendings.values()
            for copy in sending.copies
        )
        assert sum(len(sending.copies) for sending in world.transfers[0].sendings.values()) > 0


def check_fence(world: World) -> None:
    """What is not computed yet is not copied."""
    found = world.transfer()
    found.receive()
    found.send()
    for held in found._held(world.source, 21):
        world.source.memory[held.rank, held.buffer][:] = 0
    fence = HostFence()
    found.offer((0, 4), (0, 21), fence=fence)
    found.commit()
    until(lambda: all(sending.is_granted for sending in found.sendings.values()), "no grant")
    # Copies of a connection are made in order: what could be copied before this one has been.
    world.hand_off()
    assert isinstance(found.receiving.state, Waiting)
    found.fill()
    fence.set()
    found.check_ready()


class NoFences(RemoteSendings):
    """Says of every fence that it is ready."""

    def name_fence(self, fence: Fence, sending: Any = None) -> FenceName | None:
        return None


def test_a_chunk_is_copied_once_its_fence_is_ready() -> None:
    with worlds(remote("tp2"), remote(), transport="shm") as world:
        check_fence(world)


@pytest.mark.slow
def test_a_fence_that_is_passed_over_is_found() -> None:
    world = World(remote(), remote(), transport="shm")
    for endpoint in world.source.endpoints:
        endpoint._sendings.__class__ = NoFences
    try:
        with pytest.raises(AssertionError):
            check_fence(world)
    finally:
        world.close()


def test_withdrawn_pages_are_free_and_come_out_of_others() -> None:
    with worlds(remote("tp2"), remote(), transport="tcp") as world:
        found = cut_in_half(world)
        for _ in range(20):  # nothing is offered in between: each looks like the one before
            withdrawals = [sending.withdraw() for sending in found.sendings.values()]
            assert all(withdrawal.wait(PATIENCE_S) for withdrawal in withdrawals)
            assert not any(sending.reading() for sending in found.sendings.values())
            found.move_source_pages()
            for sending in found.sendings.values():
                sending.resume()
        found.offer_all()
        found.commit()
        found.check_ready()


def check_stale_word(world: World) -> None:
    """The process is stopped and cannot end the second withdrawal; what it said of the first comes again."""
    found = cut_in_half(world)
    endpoint, sending = world.source.first, found.sendings[0]
    told: list[Changed] = []
    update = endpoint._update

    def keep(event: Changed) -> None:
        told.append(event)
        update(event)

    endpoint._update = keep
    assert sending.withdraw().wait(PATIENCE_S)
    [stale] = [event for event in told if event.withdrawn is not None]
    sending.resume()
    found.move_source_pages()
    process = endpoint._process.process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        found.offer((0, 2), (0, 21))
        second = sending.withdraw()
        update(stale)
        assert not second.is_quiet, "pages are given away that may still be read"
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert second.wait(PATIENCE_S)
    sending.resume()
    found.offer_all()
    found.commit()
    found.check_ready()


@pytest.mark.slow
def test_what_is_said_of_a_withdrawal_does_not_end_the_next() -> None:
    with worlds(remote(), remote(), transport="shm") as world:
        check_stale_word(world)


class BelievesAll(RemoteSendings):
    """Takes whatever is said of a withdrawal for the last one."""

    def is_last_withdrawal(self, sending: Sending, number: int) -> bool:
        return True


@pytest.mark.slow
def test_a_withdrawal_that_ends_with_the_one_before_is_found() -> None:
    world = World(remote(), remote(), transport="shm")
    world.source.first._sendings.__class__ = BelievesAll
    try:
        with pytest.raises(AssertionError, match="given away"):
            check_stale_word(world)
    finally:
        world.close()


@pytest.mark.slow
def test_a_withdrawal_ends_with_a_transfer_that_the_process_has_released() -> None:
    """What the engine says of a transfer that is over reaches nobody."""
    with worlds(remote(), remote(), transport="shm") as world:
        found = cut_in_half(world)
        sending = found.sendings[0]
        world.source.first._sendings._wire = SimpleNamespace(send=lambda call: None)
        found.offer((0, 1), (0, 4))
        withdrawal = sending.withdraw()
        found.receiving.abort("the client left")
        assert sending.wait_released(PATIENCE_S)
        assert withdrawal.wait(PATIENCE_S)
        assert not sending.reading()


def test_an_event_is_opened_also_for_a_transfer_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handle comes once, with the first chunk that names it; the next chunk may be another transfer's."""
    opened: list[tuple[int, bytes]] = []
    event = SimpleNamespace(from_ipc_handle=lambda device, handle: opened.append((device, handle)))
    monkeypatch.setattr(
        "baton.session.process.torch", lambda: SimpleNamespace(cuda=SimpleNamespace(Event=event))
    )
    server = EndpointServer.__new__(EndpointServer)
    server._handles, server._fences, server._events = {}, {}, {}
    first, again = FenceName(4, True, 1, b"handle"), FenceName(4, True, 1)
    assert server._execute(Call("ready", ((0, 1), (0, 4), None), 7, astuple(first))) is None
    assert opened == [(1, b"handle")]
    assert isinstance(server._fence(astuple(again)), HostWait)


@pytest.mark.slow
def test_an_answer_that_ended_at_the_source_reaches_the_target() -> None:
    with worlds(remote(), remote(), transport="shm") as world:
        found = world.transfer()
        found.receive()
        found.send()
        found.offer((0, 1), (0, 21))
        found.sendings[0].finish(AUX)
        assert found.outcome() == Finished(AUX)


@pytest.mark.slow
def test_both_sides_may_abort() -> None:
    with worlds(remote(), remote(), transport="shm") as world:
        found = cut_in_half(world)
        found.sendings[0].abort("preempted")
        assert found.cause().why is Why.ABORTED
        other = cut_in_half(world)
        other.receiving.abort("the client left")
        assert other.cause().why is Why.ABORTED
        world.hand_off()


@pytest.mark.slow
def test_wrong_arguments_raise_where_they_are_given() -> None:
    with worlds(remote(), remote(), transport="shm") as world:
        found = cut_in_half(world)
        with pytest.raises(ConfigError, match="in use by transfer t0"):
            world.target.first.receive(found.request([0], transfer="another"))
        with pytest.raises(ConfigError, match="its pools have 32 pages"):
            found.sendings[0].ready((0, 1), (0, 4), {"tokens": [99]})
        with pytest.raises(ConfigError, match="transfer id"):
            world.source.first.send("", found.digest)
        assert world.source.first.assign("later") == 0
        with pytest.raises(ConfigError, match="dp group 3"):
            world.source.first.assign("another", 3)
        assert world.target.first.quarantined() == {}
        found.sendings[0].abort()
        found.outcome()
        again = world.target.first.receive(found.request([0], transfer="another"))
        assert again.state == Waiting()
        again.abort()
        assert again.wait_released(PATIENCE_S)


@pytest.mark.slow
def test_a_process_that_cannot_listen_says_why() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        side = remote(options={"sockets": SocketConfig(port=taken.getsockname()[1])})
        with pytest.raises(ConfigError, match="in use"):
            World(side, side, transport="shm")


@pytest.mark.slow
def test_host_memory_from_elsewhere_is_refused() -> None:
    spec = remote().spec(CACHE)
    process = EndpointProcess(TransportConfig("shm", {}))
    pools = {name: np.zeros(size, dtype=np.uint8) for name, size in buffers(spec, 0, "pool").items()}
    try:
        with pytest.raises(ConfigError, match=r"EndpointProcess\.allocate"):
            RemoteEndpoint(EndpointConfig("p1", spec, 0, SECRET), pools, process)
    finally:
        process.close()


def test_a_killed_process_ends_the_rank() -> None:
    """The engine learns of it, its transfers fail, and the other side's too."""
    world = World(remote(), Side(staging_bytes=PLAIN), transport="shm")
    try:
        found = cut_in_half(world)
        os.kill(world.source.first._process.process.pid, signal.SIGKILL)
        until(lambda: world.source.ended, "nobody noticed")
        assert "process of rank 0 ended" in world.source.ended[0]
        for handle in (found.sendings[0], found.receiving):
            state = handle.wait(PATIENCE_S)
            assert isinstance(state, Failed)
            assert state.cause.why is Why.PEER_LOST
        with pytest.raises(LocalProtocolError, match="closed"):
            world.source.first.send("later", found.digest)
    finally:
        world.close()


@pytest.mark.slow
def test_a_process_ends_with_its_engine() -> None:
    """The kernel closes the socket of an engine that is killed; nothing else tells the process."""
    world = World(remote(), Side(staging_bytes=PLAIN), transport="shm")
    try:
        found = cut_in_half(world)
        process = world.source.first._process.process
        world.source.first._wire.hang_up()
        assert process.wait(PATIENCE_S) == 1
        state = found.receiving.wait(PATIENCE_S)
        assert isinstance(state, Failed)
    finally:
        world.close()


@pytest.mark.slow
def test_queues_are_heard_of() -> None:
    with worlds(remote(), remote(), transport="shm") as world:
        found = world.transfer()
        sending = found.sendings[0] = world.source.first.send(found.id, found.digest, is_queued=True)
        sending.queued()
        world.target.first.queue(found.id, world.source.first.address)
        found.receive()
        until(lambda: sending.is_granted, "no grant")
        assert not sending.is_target_full
        other = world.transfer()
        waiting = other.sendings[0] = world.source.first.send(other.id, other.digest, is_queued=True)
        world.target.first.queue(other.id, world.source.first.address)
        until(lambda: waiting.is_target_full, "the source does not know that the target is full")
        for transfer in (found, other):
            transfer.receivings or transfer.receive()
            transfer.offer_all()
            transfer.commit()
            transfer.check_ready()


@pytest.mark.slow
def test_the_pages_of_a_finished_transfer_are_free() -> None:
    """`reading` may name too much while a transfer is under way, and nothing once it is over."""
    with worlds(remote(), remote(), transport="shm") as world:
        found = cut_in_half(world)
        assert found.sendings[0].reading()["tokens"] == frozenset(found.source_tables[0]["tokens"].tolist())
        found.sendings[0].abort()
        found.outcome()
        assert not found.sendings[0].reading()
        done = world.hand_off()
        assert done.outcome() == Ready(AUX)
