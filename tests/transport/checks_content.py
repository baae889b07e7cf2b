"""The right bytes, in the right place, when it is said that they are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from tests.transport.contract import (
    Lie,
    World,
    apply,
    check,
    completions,
    expect_done,
    one_span,
    random_spans,
    spans_of,
)

from baton.transport import NOW, Batch, Done, HostFence, Ticket

KIB, MIB = 1 << 10, 1 << 20


@check(Lie("DropsLast"), Lie("WritesBeside"))
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


@check(Lie("WritesBeside"))
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


@check(Lie("Antedates"), Lie("Postdates"))
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


@check(Lie("DropsLast"))
def content_of_one_large_span(world: World) -> None:
    """64 MiB in one span, one byte off the start at both ends."""
    source = world.source.load(64 * MIB + 1, 3)
    link = world.link(world.target(), 64 * MIB + 2)
    expect_done(world.source, [link.send(source, one_span(64 * MIB, 1, 2))])
    expected = np.zeros(link.region.num_bytes, dtype=np.uint8)
    expected[2:] = world.source.buffers[source.number][1:]
    assert np.array_equal(link.content(), expected)


@check(Lie("DropsLast"))
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


@check(Lie("AnnouncesEarly"))
def million_small_writes_are_there_when_announced(world: World) -> None:
    """10^6 writes of 8 bytes: each batch is looked at in the moment in which the target hears of it."""
    num_slots, batch_slots = 1_000_000, 1000
    slots = np.random.default_rng(5).permutation(num_slots)
    link = world.link(world.target(), num_slots * 8)
    source = world.source.transport.register(np.arange(1, num_slots + 1, dtype=np.int64))
    can_announce = world.capabilities.can_announce
    watch: Callable[[], list[str]] | None = None
    if can_announce:
        watch = link.target.begin("check_landed", link.region.number, slots, batch_slots, 240.0)
    tickets: dict[Ticket, int] = {}
    for index in range(num_slots // batch_slots):
        chosen = slots[index * batch_slots :][:batch_slots] * 8
        spans = spans_of(chosen, chosen, np.full(batch_slots, 8))
        tickets[link.send(source, spans, tag=index, deadline_s=60.0)] = index
    if watch is not None:
        assert watch() == []
    for ticket in completions(world.source, list(tickets)):
        if not can_announce:
            chosen = slots[tickets[ticket] * batch_slots :][:batch_slots]
            assert link.target.call("check_slots", link.region.number, chosen)
    assert link.target.call("check_slots", link.region.number, slots)


@check(Lie("MixesThreads"))
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
            batch = Batch(source, link.region, spans, number)
            tickets.append(world.source.transport.submit(link.peer, batch, NOW))

    threads = [threading.Thread(target=submit_part, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expect_done(world.source, tickets)
    assert len(set(tickets)) == num_threads * num_batches
    assert np.array_equal(link.content(), expected)


@check(Lie("KnowsOnePeer"))
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


@check(Lie("SaysTwice"))
def each_ticket_ends_once(world: World) -> None:
    """200 batches, one of which is empty, have 200 completions, whatever the order."""
    source = world.source.load(MIB, 7)
    link = world.link(world.target(), MIB)
    tickets = [link.send(source, one_span(5000, 5000 * index, 5000 * index)) for index in range(199)]
    tickets.append(link.send(source, spans_of([], [], [])))
    expect_done(world.source, tickets)
    assert not world.source.events(1, 0.2)
