"""Broken schedulers: the random walks and the integrity check find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.books.moves import walk

from baton.engine.books import limits, scheduler
from baton.engine.books.prefix import Node, Prefix
from baton.engine.books.room import Room
from baton.engine.books.scheduler import Scheduler
from baton.engine.books.sequence import Sequence, State
from baton.engine.books.shares import Shares
from baton.engine.commands import PageCopy, ScheduledSequence

NUM_WALKS = 6000
"""At most: a walk is another one with another order of hashes, and the rarest variant shows in 1 of 500."""
NUM_MOVES = 60

Patch = Callable[[pytest.MonkeyPatch], None]
VARIANTS: dict[str, Patch] = {}


def variant(patch: Patch) -> Patch:
    VARIANTS[patch.__name__] = patch
    return patch


@variant
def frees_twice_on_preempt(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._preempt

    def broken(self: Scheduler, sequence: Sequence) -> None:
        for group in sequence.pages:
            self.room.pools[group].free(sequence.holding.held(group))
        real(self, sequence)

    patch.setattr(Scheduler, "_preempt", broken)


@variant
def caches_the_uncomputed_token(patch: pytest.MonkeyPatch) -> None:
    real = Room.remember

    def broken(self: Room, sequence: Sequence) -> None:
        computed, sequence.num_computed = sequence.num_computed, sequence.num_tokens
        real(self, sequence)
        sequence.num_computed = computed

    patch.setattr(Room, "remember", broken)


@variant
def forgets_to_copy(patch: pytest.MonkeyPatch) -> None:
    real = Room.fork

    def broken(self: Room, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        copies = real(self, parent, child)
        if copies is not None:
            self.end_copies(copies)
        return copies and []

    patch.setattr(Room, "fork", broken)


@variant
def copies_a_batch_late(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.schedule

    def broken(self: Scheduler, limit: int | None = None) -> object:
        late, self.copies = self.copies, []
        batch = real(self, limit)
        self.copies += late
        return batch

    patch.setattr(Scheduler, "schedule", broken)


@variant
def does_not_hold_what_is_copied(patch: pytest.MonkeyPatch) -> None:
    real = Room.fork

    def broken(self: Room, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        copies = real(self, parent, child)
        for copy in copies or []:
            self.pools[copy.group].free((copy.source, copy.target))
        return copies

    patch.setattr(Room, "fork", broken)
    patch.setattr(Room, "end_copies", lambda self, copies: None)
    patch.setattr(scheduler, "check_books", lambda books: None)


@variant
def shares_the_partial_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shares, "num_settled", Shares.num_pages)


@variant
def gives_back_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._settle

    def broken(self: Scheduler, sequence: Sequence) -> None:
        sequence.num_flights, flights = 0, sequence.num_flights
        real(self, sequence)
        sequence.num_flights = flights

    patch.setattr(Scheduler, "_settle", broken)


@variant
def gives_back_what_is_leased(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def broken(self: Scheduler, sequence: Sequence) -> None:
        sequence.is_leased = False
        real(self, sequence)

    patch.setattr(Scheduler, "_end", broken)
    patch.setattr(scheduler, "check_books", lambda books: None)


@variant
def releases_a_source_in_flight(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, number: int) -> None:
        sequence = self.sequences.get(number)
        if sequence is not None:
            sequence.is_leased = False
            sequence.state = State.ENDED
            self._give_back(sequence)
            del self.sequences[number]

    patch.setattr(Scheduler, "release", broken)


@variant
def preempts_what_is_leased(patch: pytest.MonkeyPatch) -> None:
    def broken(sequence: Sequence) -> bool:
        return sequence.state in (State.PREFILLING, State.RUNNING) and not sequence.num_flights

    patch.setattr(scheduler, "_can_preempt", broken)


@variant
def preempts_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    def broken(sequence: Sequence) -> bool:
        return sequence.state in (State.PREFILLING, State.RUNNING) and not sequence.is_leased

    patch.setattr(scheduler, "_can_preempt", broken)


@variant
def schedules_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._work

    def broken(
        self: Scheduler, sequence: Sequence, size: int, guesses: tuple[int, ...] = ()
    ) -> ScheduledSequence:
        work = real(self, sequence, size, guesses)
        sequence.num_flights = 0
        return work

    patch.setattr(Scheduler, "_work", broken)
    patch.setattr(scheduler, "check_books", lambda books: None)


@variant
def ignores_the_salt(patch: pytest.MonkeyPatch) -> None:
    real = Prefix._units
    patch.setattr(Prefix, "_units", lambda self, tokens, salt: real(self, tokens, ""))

    def broken(self: Prefix, key: bytes, parent: Node | None, unit: bytes, salt: str) -> Node | None:
        return self._nodes.get(key)

    patch.setattr(Prefix, "_found", broken)


@variant
def trusts_a_poor_hash(patch: pytest.MonkeyPatch) -> None:
    real = Prefix.__init__

    def poor(self: Prefix, *arguments: object) -> None:
        real(self, *arguments, digest=lambda raw: bytes([sum(raw) % 7]))

    def broken(self: Prefix, key: bytes, parent: Node | None, unit: bytes, salt: str) -> Node | None:
        return self._nodes.get(key)

    patch.setattr(Prefix, "__init__", poor)
    patch.setattr(Prefix, "_found", broken)


@variant
def reuses_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    real = Room.start

    def broken(self: Room, sequence: Sequence, *, num_reused_max: int, is_windowed_whole: bool) -> bool:
        return real(self, sequence, num_reused_max=num_reused_max + 1, is_windowed_whole=is_windowed_whole)

    patch.setattr(Room, "start", broken)


@variant
def passes_a_page_too_early(patch: pytest.MonkeyPatch) -> None:
    real = Shares.num_passed
    patch.setattr(Shares, "num_passed", lambda self, group, n, prompt: real(self, group, n + 1, prompt))


@variant
def caches_pages_for_units(patch: pytest.MonkeyPatch) -> None:
    real = Shares.__init__

    def broken(self: Shares, *arguments: object) -> None:
        real(self, *arguments)
        if self.prefix_unit_tokens:
            self.prefix_unit_tokens, self.unit_pages = self.page_tokens, 1

    patch.setattr(Shares, "__init__", broken)


@variant
def counts_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shares, "_extremes", lambda self: (self._num_ranks - 1,))


@variant
def takes_a_draft_for_a_layer(patch: pytest.MonkeyPatch) -> None:
    """What a draft stored was computed with the token after a prefix, which others have not."""
    real = Shares.__init__

    def broken(self: Shares, *arguments: object) -> None:
        real(self, *arguments)
        self.num_ahead = 0

    patch.setattr(Shares, "__init__", broken)


@variant
def keeps_a_guess_that_was_wrong(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._sampled

    def broken(self: Scheduler, sequence: Sequence, work: ScheduledSequence, tokens: list[int]) -> None:
        real(self, sequence, work, tokens)
        sequence.num_computed = sequence.num_scheduled = work.start + len(work.tokens)

    patch.setattr(Scheduler, "_sampled", broken)
    patch.setattr(scheduler, "check_books", lambda books: None)


@variant
def guesses_past_the_end(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, sequence: Sequence, num_most: int) -> tuple[int, ...]:
        del self, num_most
        return () if sequence.ahead.proposal is None else (sequence.ahead.proposal,)

    patch.setattr(Scheduler, "_guesses", broken)


@variant
def caches_what_a_fork_has_not_computed(patch: pytest.MonkeyPatch) -> None:
    real = Room.remember

    def broken(self: Room, sequence: Sequence) -> None:
        hidden, sequence.ahead.hidden = sequence.ahead.hidden, None
        real(self, sequence)
        sequence.ahead.hidden = hidden

    patch.setattr(Room, "remember", broken)


@variant
def lets_sources_take_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "has_half", lambda books, sequence: True)


@variant
def takes_what_never_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(limits, "num_tokens_max", lambda *arguments: 0)
    patch.setattr(scheduler, "check_fit", lambda room, config, sequence: None)


def find(num_walks: int) -> str:
    """What the first walk that fails says; empty if none does."""
    for seed in range(num_walks):
        try:
            walk(seed, NUM_MOVES)
        except (AssertionError, KeyError, IndexError) as error:
            return repr(error)
    return ""


@pytest.mark.parametrize("name", VARIANTS)
def test_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VARIANTS[name](monkeypatch)
    assert find(NUM_WALKS), f"{NUM_WALKS} walks saw nothing wrong"
