"""What cuda_ipc promises beyond the contract, without a GPU where host memory can stand in, and on one."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.transport import checks
from tests.transport.contract import CHECKS, World, apply, completions, expect_done, one_span, spans_of
from tests.transport.ends import End
from tests.transport.host_ipc import HostIpc, HostStream, StreamEvent
from tests.transport.test_shm_cuda import SPANS, Pair

from baton.errors import ConfigError, TransportError
from baton.transport import (
    NOW,
    Batch,
    CudaFence,
    Done,
    FailedQuiet,
    FailedUnknown,
    RevokedQuiet,
    RevokedUnknown,
    cuda_ipc,
    open_transport,
)
from baton.transport.common.regions import Memory
from baton.transport.cuda_ipc import source as ipc_source

torch = pytest.importorskip("torch", reason="torch is not installed here")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
MIB = 1 << 20


@contextmanager
def paired(source: Any, target: Any) -> Iterator[Pair]:
    try:
        yield Pair(source, target)
    finally:
        source.close()
        target.close()


def host_pair(open_stream: Any = HostStream) -> Any:
    return paired(HostIpc(open_stream), HostIpc())


def send(pair: Pair, num_bytes: int, **how: Any) -> Any:
    """One batch of host memory, submitted; the ticket, and the target's peer for the source."""
    region = pair.target.register(pair.target.allocate(num_bytes))
    loaded = pair.source.register(np.ones(num_bytes, dtype=np.uint8))
    peer, writer = pair.connect(region)
    fence = how.pop("fence", NOW)
    return pair.source.submit(peer, Batch(loaded, region.remote, one_span(num_bytes)), fence, **how), writer


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_it_says_what_it_needs():
    with pytest.raises(ConfigError, match=r"cuda_ipc needs a GPU.*use shm"):
        open_transport("cuda_ipc")


def test_the_kernel_was_made_from_its_source():
    folder = Path(cuda_ipc.__file__).parent
    digest = hashlib.sha256((folder / "copy_spans.cu").read_bytes()).hexdigest()[:16]
    assert digest in (folder / "copy_spans.ptx").read_text().splitlines()[1], "its head says how to make it"


def test_memory_that_cannot_be_shared_is_not_registered(monkeypatch: pytest.MonkeyPatch):
    def refuse(memory: Memory) -> None:
        raise TransportError("this memory cannot be shared")

    with host_pair() as pair:
        monkeypatch.setattr(pair.target.device_memory, "export", refuse)
        buffer = pair.target.allocate(100)
        with pytest.raises(TransportError, match="cannot be shared"):
            pair.target.register(buffer)
        assert pair.target.regions.find(1) is None


def test_memory_that_cannot_be_mapped_fails_quietly():
    with host_pair() as pair:
        region = pair.target.register(np.zeros(100, dtype=np.uint8))  # not allocated to be shared
        peer, _ = pair.connect(region)
        loaded = pair.source.register(np.ones(100, dtype=np.uint8))
        pair.source.submit(peer, Batch(loaded, region.remote, one_span(100)), NOW)
        failed = pair.outcome()
        assert isinstance(failed, FailedQuiet)
        assert "cannot be mapped" in failed.cause


class FailingStream(HostStream):
    """A device that fails with a copy under way."""

    def record(self, *, is_blocking: bool) -> StreamEvent:
        raise RuntimeError("an illegal memory access was encountered")


def test_a_source_whose_device_failed_is_never_quiet():
    with host_pair(FailingStream) as pair:
        ticket, writer = send(pair, MIB)
        failed = pair.outcome()
        assert isinstance(failed, FailedUnknown)
        assert "illegal memory access" in failed.cause
        assert failed.ticket == ticket
        assert isinstance(pair.target.revoke(writer), RevokedUnknown)


class StuckStream(HostStream):
    """Copies that take longer than anybody waits, until they are let go."""

    def __init__(self, source: Memory) -> None:
        super().__init__(source)
        self.gate = StreamEvent()
        STUCK.append(self)

    def run(self, *arguments: Any) -> None:
        self.gate.synchronize()
        super().run(*arguments)


STUCK: list[StuckStream] = []


def test_a_device_that_hangs_ends_the_batch_unknown_and_is_not_quiet_before_it_moves():
    STUCK.clear()
    with host_pair(StuckStream) as pair:
        _, writer = send(pair, MIB, deadline_s=0.2)
        assert isinstance(pair.outcome(), FailedUnknown)
        assert isinstance(pair.target.revoke(writer), RevokedUnknown)
        STUCK[0].gate.passed.set()
        wait_until_quiet(pair.target, writer)


def test_the_deadline_does_not_count_before_the_fence():
    with host_pair() as pair:
        fence = StreamEvent()
        ticket, _ = send(pair, MIB, deadline_s=0.1, fence=CudaFence(fence))
        time.sleep(0.4)
        assert not pair.source.poll()
        fence.passed.set()
        assert pair.outcome() == Done(ticket)


def test_a_dead_source_is_not_quiet_while_a_child_of_it_lives():
    with World("cuda_ipc-host") as world:
        target, writer = world.target(), world.remote_source()
        invitation, region = target.call("invite"), target.call("expose", MIB)
        target.call("grant", invitation.peer, region.number)
        peer = writer.call("connect", invitation.description)
        writer.call("send", peer, writer.call("load", MIB, 1), region, one_span(MIB))
        assert writer.call("events", 1, 60.0)
        child = writer.call("fork")
        writer.kill()
        assert isinstance(target.call("revoke", invitation.peer), RevokedUnknown)
        os.kill(child, signal.SIGKILL)
        wait_until_quiet(Called(target), invitation.peer)


class Called:
    """A remote end with the methods of a transport."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def revoke(self, peer: Any) -> Any:
        return self.handle.call("revoke", peer)


def wait_until_quiet(target: Any, peer: Any, timeout_s: float = 60.0) -> None:
    limit_s = time.monotonic() + timeout_s
    while not isinstance(result := target.revoke(peer), RevokedQuiet):
        assert time.monotonic() < limit_s, result
        time.sleep(0.01)


class LeavesEarly(HostIpc):
    """Says that it left while its stream still copies."""

    def open_connection(self, peer: Any, description: Any) -> Any:
        connection = super().open_connection(peer, description)
        connection.unmap = lambda: True
        return connection


class SlowStream(HostStream):
    delay_s = 0.3


@pytest.mark.long
def test_the_contract_catches_a_source_that_leaves_early(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ipc_source, "SHORT_BYTES", 0)  # the worker waits for what is short
    with World("cuda_ipc-host") as world:
        world.source.close()
        world.source = End(LeavesEarly(SlowStream))
        with pytest.raises(AssertionError, match="bytes moved after"):
            CHECKS["revoked_peer_is_quiet"].run(world)


@contextmanager
def gpu_pair() -> Iterator[Pair]:
    with paired(open_transport("cuda_ipc"), open_transport("cuda_ipc")) as pair:
        yield pair


@gpu
@pytest.mark.parametrize("name", SPANS)
def test_content_on_a_gpu(name: str):
    with World("cuda_ipc") as world:
        source, link = world.source.load(MIB, 3), world.link(world.target(), MIB)
        expect_done(world.source, [link.send(source, SPANS[name])])
        expected = np.zeros(MIB, dtype=np.uint8)
        apply(SPANS[name], world.source.buffers[source.number], expected)
        assert np.array_equal(link.content(), expected)


@gpu
def test_pools_of_any_shape_at_any_place_of_an_allocation():
    with gpu_pair() as pair:
        torch.empty(3, device="cuda")
        pools = torch.zeros(4, 256, 64, 32, dtype=torch.bfloat16, device="cuda")
        source = torch.randn(64, 32, 256, device="cuda").to(torch.bfloat16)
        region, loaded = pair.target.register(pools[2]), pair.source.register(source)
        peer, _ = pair.connect(region)
        torch.cuda.synchronize()
        ticket = pair.source.submit(peer, Batch(loaded, region.remote, one_span(MIB)), NOW)
        assert pair.outcome() == Done(ticket)
        assert torch.equal(pools[2].view(-1), source.view(-1))
        assert not pools[[0, 1, 3]].any()


@gpu
@pytest.mark.parametrize("num_spans", [1, 64])
def test_the_stream_waits_for_the_fence(num_spans: int):
    with gpu_pair() as pair:
        source = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        target = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        region, loaded = pair.target.register(target), pair.source.register(source)
        peer, _ = pair.connect(region)
        length = 64 * MIB // num_spans
        at = np.arange(num_spans) * length
        batch = Batch(loaded, region.remote, spans_of(at[::-1], at, [length] * num_spans))
        assert pair.source.submit(peer, batch, NOW) == pair.outcome().ticket
        compute = torch.cuda.Stream()
        with torch.cuda.stream(compute):
            torch.cuda._sleep(1_000_000_000)
            source.fill_(9)
            event = torch.cuda.Event(blocking=True)
            event.record(compute)
        ticket = pair.source.submit(peer, batch, CudaFence(event), deadline_s=0.1)
        assert not event.query()
        assert pair.outcome() == Done(ticket)
        assert bool((target == 9).all())


@gpu
def test_host_memory_is_refused():
    with gpu_pair() as pair, pytest.raises(TransportError, match="cuda_ipc moves cuda memory"):
        pair.source.register(np.zeros(10))


@gpu
@pytest.mark.parametrize("forks", ["no", "before connecting", "after connecting"])
def test_a_killed_source_writes_nothing_after_quiet_on_a_gpu(forks: str):
    with World("cuda_ipc") as world:
        writer, target = world.remote_source(), world.source
        region = target.expose(256 * MIB)
        invitation = target.invite()
        target.grant(invitation.peer, region.number)
        sources = [writer.call("load", 256 * MIB, seed) for seed in (1, 2)]
        children = [writer.call("fork")] if forks == "before connecting" else []
        peer = writer.call("connect", invitation.description)
        writer.call("send", peer, sources[0], region, one_span(1))
        assert writer.call("events", 1, 60.0)
        children += [writer.call("fork")] if forks == "after connecting" else []
        try:
            for index in range(2000):
                writer.call("send", peer, sources[index % 2], region, one_span(256 * MIB))
            writer.kill()
            if forks == "after connecting":
                assert isinstance(target.revoke(invitation.peer), RevokedUnknown)
        finally:
            for child in children if forks == "after connecting" else []:
                os.kill(child, signal.SIGKILL)
        wait_until_quiet(target, invitation.peer)
        array = target.buffers[region.number]
        array.tensor.zero_()
        torch.cuda.synchronize()
        for _ in range(5):
            time.sleep(0.02)
            assert not bool(array.tensor.any()), "bytes moved after it was quiet"
        for child in children if forks == "before connecting" else []:
            os.kill(child, signal.SIGKILL)


@gpu
def test_a_killed_target_ends_every_ticket_on_a_gpu():
    with World("cuda_ipc") as world:
        target = world.remote_target()
        link, source = world.link(target, 64 * MIB), world.source.load(64 * MIB, 1)
        expect_done(world.source, [link.send(source, one_span(1))])
        tickets = [link.send(source, one_span(64 * MIB)) for _ in range(50)]
        target.kill()
        for ended in completions(world.source, tickets, checks.HANGS_S).values():
            assert isinstance(ended, Done | FailedQuiet), ended
