"""What throttled adds to the contract: Done when a link of that speed would have delivered, not before."""

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport import broken_wrappers as broken
from tests.transport.clocks import VirtualClock
from tests.transport.contract import (
    Link,
    completions,
    expect_done,
    one_span,
    random_spans,
    spans_of,
)
from tests.transport.ends import End, LocalEnd
from tests.transport.faulty import Faulty, FaultyConfig

from baton.errors import ConfigError, TransportError
from baton.transport import (
    Completion,
    Done,
    FailedQuiet,
    HostFence,
    Transport,
    open_transport,
    wait_for_events,
)
from baton.transport.throttled import LinkItem, Throttled, ThrottledConfig
from baton.transport.throttled import LinkSchedule as ThrottledLink

KIB, MIB = 1 << 10, 1 << 20
SLOW = ThrottledConfig(bytes_per_s=MIB, latency_s=0.5)
NOTHING_S = 0.05
"""How long a test listens before it believes that nothing is coming."""
SOMETHING_S = 60.0
"""How long it waits for what has to come."""

Open = Callable[..., Transport]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def link_over(
    stack: ExitStack, transport: Transport, num_bytes: int = 4 * MIB, inner: str = "memory"
) -> Link:
    """A connection over this source to a plain target of the same process."""
    source, target = End(transport), LocalEnd(inner, None, {})
    stack.callback(target.end)
    stack.callback(source.close)
    return link_to(source, target, num_bytes)


def link_to(source: End, target: LocalEnd, num_bytes: int) -> Link:
    region, invitation = target.call("expose", num_bytes), target.call("invite")
    target.call("grant", invitation.peer, region.number)
    return Link(source, target, source.connect(invitation.description), invitation.peer, region)


def events_at(transport: Transport, clock: VirtualClock, when_s: float, count: int = 0) -> list[Completion]:
    """What is reported when the clock shows this time; `count` events are waited for, as the inner transport
    needs time of its own."""
    clock.advance(when_s)
    events: list[Completion] = []
    limit_s = time.monotonic() + SOMETHING_S
    while len(events) < count and time.monotonic() < limit_s:
        events += wait_for_events(transport, limit_s - time.monotonic())
    return events if count else wait_for_events(transport, NOTHING_S)


# The link alone.


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**9)), min_size=1, max_size=30),
    st.floats(1e3, 1e10),
    st.floats(0, 3),
)
def test_a_link_is_the_formula(gaps, bytes_per_s, latency_s):
    sim_link: ThrottledLink[LinkItem] = ThrottledLink(bytes_per_s, latency_s)
    now_s = free_s = 0.0
    expected: dict[LinkItem, float] = {}
    due: dict[LinkItem, float] = {}
    for gap_s, num_bytes in gaps:
        now_s += gap_s
        due |= {item: expected[item] for item in sim_link.take_due(now_s)}
        assert all(due_s <= now_s for due_s in due.values())
        item = LinkItem(num_bytes, has_arrived=True)
        free_s = max(free_s, now_s) + num_bytes / bytes_per_s
        expected[item] = free_s + latency_s
        sim_link.put(item, now_s)
    while (due_s := sim_link.next_due_s()) < math.inf:
        assert not sim_link.take_due(math.nextafter(due_s, -math.inf))
        due |= dict.fromkeys(sim_link.take_due(due_s), due_s)
    assert due == expected


def test_a_dropped_item_gives_its_time_back():
    sim_link: ThrottledLink[LinkItem] = ThrottledLink(10.0, 1.0)
    first, second, third = (LinkItem(100, has_arrived=True) for _ in range(3))
    for item in (first, second, third):
        sim_link.put(item, 0.0)
    sim_link.drop(second, 2.0)
    sim_link.drop(first, 4.0)
    assert sim_link.next_due_s() == 4.0 + 10.0 + 1.0
    assert sim_link.take_due(15.0) == [third]


# Under a clock that stands.


def check_on_time(make: Open, stack: ExitStack) -> None:
    """Two batches share the link, one is late at it and one finds it idle; to the tick."""
    clock = VirtualClock()
    transport = make(open_transport("memory"), SLOW, clock)
    link = link_over(stack, transport)
    source = link.source.load(MIB, 1)
    first, second = link.send(source, one_span(MIB)), link.send(source, one_span(MIB // 2))
    fence = HostFence()
    fenced = link.send(source, one_span(MIB), fence=fence)
    assert events_at(transport, clock, 1.499) == [], "early"
    assert events_at(transport, clock, 1.5, 1) == [Done(first)]
    assert events_at(transport, clock, 1.75) == []
    fence.set()
    assert events_at(transport, clock, 1.999) == [], "early"
    assert events_at(transport, clock, 2.0, 1) == [Done(second)]
    assert events_at(transport, clock, 3.249) == [], "a fence counts from when it is ready"
    assert events_at(transport, clock, 3.25, 1) == [Done(fenced)]
    clock.advance(10.0)
    idle = link.send(source, one_span(MIB))
    assert events_at(transport, clock, 11.499) == [], "early"
    (done,) = events_at(transport, clock, 11.5, 1)
    assert done == Done(idle)
    assert done.at_s == 11.5


def test_done_is_on_time(stack: ExitStack):
    check_on_time(Throttled, stack)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        broken.ReportsEarly,
        broken.HasNoQueue,
        broken.ForgetsLatency,
        broken.CountsFromSubmission,
        broken.IsSlow,
    ],
    ids=lambda kind: kind.__name__,
)
def test_what_is_not_on_time_is_caught(make: Open, stack: ExitStack):
    with pytest.raises(AssertionError):
        check_on_time(make, stack)


def check_done_is_true(make: Open, stack: ExitStack) -> None:
    """Where the inner transport is slower than the link, Done waits for it."""
    clock, inner_clock = VirtualClock(), VirtualClock()
    late = FaultyConfig(seed=1, delay_probability=1.0, delay_s_max=4.0)
    transport = make(Faulty(open_transport("memory"), late, inner_clock), SLOW, clock)
    link = link_over(stack, transport)
    source = link.source.load(MIB, 1)
    ticket = link.send(source, one_span(MIB))
    assert events_at(transport, clock, 5.0) == [], "Done, and not there"
    assert not link.content().any()
    inner_clock.advance(4.0)
    (done,) = wait_for_events(transport, SOMETHING_S)
    assert done == Done(ticket)
    assert done.at_s == 5.0, "it was due before it was there"
    assert np.array_equal(link.content()[:MIB], link.source.buffers[source.number])


def test_done_is_true_when_the_inner_transport_is_slower(stack: ExitStack):
    check_done_is_true(Throttled, stack)


@pytest.mark.long
def test_done_without_the_bytes_is_caught(stack: ExitStack):
    with pytest.raises(AssertionError):
        check_done_is_true(broken.ReportsUnarrived, stack)


def test_peers_share_the_link(stack: ExitStack):
    clock = VirtualClock()
    transport = Throttled(open_transport("memory"), SLOW, clock)
    one = link_over(stack, transport)
    other = link_to(one.source, one.target, MIB)
    source = one.source.load(MIB, 1)
    first, second = (link.send(source, one_span(MIB)) for link in (one, other))
    assert events_at(transport, clock, 1.49) == []
    assert events_at(transport, clock, 1.5, 1) == [Done(first)]
    assert events_at(transport, clock, 2.49) == []
    assert events_at(transport, clock, 2.5, 1) == [Done(second)]


def check_cancel(make: Open, stack: ExitStack) -> None:
    """A cancelled batch ends at once, and the next one has its time on the link."""
    clock = VirtualClock()
    transport = make(open_transport("memory"), SLOW, clock)
    link = link_over(stack, transport)
    source = link.source.load(MIB, 1)
    first, second = link.send(source, one_span(MIB)), link.send(source, one_span(MIB))
    assert events_at(transport, clock, 0.25) == []
    transport.cancel(first)
    assert [type(event) for event in events_at(transport, clock, 0.25, 1)] == [FailedQuiet]
    assert events_at(transport, clock, 1.749) == []
    assert events_at(transport, clock, 1.75, 1) == [Done(second)]
    transport.cancel(second)
    assert events_at(transport, clock, 9.0) == []


def test_a_cancelled_batch_leaves_the_link(stack: ExitStack):
    check_cancel(Throttled, stack)


@pytest.mark.long
def test_a_cancelled_batch_that_stays_is_caught(stack: ExitStack):
    with pytest.raises(AssertionError):
        check_cancel(broken.KeepsCancelled, stack)


@pytest.mark.parametrize("how", ["close", "disconnect"])
def test_what_the_link_holds_back_ends_quietly(how: str, stack: ExitStack):
    clock = VirtualClock()
    transport = Throttled(open_transport("memory"), SLOW, clock)
    link = link_over(stack, transport)
    source = link.source.load(MIB, 1)
    tickets = [link.send(source, one_span(MIB)) for _ in range(3)]
    tickets.append(link.send(source, one_span(MIB), fence=HostFence()))
    assert events_at(transport, clock, 1.5, 1) == [Done(tickets[0])]
    if how == "close":
        transport.close()
    else:
        transport.disconnect(link.peer)
    ended = transport.poll()
    assert [type(event) for event in ended] == [FailedQuiet] * 3
    assert {event.ticket for event in ended} == set(tickets[1:])
    clock.advance(99.0)
    assert transport.poll() == []
    with pytest.raises(TransportError):
        link.send(source, one_span(1))


def test_failures_do_not_wait_for_the_link(stack: ExitStack):
    clock = VirtualClock()
    transport = Throttled(open_transport("memory"), SLOW, clock)
    link = link_over(stack, transport)
    source = link.source.load(MIB, 1)
    fence = HostFence()
    done = link.send(source, one_span(MIB))
    failed = link.send(source, one_span(MIB), fence=fence)
    assert events_at(transport, clock, 0.0) == []
    link.target.call("revoke", link.writer)
    fence.set()
    assert [(type(event), event.ticket) for event in wait_for_events(transport, SOMETHING_S)] == [
        (FailedQuiet, failed)
    ]
    assert events_at(transport, clock, 1.5, 1) == [Done(done)]


# Under the system's clock.


def check_never_early(make: Open, stack: ExitStack) -> None:
    """A caller never sees Done before the link would have delivered, whatever the size."""
    config = ThrottledConfig(1e9, 50e-6)
    transport = make(open_transport("memory"), config)
    link = link_over(stack, transport, 64 * MIB)
    source = link.source.load(64 * MIB, 1)
    for num_bytes in (64 * KIB, MIB, 8 * MIB, 64 * MIB):
        ideal_s = num_bytes / config.bytes_per_s + config.latency_s
        started_s = time.monotonic()
        ticket = link.send(source, one_span(num_bytes))
        assert wait_for_events(transport, SOMETHING_S) == [Done(ticket)]
        assert time.monotonic() - started_s >= ideal_s, f"{num_bytes} bytes: early"


def test_done_is_never_early(stack: ExitStack):
    check_never_early(Throttled, stack)


@pytest.mark.long
def test_early_done_is_caught(stack: ExitStack):
    with pytest.raises(AssertionError):
        check_never_early(broken.ReportsEarly, stack)


def test_small_batches_stay_below_the_rate(stack: ExitStack):
    config = ThrottledConfig(0.5e9, 50e-6)
    transport = Throttled(open_transport("memory"), config)
    link = link_over(stack, transport, MIB)
    source = link.source.load(MIB, 1)
    started_s = time.monotonic()
    tickets = [link.send(source, one_span(256 * KIB)) for _ in range(400)]
    expect_done(link.source, tickets)
    assert 400 * 256 * KIB / (time.monotonic() - started_s) <= config.bytes_per_s


def test_nothing_is_left_after_close():
    def cycle() -> None:
        with ExitStack() as stack:
            link = link_over(stack, Throttled(open_transport("memory"), ThrottledConfig(1e9)), MIB)
            source = link.source.load(MIB, 1)
            expect_done(link.source, [link.send(source, one_span(MIB))])

    cycle()
    gc.collect()  # of earlier tests
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(20):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_over_shm(stack: ExitStack):
    transport = Throttled(open_transport("shm"), ThrottledConfig(1e9, 50e-6))
    link = link_over(stack, transport, MIB, "shm")
    source = link.source.load(3 * MIB, 1)
    spans = random_spans(1, 3 * MIB, MIB, 5000)
    started_s = time.monotonic()
    expect_done(link.source, [link.send(source, spans)])
    assert time.monotonic() - started_s >= spans.num_bytes / 1e9
    expected = np.zeros(MIB, dtype=np.uint8)
    for read, write, length in zip(spans.source, spans.target, spans.length, strict=True):
        expected[write : write + length] = link.source.buffers[source.number][read : read + length]
    assert np.array_equal(link.content(), expected)


def test_batches_of_nothing_and_many_tickets_end_once(stack: ExitStack):
    link = link_over(stack, Throttled(open_transport("memory"), ThrottledConfig(1e9)), MIB)
    source = link.source.load(MIB, 1)
    tickets = [link.send(source, spans_of([], [], [])) for _ in range(100)]
    assert len(completions(link.source, tickets)) == 100


@pytest.mark.parametrize(
    "options", [{"bytes_per_s": 0}, {"bytes_per_s": 1, "latency_s": -1}, {"bytes_per_s": float("nan")}]
)
def test_config_is_checked(options: dict[str, float]):
    with pytest.raises(ConfigError, match="has to be"):
        ThrottledConfig(**options)
