"""The ring of shm between host memory: its guarantees beyond the contract."""

import signal
import threading
import time

import numpy as np
import pytest
from tests.transport.contract import World, completions, expect_done, expect_failed, one_span, spans_of

from baton.errors import ConfigError
from baton.transport import (
    Done,
    FailedQuiet,
    FailedUnknown,
    Ranges,
    RevokedQuiet,
    open_transport,
)
from baton.transport.fences import CudaFence

MIB = 1 << 20


class HostEvent:
    """Stands in for a CUDA event."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def query(self) -> bool:
        return self.happened.is_set()

    def synchronize(self) -> None:
        self.happened.wait()


def test_spans_that_were_not_granted_touch_nothing():
    with World("shm-staged") as world:
        link = world.link(world.target(), MIB, is_granted=False)
        ranges = Ranges(np.array([100]), np.array([1000]))
        link.target.call("grant", link.writer, link.region.number, ranges)
        source = world.source.load(MIB, 1)
        expect_done(world.source, [link.send(source, one_span(1000, 0, 100))])
        before = link.content().copy()
        expect_failed(world.source, [link.send(source, spans_of([5, 5], [100, 1090], [10, 11]))])
        assert np.array_equal(before, link.content())


def test_a_source_that_goes_through_a_ring_is_never_unchecked():
    with World("shm-staged") as world:
        link = world.link(world.target(), MIB)
        expect_done(world.source, [link.send(world.source.load(MIB, 1), one_span(MIB))])
        assert not link.target.call("is_unchecked", link.writer, link.region.number)


def test_a_living_source_is_quiet_once_its_grant_is_taken_back():
    with World("shm-staged") as world:
        link = world.link(world.target(), 16 * MIB, is_granted=False)
        number = link.target.call("grant", link.writer, link.region.number)
        source = world.source.load(16 * MIB, 1)
        expect_done(world.source, [link.send(source, one_span(1))])
        tickets = [link.send(source, one_span(16 * MIB)) for _ in range(20)]
        assert isinstance(link.target.call("ungrant", link.writer, number), RevokedQuiet)
        before = link.content().copy()
        world.source.buffers[source.number][:] = 0
        completions(world.source, tickets)
        assert np.array_equal(before, link.content())


def test_a_stopped_source_is_quiet():
    with World("shm-staged") as world:
        target, writer = world.target(), world.remote_source()
        region, source = target.call("expose", 64 * MIB), writer.call("load", 64 * MIB, 1)
        invitation = target.call("invite")
        target.call("grant", invitation.peer, region.number)
        peer = writer.call("connect", invitation.description)
        for _ in range(50):
            writer.call("send", peer, source, region, one_span(64 * MIB))
        writer.signal(signal.SIGSTOP)
        assert isinstance(target.call("revoke", invitation.peer), RevokedQuiet)
        before = target.call("digest", region.number)
        writer.signal(signal.SIGCONT)
        time.sleep(0.2)
        assert before == target.call("digest", region.number)


def test_a_batch_cancelled_behind_its_fence_is_quiet_before_the_fence_comes():
    with World("shm-staged") as world:
        link = world.link(world.target(), 16 * MIB)
        source = world.source.load(16 * MIB, 1)
        event = HostEvent()
        ticket = link.send(source, one_span(16 * MIB), fence=CudaFence(event))
        time.sleep(0.1)
        world.source.transport.cancel(ticket)
        assert isinstance(completions(world.source, [ticket])[ticket], FailedQuiet)
        event.happened.set()
        expect_done(world.source, [link.send(source, one_span(MIB, 0, MIB))])
        content = link.content()
        assert not content[:MIB].any()
        assert not content[2 * MIB :].any()


def test_a_slow_fence_does_not_fail_the_batch():
    with World("shm-staged") as world:
        link = world.link(world.target(), 16 * MIB)
        source = world.source.load(16 * MIB, 1)
        event = HostEvent()
        fenced = link.send(source, one_span(16 * MIB), fence=CudaFence(event), deadline_s=2.0)
        queued = link.send(source, one_span(16 * MIB), deadline_s=2.0)
        assert world.source.events(1, 2.5) == []
        world.source.buffers[source.number][:] = 7
        event.happened.set()
        expect_done(world.source, [fenced, queued])
        assert (link.content() == 7).all()


def test_what_a_stopped_target_has_is_unknown_and_what_it_has_not_is_quiet():
    with World("shm-staged") as world:
        target = world.remote_target()
        link = world.link(target, 64 * MIB)
        source = world.source.load(64 * MIB, 1)
        expect_done(world.source, [link.send(source, one_span(1))])
        target.signal(signal.SIGSTOP)
        tickets = [link.send(source, one_span(32 * MIB), deadline_s=0.5) for _ in range(3)]
        ended = completions(world.source, tickets)
        assert isinstance(ended[tickets[0]], FailedUnknown)
        assert {type(ended[ticket]) for ticket in tickets[1:]} == {FailedQuiet}
        target.signal(signal.SIGCONT)
        expect_done(world.source, [link.send(source, one_span(64 * MIB))])
        assert np.array_equal(link.content(), world.source.buffers[source.number])


def test_a_batch_without_spans_is_done():
    with World("shm-staged") as world:
        link = world.link(world.target(), MIB)
        source = world.source.load(MIB, 1)
        expect_done(world.source, [link.send(source, spans_of([], [], []))])
        assert not link.content().any()


@pytest.mark.parametrize("options", [{"num_slots": 1}, {"slot_bytes": 5000}])
def test_ring_shape_is_checked(options: dict[str, int]):
    with pytest.raises(ConfigError):
        open_transport("shm", **options)


def test_a_cuda_fence_calls_back_where_no_stream_can_wait():
    with World("shm") as world:
        link = world.link(world.target(), MIB)
        source = world.source.load(MIB, 1)
        event = HostEvent()
        ticket = link.send(source, one_span(MIB), fence=CudaFence(event))
        assert world.source.events(1, 0.2) == []
        event.happened.set()
        assert world.source.events(1, 60.0) == [Done(ticket)]
        assert CudaFence(event).is_ready()
