"""The faulty wrapper: faults that a seed repeats, and completions that are true."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport import broken_wrappers as broken
from tests.transport.clocks import VirtualClock
from tests.transport.contract import Link, one_span, random_spans, spans_of
from tests.transport.ends import End, LocalEnd
from tests.transport.faulty import Fault, Faults, Faulty, FaultyConfig, take_head

from baton.errors import ConfigError, TransportError
from baton.transport import (
    Completion,
    Done,
    FailedQuiet,
    FailedUnknown,
    HostFence,
    RevokedQuiet,
    Ticket,
    Transport,
    open_transport,
)

KIB, MIB = 1 << 10, 1 << 20
NOTHING_S = 0.05
"""How long a test listens before it believes that nothing is coming."""
FAULTS = [fault for fault in Fault if fault is not Fault.NONE]
SWARM = {f"{fault.value}_probability": 0.17 for fault in FAULTS}

Make = Callable[..., Transport]


@dataclass
class Bench:
    """A faulty source, a plain target of the same process, and a clock that stands."""

    stack: ExitStack
    make: Make = Faulty
    inner: str = "memory"
    clock: VirtualClock | None = field(default_factory=VirtualClock)

    def link(self, num_bytes: int = MIB, **options: float) -> Link:
        transport = self.make(open_transport(self.inner), FaultyConfig(**options), self.clock)
        source, target = End(transport), LocalEnd(self.inner, None, {})
        self.stack.callback(target.end)
        self.stack.callback(source.close)
        region, invitation = target.call("expose", num_bytes), target.call("invite")
        target.call("grant", invitation.peer, region.number)
        return Link(source, target, source.connect(invitation.description), invitation.peer, region)

    def only(self, fault: Fault, **options: float) -> Link:
        return self.link(**{f"{fault.value}_probability": 1.0, **options})

    def advance(self, to_s: float) -> None:
        assert self.clock is not None
        self.clock.advance(to_s)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def bench(stack: ExitStack) -> Bench:
    return Bench(stack)


def events(link: Link) -> list[Completion]:
    return link.source.events(1, NOTHING_S)


def one_event(link: Link) -> Completion:
    found = link.source.events(1, 60.0)
    assert found, "nothing was reported"
    return found[0]


def bytes_moved(link: Link, source_number: int) -> int:
    """How many bytes of a batch of one span are there; they have to be its first ones."""
    content, expected = link.content(), link.source.buffers[source_number]
    moved = int(np.flatnonzero(content)[-1]) + 1 if content.any() else 0
    assert np.array_equal(content[:moved], expected[:moved])
    return moved


def outcomes(bench: Bench, seed: int) -> list[tuple[str, int]]:
    """The fault of each of sixty batches, as its cause tells, and how many bytes were there at the end."""
    link = bench.link(60 * KIB, seed=seed, delay_s_max=1.0, late_s=50.0, **SWARM)
    source = link.source.load(KIB, 1)
    link.source.buffers[source.number].fill(9)
    tickets = [link.send(source, one_span(KIB, 0, index * KIB)) for index in range(60)]
    found: dict[Ticket, str] = {}
    for when_s in itertools.count(1.0, 5.0):
        for event in link.source.events(60, 0.2):
            assert isinstance(event, Done | FailedQuiet | FailedUnknown)
            found[event.ticket] = type(event).__name__ + getattr(event, "cause", "")
        if len(found) == len(tickets):
            break
        assert when_s < 30, "a ticket did not end"
        bench.advance(when_s)
    moved = np.count_nonzero(link.content().reshape(60, KIB), axis=1)
    return list(zip((found[ticket] for ticket in tickets), moved.tolist(), strict=True))


def check_repeats(make: Make, stack: ExitStack) -> None:
    """The same seed and calls meet the same faults, another seed others."""
    first, second, other = (outcomes(Bench(stack, make), seed) for seed in (5, 5, 6))
    assert first == second, "the same calls met other faults"
    assert first != other
    assert len({word for word, _ in first}) >= 5


@settings(max_examples=300)
@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True))
def test_a_head_is_the_first_bytes(seed: int, share: float):
    spans = random_spans(seed, 5000, 5000, 1 + seed % 300) if seed else spans_of([], [], [])
    head = take_head(spans, share)
    assert head.num_bytes == int(spans.num_bytes * share)
    assert (head.length > 0).all()
    bytes_of = [
        [
            place
            for start, length in zip(found.target, found.length, strict=True)
            for place in range(start, start + length)
        ]
        for found in (spans, head)
    ]
    assert bytes_of[0][: head.num_bytes] == bytes_of[1]


# Each fault, under a clock that stands.


def test_delay(bench: Bench):
    link = bench.only(Fault.DELAY, delay_s_max=2.0)
    source = link.source.load(MIB, 1)
    ticket = link.send(source, one_span(MIB))
    assert events(link) == []
    assert not link.content().any()
    bench.advance(2.0)
    assert one_event(link) == Done(ticket)
    assert bytes_moved(link, source.number) == MIB


def test_delay_past_the_deadline(bench: Bench):
    link = bench.only(Fault.DELAY, delay_s_max=1e9)
    ticket = link.send(link.source.load(MIB, 1), one_span(MIB), deadline_s=3.0)
    bench.advance(2.99)
    assert events(link) == []
    bench.advance(3.0)
    ended = one_event(link)
    assert isinstance(ended, FailedQuiet)
    assert (ended.ticket, "no progress for 3.0 s" in ended.cause) == (ticket, True)
    bench.advance(2e9)
    assert (events(link), link.content().any()) == ([], False)


def check_error(make: Make, stack: ExitStack) -> None:
    """FailedQuiet when the fence is ready, and nothing of it ever moves."""
    bench = Bench(stack, make)
    link = bench.only(Fault.ERROR)
    source, fence = link.source.load(MIB, 1), HostFence()
    ticket = link.send(source, one_span(MIB), fence=fence)
    assert events(link) == []
    fence.set()
    ended = one_event(link)
    assert isinstance(ended, FailedQuiet)
    assert ended.ticket == ticket
    bench.advance(9.0)
    assert (events(link), link.content().any()) == ([], False), "moved after it was quiet"
    link.source.transport.unregister(source)


def test_partial(bench: Bench):
    link = bench.only(Fault.PARTIAL)
    source = link.source.load(MIB, 1)
    link.send(source, one_span(MIB))
    assert isinstance(one_event(link), FailedUnknown)
    moved = bytes_moved(link, source.number)
    assert 0 < moved < MIB
    bench.advance(99.0)
    assert (events(link), bytes_moved(link, source.number)) == ([], moved)


def check_hang(make: Make, stack: ExitStack) -> None:
    """A part moves, FailedUnknown comes at the deadline and not before, and nothing more moves."""
    bench = Bench(stack, make)
    link = bench.only(Fault.HANG)
    source = link.source.load(MIB, 1)
    ticket = link.send(source, one_span(MIB), deadline_s=3.0)
    limit_s = time.monotonic() + 60.0
    while not link.content().any() and time.monotonic() < limit_s:
        assert events(link) == []
    assert events(link) == []
    moved = bytes_moved(link, source.number)
    assert 0 < moved < MIB
    bench.advance(2.99)
    assert events(link) == []
    bench.advance(3.0)
    ended = one_event(link)
    assert isinstance(ended, FailedUnknown)
    assert ended.ticket == ticket
    bench.advance(99.0)
    assert (events(link), bytes_moved(link, source.number)) == ([], moved)


def check_late(make: Make, stack: ExitStack) -> None:
    """After FailedUnknown all of it is written, with what the source holds then, and not before."""
    bench = Bench(stack, make)
    link = bench.only(Fault.LATE, late_s=7.0)
    source = link.source.load(MIB, 1)
    ticket = link.send(source, one_span(MIB))
    assert isinstance(one_event(link), FailedUnknown)
    assert 0 < bytes_moved(link, source.number) < MIB
    link.source.buffers[source.number][:] = 77
    link.source.transport.cancel(ticket)
    bench.advance(6.99)
    assert (events(link), (link.content() == 77).all()) == ([], False)
    bench.advance(7.0)
    limit_s = time.monotonic() + 60.0
    while not (link.content() == 77).all() and time.monotonic() < limit_s:
        pass
    assert (link.content() == 77).all()
    assert events(link) == [], "it has ended before"


# Ending things while a fault is under way.


def check_revoke(make: Make, stack: ExitStack) -> None:
    """Once revoked and quiet, no late write lands."""
    bench = Bench(stack, make)
    link = bench.only(Fault.LATE, late_s=7.0)
    source = link.source.load(MIB, 1)
    link.source.transport.memory = link.target.inner.buffers[link.region.number]
    link.send(source, one_span(MIB))
    assert isinstance(one_event(link), FailedUnknown)
    assert link.target.call("revoke", link.writer) == RevokedQuiet()
    before = link.content().copy()
    bench.advance(7.0)
    assert events(link) == []
    assert np.array_equal(before, link.content()), "bytes moved after it was quiet"


@pytest.mark.parametrize("fault", FAULTS)
def test_cancel_before_the_fence_is_quiet(fault: Fault, bench: Bench):
    link = bench.only(fault)
    fence = HostFence()
    ticket = link.send(link.source.load(MIB, 1), one_span(MIB), fence=fence)
    link.source.transport.cancel(ticket)
    assert one_event(link) == FailedQuiet(ticket, "cancelled")
    fence.set()
    bench.advance(99.0)
    assert (events(link), link.content().any()) == ([], False)


def test_cancel_ends_a_hang(bench: Bench):
    link = bench.only(Fault.HANG)
    ticket = link.send(link.source.load(MIB, 1), one_span(MIB))
    assert events(link) == []
    link.source.transport.cancel(ticket)
    assert one_event(link) == FailedQuiet(ticket, "cancelled")
    before = link.content().copy()
    bench.advance(99.0)
    assert (events(link), np.array_equal(before, link.content())) == ([], True)


@pytest.mark.parametrize("how", ["close", "disconnect", "unregister"])
def test_a_pending_late_write_does_not_outlive_what_it_needs(how: str, bench: Bench):
    link = bench.only(Fault.LATE, late_s=7.0)
    source, transport = link.source.load(MIB, 1), link.source.transport
    link.send(source, one_span(MIB))
    assert isinstance(one_event(link), FailedUnknown)
    before = link.content().copy()
    what = {"close": (), "disconnect": (link.peer,), "unregister": (source,)}[how]
    getattr(transport, how)(*what)
    bench.advance(7.0)
    time.sleep(NOTHING_S)
    assert (transport.poll(), np.array_equal(before, link.content())) == ([], True)


@pytest.mark.parametrize("how", ["close", "disconnect"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_ticket_ends_once(how: str, fault: Fault, bench: Bench):
    link = bench.only(fault)
    source, transport = link.source.load(MIB, 1), link.source.transport
    tickets = [link.send(source, one_span(MIB)) for _ in range(3)]
    tickets.append(link.send(source, one_span(MIB), fence=HostFence()))
    getattr(transport, how)(*(() if how == "close" else (link.peer,)))
    ended = transport.poll()
    bench.advance(99.0)
    assert sorted(event.ticket.number for event in ended + transport.poll()) == [
        one.number for one in tickets
    ]


@pytest.mark.parametrize("fault", list(Fault))
def test_misuse_is_raised_at_once(fault: Fault, bench: Bench):
    link = bench.link() if fault is Fault.NONE else bench.only(fault)
    source = link.source.load(MIB, 1)
    with pytest.raises(TransportError):
        link.send(source, one_span(2, 0, MIB - 1))
    link.source.transport.disconnect(link.peer)
    with pytest.raises(TransportError):
        link.send(source, one_span(1))
    assert events(link) == []


@pytest.mark.parametrize("check", [check_repeats, check_error, check_hang, check_late, check_revoke])
def test_fault(check: Callable[..., None], stack: ExitStack):
    check(Faulty, stack)


@pytest.mark.long
@pytest.mark.parametrize(
    ("check", "make"),
    [
        (check_repeats, broken.ForgetsItsSeed),
        (check_error, broken.WritesAfterError),
        (check_hang, broken.HangsForGood),
        (check_hang, broken.CallsUnknownQuiet),
        (check_late, broken.CallsUnknownQuiet),
        (check_late, broken.EndsTwice),
        (check_revoke, broken.WritesAfterRevoke),
    ],
)
def test_another_fault_is_caught(check: Callable[..., None], make: Make, stack: ExitStack):
    with pytest.raises(AssertionError):
        check(make, stack)


# All faults together, under the system's clock.


def check_words(bench: Bench, seed: int) -> None:
    """Done: it is there. FailedQuiet: nothing of it moves any more. Once each; a changing source tells."""
    num_batches, size = 120, 2 * KIB
    link = bench.link(num_batches * size, seed=seed, delay_s_max=0.02, late_s=0.05, **SWARM)
    source = link.source.load(size, 1)
    buffer = link.source.buffers[source.number]
    content = link.target.inner.buffers[link.region.number].reshape(num_batches, size)
    index = {
        link.send(source, one_span(size, 0, number * size), deadline_s=0.3): number
        for number in range(num_batches)
    }
    quiet: dict[int, np.ndarray] = {}
    ended: set[Ticket] = set()
    while len(ended) < num_batches:
        event = one_event(link)
        assert event.ticket not in ended, "a ticket ended twice"
        ended.add(event.ticket)
        found = content[index[event.ticket]]
        match event:
            case Done():
                assert np.array_equal(found, buffer), "Done, and not there"
            case FailedQuiet():
                quiet[index[event.ticket]] = found.copy()
    buffer[:] = 255 - buffer
    time.sleep(0.15)
    assert events(link) == [], "a ticket ended twice"
    assert all(np.array_equal(before, content[number]) for number, before in quiet.items()), (
        "moved after it was quiet"
    )


@pytest.mark.parametrize("inner", ["memory", "shm"])
@pytest.mark.parametrize("seed", range(3))
def test_words_hold(inner: str, seed: int, stack: ExitStack):
    check_words(Bench(stack, inner=inner, clock=None), seed)


@pytest.mark.long
@pytest.mark.parametrize(
    "make", [broken.CallsUnknownQuiet, broken.EndsTwice, broken.SaysDone, broken.WritesAfterError]
)
def test_words_that_do_not_hold_are_caught(make: Make, stack: ExitStack):
    with pytest.raises(AssertionError):
        check_words(Bench(stack, make, clock=None), 0)


def test_probabilities_are_checked():
    for wrong in ({"error_probability": 1.1}, {"hang_probability": -0.1}, {"late_s": -1.0}):
        with pytest.raises(ConfigError):
            FaultyConfig(**wrong)
    with pytest.raises(ConfigError, match=r"add up to at most 1; got 1\.200"):
        FaultyConfig(error_probability=0.6, late_probability=0.6)


def test_faults_are_as_frequent_as_configured():
    faults = Faults(
        FaultyConfig(seed=3, error_probability=0.1, late_probability=0.25, delay_probability=0.05)
    )
    drawn = [faults.draw() for _ in range(20_000)]
    shares = {fault: sum(drawn_fault is fault for drawn_fault, _ in drawn) / len(drawn) for fault in Fault}
    expected = {Fault.ERROR: 0.1, Fault.LATE: 0.25, Fault.DELAY: 0.05, Fault.NONE: 0.6}
    assert shares == pytest.approx({fault: expected.get(fault, 0.0) for fault in Fault}, abs=0.01)
    assert np.mean([strength for _, strength in drawn]) == pytest.approx(0.5, abs=0.01)
