"""The promises of the contract, one check each; contract.py has the world that a check runs in."""

from __future__ import annotations

import gc
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tests.transport.contract import (
    Link,
    Variant,
    World,
    apply,
    check,
    completions,
    expect_done,
    expect_failed,
    one_span,
    random_spans,
    spans_of,
)
from tests.transport.ends import Usage

from baton.errors import TransportError
from baton.transport import (
    NOW,
    Batch,
    Done,
    FailedQuiet,
    FailedUnknown,
    HostFence,
    Ranges,
    RevokedQuiet,
    RevokedUnknown,
    Ticket,
)

KIB, MIB = 1 << 10, 1 << 20
HANGS_S = 60.0
"""A ticket that should end within a second or two and has not ended by then does not end."""
SUBMIT_CPU_S_MAX = 1e-3
IDLE_CPU_S_MAX = 0.02


# Content: the right bytes in the right place when Done is reported.


@check(Variant("DropsLast"), Variant("WritesBeside"))
def content_of_random_spans(world: World) -> None:
    """Unaligned spans of all lengths land where they should, and the bytes between them stay."""
    target = world.target()
    for seed, length_max in enumerate((1, 7, 100, 5000, 70_000, 300_000)):
        source = world.source.load(3 * MIB + seed, seed)
        link = world.link(target, MIB + 13 * seed)
        spans = random_spans(seed, source.num_bytes, link.region.num_bytes, length_max)
        expect_done(world.source, [link.send(source, spans)])
        expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
        apply(spans, world.source.buffers[source.number], expected)
        assert np.array_equal(link.content(), expected), f"seed {seed}, lengths up to {length_max}"


@check(Variant("WritesBeside"))
def content_of_equal_spans(world: World) -> None:
    """Pages of one size, in any order, at any alignment."""
    target = world.target()
    for seed, length in enumerate((1, 64, 4096, 4095, 16 * KIB, 64 * KIB)):
        num_spans = min(256, 8 * MIB // length)
        source = world.source.load(num_spans * length + 5, seed)
        link = world.link(target, num_spans * (length + 3) + 11)
        order = np.random.default_rng(seed).permutation(num_spans)
        spans = spans_of(
            np.arange(num_spans) * length + 5, order * (length + 3) + 11, np.full(num_spans, length)
        )
        expect_done(world.source, [link.send(source, spans)])
        expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
        apply(spans, world.source.buffers[source.number], expected)
        assert np.array_equal(link.content(), expected), f"spans of {length} bytes"


@check(Variant("Antedates"), Variant("Postdates"))
def done_says_when(world: World) -> None:
    """When the bytes were there: after the fence was ready, and not after it is said."""
    source = world.source.load(MIB, 2)
    link = world.link(world.target(), MIB)
    expect_done(world.source, [link.send(source, one_span(MIB))])
    for _ in range(3):
        fence = HostFence()
        ticket = link.send(source, one_span(MIB), fence=fence)
        time.sleep(0.05)
        ready_s = time.monotonic()
        fence.set()
        done = completions(world.source, [ticket])[ticket]
        assert isinstance(done, Done), done
        assert ready_s <= done.at_s <= time.monotonic()


@check(Variant("DropsLast"))
def content_of_one_large_span(world: World) -> None:
    """64 MiB in one span, one byte off the start at both ends."""
    source = world.source.load(64 * MIB + 1, 3)
    link = world.link(world.target(), 64 * MIB + 2)
    expect_done(world.source, [link.send(source, one_span(64 * MIB, 1, 2))])
    expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
    expected[2:] = world.source.buffers[source.number][1:]
    assert np.array_equal(link.content(), expected)


@check(Variant("DropsLast"))
def hundred_thousand_spans(world: World) -> None:
    """A batch of 100,000 spans goes through in one submit."""
    count = 100_000
    source = world.source.load(2 * MIB, 4)
    link = world.link(world.target(), 4 * MIB)
    rng = np.random.default_rng(4)
    spans = spans_of(
        rng.integers(0, 2 * MIB - 30, count), rng.permutation(count) * 40, rng.integers(1, 30, count)
    )
    expect_done(world.source, [link.send(source, spans)])
    expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
    apply(spans, world.source.buffers[source.number], expected)
    assert np.array_equal(link.content(), expected)


@check(Variant("ReportsEarly"))
def million_small_writes_are_there_when_done(world: World) -> None:
    """10^6 writes of 8 bytes: each batch is checked as soon as its Done is there."""
    num_slots, batch_slots = 1_000_000, 1000
    slots = np.random.default_rng(5).permutation(num_slots)
    link = world.link(world.target(), num_slots * 8)
    source = world.source.keep(np.arange(1, num_slots + 1, dtype=np.int64))
    tickets: dict[Ticket, int] = {}
    for index in range(num_slots // batch_slots):
        chosen = slots[index * batch_slots :][:batch_slots] * 8
        spans = spans_of(chosen, chosen, np.full(batch_slots, 8))
        tickets[link.send(source, spans, deadline_s=60.0)] = index
    while tickets:
        (event,) = world.source.events(1, 240.0)
        assert isinstance(event, Done)
        chosen = slots[tickets.pop(event.ticket) * batch_slots :][:batch_slots]
        assert link.target.call("check_slots", link.region.number, chosen)
    assert link.target.call("check_slots", link.region.number, slots)


@check(Variant("MixesThreads"))
def four_threads_submit_at_once(world: World) -> None:
    """Four threads share one connection, each with its own part of the target."""
    num_threads, num_batches, part_bytes = 4, 25, 300 * KIB
    source = world.source.load(num_threads * num_batches * 10 * KIB, 6)
    link = world.link(world.target(), num_threads * part_bytes)
    expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
    tickets: list[Ticket] = []

    def submit_part(index: int) -> None:
        for number in range(num_batches):
            start = (index * num_batches + number) * 10 * KIB
            write = index * part_bytes + number * 11 * KIB
            spans = one_span(10 * KIB, start, write)
            apply(spans, world.source.buffers[source.number], expected)
            batch = Batch(source, link.region, spans)
            tickets.append(world.source.transport.submit(link.peer, batch, NOW))

    threads = [threading.Thread(target=submit_part, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect_done(world.source, tickets)
    assert len(set(tickets)) == num_threads * num_batches
    assert np.array_equal(link.content(), expected)


@check(Variant("KnowsOnePeer"))
def several_peers_at_once(world: World) -> None:
    """Two targets and two connections to each, all busy together, none with another's bytes."""
    targets = [world.target(), world.target()]
    links = [world.link(target, MIB) for target in targets for _ in range(2)]
    sources = [world.source.load(MIB, 10 + index) for index in range(len(links))]
    tickets = [
        link.send(source, one_span(64 * KIB, start, start))
        for start in range(0, MIB, 64 * KIB)
        for link, source in zip(links, sources, strict=True)
    ]
    expect_done(world.source, tickets)
    for link, source in zip(links, sources, strict=True):
        assert np.array_equal(link.content(), world.source.buffers[source.number])


@check(Variant("SaysTwice"))
def each_ticket_ends_once(world: World) -> None:
    """200 batches, one of which is empty, have 200 completions, whatever the order."""
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB)
    tickets = [link.send(source, one_span(5000, 5000 * index, 5000 * index)) for index in range(199)]
    tickets.append(link.send(source, spans_of([], [], [])))
    expect_done(world.source, tickets)
    assert not world.source.events(1, 0.2)


# Life cycle: regions, tickets and connections come and go in any order, and leave nothing behind.


@check(Variant("IgnoresFence"))
def fence_is_waited_for(world: World) -> None:
    """Nothing moves before the fence, and what moves then is what the source holds then."""
    source = world.source.load(MIB, 1)
    buffer = world.source.buffers[source.number]
    link = world.link(world.target(), MIB)
    fence = HostFence()
    ticket = link.send(source, one_span(MIB), fence=fence, deadline_s=1.0)
    ready = link.send(source, one_span(10))
    expect_done(world.source, [ready])
    time.sleep(1.2)
    assert not link.content()[10:].any()
    buffer[:] = 77
    fence.set()
    expect_done(world.source, [ticket])
    assert (link.content() == 77).all()


@check(Variant("ForgetsInUse"))
def regions_change_while_busy(world: World) -> None:
    """Regions come and go beside a busy one, which itself cannot be forgotten."""
    source = world.source.load(16 * MIB, 2)
    link = world.link(world.target(), 16 * MIB)
    fence = HostFence()
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(10)]
    tickets.append(link.send(source, one_span(16 * MIB), fence=fence))
    for _ in range(50):
        world.source.forget(world.source.keep(np.zeros(5000)).number)
        number = link.target.call("expose", 5000).number
        link.target.call("forget", number)
    with pytest.raises(TransportError):
        world.source.transport.unregister(source)
    with pytest.raises(TransportError):
        link.target.call("forget", link.region.number)
    fence.set()
    expect_done(world.source, tickets)
    assert np.array_equal(link.content(), world.source.buffers[source.number])
    world.source.transport.unregister(source)
    with pytest.raises(TransportError):
        link.send(source, one_span(1))


@check(Variant("WritesAfterCancel"))
def cancelled_tickets_are_quiet(world: World) -> None:
    """A batch cancelled before its fence never moves; one cancelled under way ends once, Done or quiet."""
    source = world.source.load(64 * MIB, 3)
    link = world.link(world.target(), 64 * MIB)
    fence = HostFence()
    ticket = link.send(source, one_span(MIB), fence=fence)
    world.source.transport.cancel(ticket)
    ended = completions(world.source, [ticket])
    assert isinstance(ended[ticket], FailedQuiet)
    fence.set()
    time.sleep(0.4)
    assert not link.content().any()
    moving = [link.send(source, one_span(64 * MIB)) for _ in range(4)]
    for moved in moving:
        world.source.transport.cancel(moved)
    for completion in completions(world.source, moving).values():
        assert isinstance(completion, Done | FailedQuiet), completion
    before = link.content().copy()
    time.sleep(0.2)
    assert np.array_equal(before, link.content())
    world.source.transport.cancel(ticket)
    assert not world.source.events(1, 0.1)


@check(Variant("ForgetsOnClose"))
def close_ends_every_ticket(world: World) -> None:
    """What waits for a fence, its turn or the wire when the transport closes has a completion."""
    source = world.source.load(32 * MIB, 4)
    link = world.link(world.target(), 32 * MIB)
    tickets = [link.send(source, one_span(32 * MIB)) for _ in range(4)]
    tickets.append(link.send(source, one_span(1), fence=HostFence()))
    world.source.transport.close()
    ended = [event.ticket for event in world.source.transport.poll()]
    assert sorted(ticket.number for ticket in ended) == [ticket.number for ticket in tickets]
    with pytest.raises(TransportError):
        link.send(source, one_span(1))


@check(Variant("HidesFailures"))
def disconnect_ends_its_tickets(world: World) -> None:
    """Tickets of an ended connection end; those of another go on."""
    source = world.source.load(32 * MIB, 5)
    target = world.target()
    ended, other = world.link(target, 32 * MIB), world.link(target, MIB)
    tickets = [ended.send(source, one_span(32 * MIB)) for _ in range(3)]
    tickets.append(ended.send(source, one_span(1), fence=HostFence()))
    kept = other.send(source, one_span(MIB))
    world.source.transport.disconnect(ended.peer)
    assert len(completions(world.source, [*tickets, kept])) == 5
    with pytest.raises(TransportError):
        ended.send(source, one_span(1))


@check(Variant("LeaksOnConnect"))
def nothing_is_left_after_200_connections(world: World) -> None:
    """File descriptors and memory are back where they were after 200 connections."""
    source = world.source.load(MIB, 6)
    target = world.target()
    region = target.call("expose", MIB)

    def cycle() -> None:
        invitation = target.call("invite")
        grant = target.call("grant", invitation.peer, region.number)
        peer = world.source.connect(invitation.description)
        # A busy machine may need long for a connection.
        expect_done(world.source, [world.source.send(peer, source, region, one_span(MIB), deadline_s=60.0)])
        target.call("ungrant", invitation.peer, grant)
        world.source.transport.disconnect(peer)
        revoke_until_quiet(target, invitation.peer)

    for _ in range(20):
        cycle()

    def usages() -> list[Usage]:
        gc.collect()
        return [world.source.usage(), target.call("usage")]

    before = usages()
    for _ in range(200):
        cycle()
    after, limit_s = usages(), time.monotonic() + HANGS_S
    # The last connections are closed by threads that may not have run yet, before as after.
    while any(new.num_fds > old.num_fds for old, new in zip(before, after, strict=True)):
        assert time.monotonic() < limit_s, f"{after} after {before}"
        time.sleep(0.05)
        after = usages()
    for old, new in zip(before, after, strict=True):
        assert new.rss_bytes - old.rss_bytes < 8 * MIB, f"{new} after {old}"


def revoke_until_quiet(target, peer, timeout_s: float = 60.0) -> None:
    """A source that has left is quiet as soon as the target has heard so."""
    limit = time.monotonic() + timeout_s
    while (result := target.call("revoke", peer)).__class__.__name__ != "RevokedQuiet":
        assert time.monotonic() < limit, result
        time.sleep(0.002)


# Failures: reported in time, with the right type, and nothing is written after it was quiet.


@check(Variant("HidesFailures", subject="shm"), Variant("SaysDone", subject="tcp"))
def killed_target_is_noticed(world: World) -> None:
    """A target killed mid-transfer ends every ticket without a deadline, and later batches fail too."""
    target = world.remote_target()
    source = world.source.load(16 * MIB, 1)
    link = world.link(target, 16 * MIB)
    expect_done(world.source, [link.send(source, one_span(MIB))])
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(200)]
    time.sleep(0.02)
    target.kill()
    ended = list(completions(world.source, tickets, HANGS_S).values())
    # Copies into shared memory can be through before anybody could hear that its owner is gone.
    limit_s = time.monotonic() + HANGS_S
    while all(isinstance(completion, Done) for completion in ended) and time.monotonic() < limit_s:
        ended += completions(world.source, [link.send(source, one_span(MIB))], HANGS_S).values()
    assert any(not isinstance(completion, Done) for completion in ended)
    expect_failed(world.source, [link.send(source, one_span(1))], HANGS_S)


@check(Variant("SaysDone", subject="tcp"), Variant("HidesFailures", subject="tcp"))
def stopped_target_fails_at_the_deadline(world: World) -> None:
    """With the target stopped a batch is Done only if it is there, and otherwise fails at its deadline."""
    target = world.remote_target()
    source = world.source.load(64 * MIB, 2)
    link = world.link(target, 64 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    target.signal(signal.SIGSTOP)
    began_s = time.monotonic()
    tickets = [link.send(source, one_span(32 * MIB, start, start), deadline_s=1.0) for start in (0, 32 * MIB)]
    ended = completions(world.source, tickets, HANGS_S)
    wait_s = time.monotonic() - began_s
    target.signal(signal.SIGCONT)
    buffer = world.source.buffers[source.number]
    for index, ticket in enumerate(tickets):
        part = slice(index * 32 * MIB, (index + 1) * 32 * MIB)
        match ended[ticket]:
            case Done():
                assert np.array_equal(link.content()[part], buffer[part]), "Done, and not there"
            case FailedQuiet() | FailedUnknown():
                assert wait_s > 0.9, f"failed after {wait_s:.2f} s at a deadline of 1 s"


@check(Variant("CallsUnknownQuiet", subject="tcp"))
def quiet_failure_is_quiet(world: World) -> None:
    """What failed quietly while the target was stopped does not arrive when it goes on."""
    target = world.remote_target()
    source = world.source.load(64 * MIB, 2)
    link = world.link(target, 64 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    target.signal(signal.SIGSTOP)
    time.sleep(0.2)
    part_bytes = 16 * MIB
    tickets = [
        link.send(source, one_span(part_bytes - 1, start + 1, start + 1), deadline_s=0.5)
        for start in range(0, 64 * MIB, part_bytes)
    ]
    ended = completions(world.source, tickets, HANGS_S)
    target.signal(signal.SIGCONT)
    time.sleep(0.5)
    content = link.content()
    for index, ticket in enumerate(tickets):
        if isinstance(ended[ticket], FailedQuiet):
            part = content[index * part_bytes + 1 : (index + 1) * part_bytes]
            assert not part.any(), f"{ended[ticket]}, and bytes of it came later"


@check(Variant("SendsToSuccessor", subject="shm"), Variant("SendsToSuccessor", subject="tcp"))
def successor_gets_nothing_of_its_predecessor(world: World) -> None:
    """A batch queued for a killed target does not land in the one that has its name and addresses now."""
    first = world.restartable_target()
    source = world.source.load(MIB, 3)
    old = world.link(first, MIB)
    expect_done(world.source, [old.send(source, one_span(1))])
    fence = HostFence()
    queued = [old.send(source, one_span(MIB), fence=fence) for _ in range(3)]
    first.kill()
    new = world.link(world.restartable_target(), MIB)
    assert (old.region.number, old.writer.number) == (new.region.number, new.writer.number)
    fence.set()
    ended = completions(world.source, queued, HANGS_S).values()
    # Memory that the two share can be written until the source hears that its owner is dead.
    is_mapped = world.source.transport.capabilities.needs_allocate
    assert is_mapped or not any(isinstance(completion, Done) for completion in ended), ended
    stale = [
        world.source.send(new.peer, source, old.region, one_span(MIB)),
        world.source.send(old.peer, source, new.region, one_span(MIB)),
    ]
    expect_failed(world.source, stale, HANGS_S)
    time.sleep(0.2)
    assert not new.content().any(), "bytes for the dead target landed in its successor"
    expect_done(world.source, [new.send(source, one_span(MIB))])
    assert np.array_equal(new.content(), world.source.buffers[source.number])


@check(Variant("SaysDone"))
def connection_to_nobody_fails(world: World) -> None:
    """What is submitted to a target that is gone, or that revoked the invitation, fails quietly and soon."""
    source = world.source.load(100, 4)
    target = world.target()
    invitation = target.call("invite")
    region = target.call("expose", 100)
    target.call("revoke", invitation.peer)
    peers = [world.source.connect(invitation.description)]
    target.call("close")
    peers.append(world.source.connect(invitation.description))
    tickets = [world.source.send(peer, source, region, one_span(100)) for peer in peers]
    for completion in completions(world.source, tickets, HANGS_S).values():
        assert isinstance(completion, FailedQuiet), completion


@check(Variant("SaysDone"))
def writes_outside_of_a_region_are_refused(world: World) -> None:
    """A span beyond the region, a region that is not registered, and a size that the peer made up."""
    source = world.source.load(MIB, 5)
    target = world.target()
    for forge in ("span", "size", "number"):
        link = world.link(target, MIB)
        match forge:
            case "span":
                raised = False
                try:
                    link.send(source, one_span(2, 0, MIB - 1))
                except TransportError:
                    raised = True
                assert raised, "a span outside of the target was accepted"
                continue
            case "size":
                region, spans = replace(link.region, num_bytes=2 * MIB), one_span(100, 0, MIB - 50)
            case "number":
                region, spans = replace(link.region, number=99), one_span(MIB)
        ticket = world.source.send(link.peer, source, region, spans)
        ended = completions(world.source, [ticket], HANGS_S)[ticket]
        assert isinstance(ended, FailedQuiet | FailedUnknown), f"{forge}: {ended}"
        assert not link.content().any(), f"{forge}: a refused write touched memory"


@check(Variant("GrantsEverything", side="target"))
def writes_outside_of_a_grant_are_refused(world: World) -> None:
    """Only granted bytes change, whatever a batch asks for, and the refusal ends the peer."""
    if not world.capabilities.can_enforce_grants:
        assert_says_so(world)
        return
    source = world.source.load(MIB, 6)
    target = world.target()
    ranges = Ranges(*(np.array(values, dtype=np.int64) for values in ([0, 1000, 5000], [1000, 500, 10])))
    inside = spans_of([0, 0], [100, 5000], [1400, 10])
    granted = np.zeros(MIB, dtype=bool)
    granted[:1500] = granted[5000:5010] = True
    for stray in (one_span(1, 0, 1500), one_span(12, 0, 4999), one_span(11, 0, 5000), one_span(MIB)):
        link = world.link(target, MIB, is_granted=False)
        target.call("grant", link.writer, link.region.number, ranges)
        expect_done(world.source, [link.send(source, inside)])
        before = link.content().copy()
        mixed = spans_of(
            np.zeros(3), np.append(inside.target, stray.target), np.append(inside.length, stray.length)
        )
        changed = world.source.load(MIB, 99)
        expect_failed(world.source, [world.source.send(link.peer, changed, link.region, mixed)], HANGS_S)
        assert np.array_equal(before[~granted], link.content()[~granted]), "a refused write touched memory"
        expect_failed(world.source, [link.send(source, inside)], HANGS_S)


def assert_says_so(world: World) -> None:
    assert world.capabilities.can_enforce_grants is False


@check(Variant("GrantsEverything", side="target"))
def taken_back_grants_do_not_count(world: World) -> None:
    """After ungrant the bytes are out of bounds again, and the rest of what was granted is not."""
    if not world.capabilities.can_enforce_grants:
        assert_says_so(world)
        return
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB, is_granted=False)
    low = Ranges(np.array([0]), np.array([1000]))
    high = Ranges(np.array([1000]), np.array([1000]))
    number = link.target.call("grant", link.writer, link.region.number, low)
    link.target.call("grant", link.writer, link.region.number, high)
    expect_done(world.source, [link.send(source, one_span(2000))])
    assert isinstance(link.target.call("ungrant", link.writer, number), RevokedQuiet)
    expect_done(world.source, [link.send(source, one_span(1000, 0, 1000))])
    before = link.content().copy()
    expect_failed(world.source, [link.send(source, one_span(1000, 500, 0))], HANGS_S)
    assert np.array_equal(before, link.content())


@check(Variant("SaysUnchecked", side="target"))
def unchecked_peers_need_no_grant(world: World) -> None:
    """Where a peer is said to reach a region by itself, it writes there without a grant; others do not."""
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB, is_granted=False)
    assert not link.target.call("is_unchecked", link.writer, link.region.number), "before it was let in"
    number = link.target.call("grant", link.writer, link.region.number)
    expect_done(world.source, [link.send(source, one_span(1000))])
    link.target.call("ungrant", link.writer, number)
    if link.target.call("is_unchecked", link.writer, link.region.number):
        expect_done(world.source, [link.send(source, one_span(1000, 0, 2000))])
        content = world.source.buffers[source.number]
        assert np.array_equal(link.content()[2000:3000], content[:1000])


@check(Variant("LetsStrangersIn", side="target"))
def strangers_are_refused(world: World) -> None:
    """Somebody with the address and without the secret writes nothing."""
    if not world.capabilities.can_refuse_strangers:
        assert world.capabilities.can_refuse_strangers is False
        return
    source = world.source.load(MIB, 8)
    link = world.link(world.target(), MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    invitation = link.target.call("invite")
    link.target.call("grant", invitation.peer, link.region.number)
    stranger = world.source.connect(replace(invitation.description, secret="00" * 16))
    ticket = world.source.send(stranger, source, link.region, one_span(MIB))
    ended = completions(world.source, [ticket], HANGS_S)[ticket]
    assert isinstance(ended, FailedQuiet), ended
    assert not link.content()[1:].any()


@check(Variant("SaysQuiet", side="target"))
def revoked_peer_is_quiet(world: World) -> None:
    """Once revoked and quiet, not a byte moves, though the source goes on; others answer RevokedUnknown."""
    source = world.source.load(16 * MIB, 9)
    link = world.link(world.target(), 16 * MIB)
    expect_done(world.source, [link.send(source, one_span(1))])
    tickets = [link.send(source, one_span(16 * MIB)) for _ in range(50)]
    time.sleep(0.01)
    result = link.target.call("revoke", link.writer)
    if isinstance(result, RevokedUnknown):
        assert not world.capabilities.can_revoke, result
        result = ask_again(link)
    before = link.content().copy()
    world.source.buffers[source.number][:] = 255 - world.source.buffers[source.number]
    tickets.append(link.send(source, one_span(16 * MIB)))
    ended = completions(world.source, tickets, HANGS_S)
    time.sleep(0.1)
    assert np.array_equal(before, link.content()), f"bytes moved after {result}"
    assert not isinstance(ended[tickets[-1]], Done)
    assert isinstance(link.target.call("revoke", link.writer), RevokedQuiet)


def ask_again(link: Link) -> RevokedQuiet:
    """A living source that hears of its revocation leaves by itself."""
    limit_s = time.monotonic() + HANGS_S
    while time.monotonic() < limit_s:
        if isinstance(result := link.target.call("revoke", link.writer), RevokedQuiet):
            return result
        time.sleep(0.01)
    raise AssertionError(f"a living source did not leave within {HANGS_S:.0f} s of its revocation")


@check(Variant("SaysQuiet", side="target", subject="shm"))
def revoked_source_that_hangs_or_dies(world: World) -> None:
    """A stopped source is quiet only if it can be shut out; a dead one always is."""
    target, writer = world.target(), world.remote_source()
    sources = [writer.call("load", 64 * MIB, 10), writer.call("load", 64 * MIB, 11)]
    region = target.call("expose", 64 * MIB)
    invitation = target.call("invite")
    target.call("grant", invitation.peer, region.number)
    peer = writer.call("connect", invitation.description)
    writer.call("send", peer, sources[0], region, one_span(1))
    assert len(writer.call("events", 1, 60.0)) == 1
    for index in range(500):
        writer.call("send", peer, sources[index % 2], region, one_span(64 * MIB))
    writer.signal(signal.SIGSTOP)
    time.sleep(0.05)
    result = target.call("revoke", invitation.peer)
    assert isinstance(result, RevokedQuiet) or not world.capabilities.can_revoke
    if isinstance(result, RevokedQuiet):
        before = target.call("digest", region.number)
        writer.signal(signal.SIGCONT)
        time.sleep(0.2)
        assert before == target.call("digest", region.number), "bytes moved after it was quiet"
    writer.kill()
    assert isinstance(target.call("revoke", invitation.peer), RevokedQuiet)


# Cost to the caller, and when nothing happens.


@check(Variant("BlocksInSubmit"))
def submit_is_cheap(world: World) -> None:
    """10,000 spans cost the caller at most a millisecond of CPU, and it does not wait for the fence."""
    count = 10_000
    source = world.source.load(MIB, 1)
    link = world.link(world.target(), MIB)
    offsets = np.arange(count) * 100
    spans = spans_of(offsets, np.random.default_rng(1).permutation(offsets), np.full(count, 100))
    for fence in (None, HostFence()):
        best_s = 1.0
        for _ in range(50):  # others take the caches, now and then
            if best_s <= SUBMIT_CPU_S_MAX:
                break
            how = {"fence": fence} if fence else {}
            started_s = time.thread_time()
            ticket = link.send(source, spans, deadline_s=30.0, **how)
            best_s = min(best_s, time.thread_time() - started_s)
            if fence is None:
                expect_done(world.source, [ticket])
        assert best_s <= SUBMIT_CPU_S_MAX, f"{best_s * 1e3:.2f} ms"


@check(Variant("Spins"))
def idle_costs_nothing(world: World) -> None:
    """A connection with nothing in flight uses no processor at either end."""
    source = world.source.load(MIB, 2)
    link = world.link(world.target(), MIB)
    expect_done(world.source, [link.send(source, one_span(MIB))])
    used_s = IDLE_CPU_S_MAX
    for _ in range(10):  # the same process may have had something else to do
        before = [world.source.usage(), link.target.call("usage")]
        time.sleep(1.0)
        after = [world.source.usage(), link.target.call("usage")]
        used_s = max(new.cpu_s - old.cpu_s for old, new in zip(before, after, strict=True))
        if used_s < IDLE_CPU_S_MAX:
            return
    raise AssertionError(f"{used_s:.3f} s of CPU in 1 s idle")
