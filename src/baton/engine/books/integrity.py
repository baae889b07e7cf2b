"""Every page and every sequence, counted again from nothing but the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.engine.books.sequence import Role, Sequence, State

if TYPE_CHECKING:
    from baton.engine.books.scheduler import Scheduler

PageKey = tuple[str, int]


def check_books(scheduler: Scheduler) -> None:
    """Raises AssertionError, with what is wrong, unless every page and sequence is accounted for."""
    for number, sequence in scheduler.sequences.items():
        assert sequence.number == number, f"sequence {sequence.number} is filed as {number}"
        _check_sequence(scheduler, sequence)
    _check_waiting(scheduler)
    _check_flights(scheduler)
    _check_holders(scheduler)
    _check_sharing(scheduler)


def _check_sequence(scheduler: Scheduler, sequence: Sequence) -> None:
    shares, name = scheduler.shares, f"sequence {sequence.number} ({sequence.state.value})"
    computed, scheduled = sequence.num_computed, sequence.num_scheduled
    assert 0 <= computed <= scheduled <= sequence.num_tokens, (
        f"{name} has {computed} tokens computed and {scheduled} scheduled of {sequence.num_tokens}"
    )
    assert (computed == scheduled) or sequence.num_flights, f"{name} awaits tokens of no batch in flight"
    if sequence.state is State.WAITING:
        is_bare = not (sequence.pages or scheduled or sequence.is_leased or sequence.num_flights)
        assert is_bare, f"{name} has pages, or somebody thinks so"
        return
    assert set(sequence.pages) == set(shares.groups), f"{name} has tables of {sorted(sequence.pages)}"
    for group, ids in sequence.pages.items():
        passed = sequence.holding.num_passed[group]
        wanted = shares.num_pages(group, scheduled, sequence.num_prompt)
        assert len(ids) >= wanted, f"{name} has {len(ids)} pages of {group}, its tokens need {wanted}"
        # A prompt that is to arrive arrives whole: only its last window gets pages.
        is_arriving = sequence.role is Role.TARGET and sequence.is_leased
        seen = sequence.num_prompt if is_arriving else computed
        most = shares.num_passed(group, max(seen, computed), sequence.num_prompt)
        assert passed <= most, f"{name} gave {passed} pages of {group} back, its window begins at {most}"
    match sequence.state:
        case State.RUNNING:
            assert computed == sequence.num_tokens - 1, (
                f"{name} has {computed} of {sequence.num_tokens} computed"
            )
            assert sequence.role is not Role.SOURCE, f"{name} is a source's"
        case State.SENT:
            is_whole = sequence.is_leased and computed == sequence.num_prompt
            assert is_whole, f"{name} has {computed} of {sequence.num_prompt} computed, or no lease"
            assert sequence.role is Role.SOURCE, f"{name} is no source's"
        case State.RECEIVING:
            assert sequence.role is Role.TARGET, f"{name} is no target's"
            assert not sequence.num_flights, f"{name} is computed"
        case State.ENDED:
            assert sequence.is_leased or sequence.num_flights, f"{name} keeps its pages for nobody"
        case _:
            pass


def _check_waiting(scheduler: Scheduler) -> None:
    listed = [sequence.number for sequence in scheduler.waiting]
    waiting = [s for s in scheduler.sequences.values() if s.state is State.WAITING]
    known = [s.number for s in sorted(waiting, key=lambda sequence: sequence.age)]
    assert listed == known, f"sequences {listed} are in the queue, {known} are waiting"


def _check_flights(scheduler: Scheduler) -> None:
    flights = Counter(work.sequence for batch in scheduler.flying for work in batch.sequences)
    for number, sequence in scheduler.sequences.items():
        assert flights[number] == sequence.num_flights, (
            f"sequence {number} is in {flights[number]} batches, {sequence.num_flights} are counted"
        )
    lost = sorted(set(flights) - set(scheduler.sequences))
    assert not lost, f"sequences {lost} are in flight and forgotten"
    for batch in scheduler.flying:
        for work in batch.sequences:
            sequence = scheduler.sequences[work.sequence]
            for group, ids in work.pages.items():
                first = sequence.holding.num_passed[group]
                assert sequence.pages[group][first : len(ids)] == ids[first:], (
                    f"sequence {work.sequence} is in flight with pages of {group} that it has no more"
                )


def _check_holders(scheduler: Scheduler) -> None:
    """Pools count as many holders as there are tables, cached units and copies with a page."""
    room, holders = scheduler.room, Counter[PageKey]()
    for sequence in scheduler.sequences.values():
        for group in sequence.pages:
            holders.update((group, page) for page in sequence.holding.held(group))
    copies = [copy for batch in scheduler.flying for copy in batch.copies]
    for copy in [*copies, *(copy for _, copy in scheduler.copies)]:
        holders.update(((copy.group, copy.source), (copy.group, copy.target)))
    pins = Counter(id(s.holding.pin) for s in scheduler.sequences.values() if s.holding.pin is not None)
    if room.prefix is not None:
        room.prefix.check()
        for node in room.prefix.nodes():
            holders.update((group, page) for group, ids in node.pages.items() for page in ids)
            found = pins.pop(id(node), 0)
            assert node.num_pins == found, (
                f"unit {node.depth} has {node.num_pins} pins, {found} sequences pin it"
            )
    assert not pins, "a sequence pins a unit that is not cached any more"
    for group, pool in room.pools.items():
        pool.check()
        for page in range(pool.num_pages):
            found, counted = holders[group, page], pool.num_holders(page)
            assert found == counted, f"page {page} of {group} has {found} holders, {counted} are counted"


@dataclass(frozen=True, slots=True)
class Entry:
    """A page in a sequence's table."""

    group: str
    page: int
    sequence: int
    index: int
    is_settled: bool


def _entries(scheduler: Scheduler) -> Iterator[Entry]:
    for number, sequence in scheduler.sequences.items():
        for group in sequence.pages:
            settled = scheduler.shares.num_settled(group, sequence.num_computed, sequence.num_prompt)
            first = sequence.holding.num_passed[group]
            for index, page in enumerate(sequence.holding.held(group), start=first):
                yield Entry(group, page, number, index, index < settled)


def _check_sharing(scheduler: Scheduler) -> None:
    """A page in several tables is at the same place in each, and none of them writes it any more."""
    places: dict[PageKey, Entry] = {}
    for entry in _entries(scheduler):
        name = f"page {entry.page} of {entry.group}, entry {entry.index} of sequence {entry.sequence},"
        other = places.setdefault((entry.group, entry.page), entry)
        if other is not entry:
            assert other.sequence != entry.sequence, f"{name} is its entry {other.index} too"
            assert other.index == entry.index, f"{name} is entry {other.index} of sequence {other.sequence}"
        is_shared = other is not entry or scheduler.room.pools[entry.group].is_cached(entry.page)
        assert not is_shared or (entry.is_settled and other.is_settled), f"{name} is shared and still written"
