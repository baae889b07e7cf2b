"""The streams under the ring of shm, with tensors of the host in place of a device, and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tests.transport.contract import World, apply, one_span, random_spans, spans_of
from tests.transport.subjects import StagedShm

from baton.plan.steps import Spans
from baton.transport import (
    NOW,
    Batch,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
    Ranges,
    Region,
    RevokedQuiet,
    Ticket,
    open_transport,
    wait_for_events,
)
from baton.transport.fences import CudaFence
from baton.transport.shm import ShmConfig, ShmTransport

torch = pytest.importorskip("torch", reason="torch is not installed here")
streams = pytest.importorskip("baton.transport.shm.cuda")

MIB = 1 << 20
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")


class HostStream:
    """Does everything at once."""

    def __init__(self, *, has_batches: bool) -> None:
        self.has_batches = has_batches
        self.num_batches = 0
        self.were_slept_for: list[bool] = []

    def copy(self, spans: Spans, source: int, target: int) -> bool:
        self.num_batches += self.has_batches
        if self.has_batches:
            for read, write, length in zip(spans.source, spans.target, spans.length, strict=True):
                ctypes.memmove(target + int(write), source + int(read), int(length))
        return self.has_batches

    def enter(self) -> None:
        return

    def wait(self, event: Any) -> None:
        event.synchronize()

    def record(self, *, is_blocking: bool) -> HostStream:
        self.were_slept_for.append(is_blocking)
        return self

    def synchronize(self) -> None:
        return


class PassedEvent:
    """An event that has come, and who waited for it."""

    def __init__(self) -> None:
        self.waiters: list[str] = []

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.waiters.append(threading.current_thread().name)


class HostDevice:
    """Tensors of the host in place of a device."""

    device = torch.device("cpu")

    def __init__(self, *, has_batches: bool = False) -> None:
        self.num_pinned = 0
        self.has_batches = has_batches
        self.streams: list[HostStream] = []

    def tensor(self, memory: Any) -> Any:
        return torch.from_numpy(memory.bytes)

    def open_stream(self) -> HostStream:
        self.streams.append(HostStream(has_batches=self.has_batches))
        return self.streams[-1]

    @property
    def num_batches(self) -> int:
        return sum(stream.num_batches for stream in self.streams)

    def pinned(self, num_elements: int) -> Any:
        return torch.empty(num_elements, dtype=torch.int64)

    def pin(self, buffer: np.ndarray) -> None:
        self.num_pinned += 1

    def unpin(self, buffer: np.ndarray) -> None:
        self.num_pinned -= 1


class BrokenStream(HostStream):
    def record(self, *, is_blocking: bool) -> HostStream:
        raise RuntimeError("out of order")


class BrokenDevice(HostDevice):
    def open_stream(self) -> HostStream:
        return BrokenStream(has_batches=False)


@dataclass
class Pair:
    """Two transports of this process with a connection from one to the other."""

    source: ShmTransport
    target: ShmTransport

    def connect(self, region: Region) -> tuple[Peer, Peer]:
        """The target as the source names it, and the other way round."""
        invitation = self.target.invite()
        self.target.grant(invitation.peer, region, Ranges.whole(region))
        return self.source.connect(invitation.description), invitation.peer

    def outcome(self, timeout_s: float = 20.0) -> Any:
        limit_s = time.monotonic() + timeout_s
        while time.monotonic() < limit_s:
            for event in wait_for_events(self.source, 1.0):
                if isinstance(event, Done | FailedQuiet | FailedUnknown):
                    return event
        raise AssertionError(f"no ticket ended in {timeout_s} s")


def stand_in(device: HostDevice) -> ShmTransport:
    transport = StagedShm(ShmConfig(slot_bytes=1 << 16, num_slots=4))
    transport.staging = replace(
        transport.staging, open_copier=lambda memory, ring: streams.StreamCopier(device, ring)
    )
    return transport


@contextlib.contextmanager
def paired(source: ShmTransport, target: ShmTransport) -> Iterator[Pair]:
    try:
        yield Pair(source, target)
    finally:
        source.close()
        target.close()


SPANS = {
    "random": random_spans(1, MIB, MIB, 5000),
    "short": random_spans(2, MIB, MIB, 40),
    "equal": spans_of(
        np.arange(60)[::-1] * 4096, np.random.default_rng(3).permutation(200)[:60] * 4096, [4096] * 60
    ),
    "odd": spans_of(
        np.arange(99) * 1001, np.random.default_rng(4).permutation(500)[:99] * 1003 + 1, [1001] * 99
    ),
    "few": spans_of([7, 70000, 300], [500000, 3, 100], [300000, 5, 1]),
    "whole": one_span(MIB),
    "long": spans_of(np.arange(12)[::-1] * 40_000, np.arange(12) * 50_001, [40_000] * 12),
    "same place": spans_of([64] * 20, np.arange(20) * 128, [128] * 20),
}


def check_content(pair: Pair, spans: Spans, source: Any, target: Any) -> None:
    """Sends and compares; `source` and `target` are tensors of MIB bytes."""
    expected = target.cpu().numpy().copy()
    apply(spans, source.cpu().numpy(), expected)
    from_region, to_region = pair.source.register(source), pair.target.register(target)
    peer, _ = pair.connect(to_region)
    ticket = pair.source.submit(peer, Batch(from_region, to_region.remote, spans), NOW)
    assert pair.outcome() == Done(ticket)
    assert np.array_equal(target.cpu().numpy(), expected)


def noise(device: str = "cpu", num_bytes: int = MIB) -> Any:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).to(device)


LONG = ("few", "whole", "long")
"""Spans that are copied one by one where many can be by one call."""


@pytest.mark.parametrize("has_batches", [False, True])
@pytest.mark.parametrize("name", SPANS)
def test_content_through_streams(name: str, has_batches: bool):
    devices = HostDevice(has_batches=has_batches), HostDevice(has_batches=has_batches)
    with paired(stand_in(devices[0]), stand_in(devices[1])) as pair:
        target = torch.zeros(MIB, dtype=torch.uint8)
        check_content(pair, SPANS[name], noise(), target)
        assert [device.num_pinned for device in devices] == [1, 1]
        assert [device.num_batches > 0 for device in devices] == [has_batches and name in LONG] * 2
    assert [device.num_pinned for device in devices] == [0, 0]


def test_short_copies_are_spun_for_once_they_are_computed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "SHORT_BYTES", 1 << 15)
    device, fence = HostDevice(has_batches=True), PassedEvent()
    with paired(stand_in(device), stand_in(HostDevice())) as pair:
        loaded = pair.source.register(noise())
        region = pair.target.register(torch.zeros(MIB, dtype=torch.uint8))
        peer, _ = pair.connect(region)
        for spans in (one_span(1 << 16), one_span(1 << 15), one_span(1 << 14)):
            batch = Batch(loaded, region.remote, spans)
            ticket = pair.source.submit(peer, batch, CudaFence(fence))
            assert pair.outcome() == Done(ticket)
    slept_for = [each for stream in device.streams for each in stream.were_slept_for]
    # The last one is too short to be a copy of its own.
    assert sorted(slept_for) == [False, True, True]
    assert [name for name in fence.waiters if name.startswith("shm-staged")] == ["shm-staged-cpu"]


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_device_that_fails_ends_the_batch(side: str):
    source = stand_in(BrokenDevice() if side == "source" else HostDevice())
    target = stand_in(BrokenDevice() if side == "target" else HostDevice())
    with paired(source, target) as pair:
        region, loaded = target.register(np.zeros(MIB, dtype=np.uint8)), source.register(noise())
        peer, writer = pair.connect(region)
        source.submit(peer, Batch(loaded, region.remote, one_span(MIB)), NOW)
        assert isinstance(pair.outcome(), FailedQuiet if side == "source" else FailedUnknown)
        source.submit(peer, Batch(loaded, region.remote, one_span(MIB)), NOW)
        assert isinstance(pair.outcome(), FailedQuiet)
        assert isinstance(target.revoke(writer), RevokedQuiet) == (side == "source")


@gpu
@pytest.mark.parametrize("places", [("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
@pytest.mark.parametrize("name", SPANS)
def test_content_on_a_gpu(name: str, places: tuple[str, str]):
    options = {"slot_bytes": 1 << 16, "num_slots": 4}
    with paired(open_transport("shm", **options), open_transport("shm", **options)) as pair:
        target = torch.zeros(MIB, dtype=torch.uint8, device=places[1])
        check_content(pair, SPANS[name], noise(places[0]), target)


@gpu
def test_tensors_of_any_shape_on_a_gpu():
    with paired(open_transport("shm"), open_transport("shm")) as pair:
        source = torch.randn(64, 32, 256, dtype=torch.bfloat16).to("cuda")
        target = torch.zeros(256, 64, 32, dtype=torch.bfloat16, device="cuda")
        region, loaded = pair.target.register(target), pair.source.register(source)
        peer, _ = pair.connect(region)
        ticket = pair.source.submit(peer, Batch(loaded, region.remote, one_span(MIB)), NOW)
        assert pair.outcome() == Done(ticket)
        assert torch.equal(target.view(-1), source.view(-1))


@gpu
def test_the_stream_waits_for_the_fence():
    with paired(open_transport("shm"), open_transport("shm")) as pair:
        source = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        target = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
        region, loaded = pair.target.register(target), pair.source.register(source)
        peer, _ = pair.connect(region)
        batch = Batch(loaded, region.remote, one_span(64 * MIB))
        first = pair.source.submit(peer, batch, NOW)
        assert pair.outcome() == Done(first)
        compute = torch.cuda.Stream()
        with torch.cuda.stream(compute):
            torch.cuda._sleep(1_000_000_000)
            source.fill_(9)
            event = torch.cuda.Event(blocking=True)
            event.record(compute)
        ticket = pair.source.submit(peer, batch, CudaFence(event), deadline_s=0.1)
        assert not event.query(), "submit did not wait for the fence"
        assert pair.outcome() == Done(ticket)
        assert bool((target == 9).all())


@gpu
def test_a_killed_source_is_quiet_on_a_gpu():
    with World("shm") as world:
        writer, target = world.remote_source(), world.source.transport
        region = target.register(torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"))
        invitation = target.invite()
        target.grant(invitation.peer, region, Ranges.whole(region))
        peer = writer.call("connect", invitation.description)
        source = writer.call("load", 64 * MIB, 1)
        for _ in range(50):
            writer.call("send", peer, source, region.remote, one_span(64 * MIB))
        time.sleep(0.1)
        writer.kill()
        assert isinstance(target.revoke(invitation.peer), RevokedQuiet)


@gpu
def test_a_killed_target_ends_every_ticket_on_a_gpu():
    with World("shm") as world:
        target, source = world.remote_target(), world.source.transport
        link = world.link(target, 64 * MIB)
        loaded = source.register(torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda"))
        tickets: list[Ticket] = [link.send(loaded, one_span(64 * MIB)) for _ in range(50)]
        time.sleep(0.1)
        target.kill()
        ended = world.source.events(len(tickets), 1.0)
        assert {event.ticket for event in ended} == set(tickets)
