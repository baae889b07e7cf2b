"""Broken schedulers: the random walks and the integrity check find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.scheduler.moves import walk

from baton.engine.commands import PageCopy, ScheduledSequence
from baton.engine.kv_cache import KVCacheManager
from baton.engine.pages import PageGeometry
from baton.engine.prefix_cache import PrefixCache, PrefixNode
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, SequenceStatus

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
            self.kv_cache.pools[group].free(sequence.held_pages(group))
        real(self, sequence)

    patch.setattr(Scheduler, "_preempt", broken)


@variant
def caches_the_uncomputed_token(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.cache_prefix

    def broken(self: KVCacheManager, sequence: Sequence) -> None:
        computed, sequence.num_computed = sequence.num_computed, sequence.num_tokens
        real(self, sequence)
        sequence.num_computed = computed

    patch.setattr(KVCacheManager, "cache_prefix", broken)


@variant
def forgets_to_copy(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.fork

    def broken(self: KVCacheManager, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        copies = real(self, parent, child)
        if copies is not None:
            self.finish_copies(copies)
        return copies and []

    patch.setattr(KVCacheManager, "fork", broken)


@variant
def copies_a_batch_late(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.schedule

    def broken(self: Scheduler, decodes_max: int | None = None) -> object:
        late, self.copies = self.copies, []
        batch = real(self, decodes_max)
        self.copies += late
        return batch

    patch.setattr(Scheduler, "schedule", broken)


@variant
def does_not_hold_what_is_copied(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.fork

    def broken(self: KVCacheManager, parent: Sequence, child: Sequence) -> list[PageCopy] | None:
        copies = real(self, parent, child)
        for copy in copies or []:
            self.pools[copy.group].free((copy.source, copy.target))
        return copies

    patch.setattr(KVCacheManager, "fork", broken)
    patch.setattr(KVCacheManager, "finish_copies", lambda self, copies: None)
    patch.setattr(Scheduler, "check_integrity", lambda self: None)


@variant
def shares_the_partial_page(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageGeometry, "num_settled", PageGeometry.num_pages)


@variant
def gives_back_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._forget_if_unused

    def broken(self: Scheduler, sequence: Sequence) -> None:
        sequence.num_in_flight, flights = 0, sequence.num_in_flight
        real(self, sequence)
        sequence.num_in_flight = flights

    patch.setattr(Scheduler, "_forget_if_unused", broken)


@variant
def gives_back_what_is_leased(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._end

    def broken(self: Scheduler, sequence: Sequence) -> None:
        sequence.is_leased = False
        real(self, sequence)

    patch.setattr(Scheduler, "_end", broken)
    patch.setattr(Scheduler, "check_integrity", lambda self: None)


@variant
def releases_a_source_in_flight(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, number: int) -> None:
        sequence = self.sequences.get(number)
        if sequence is not None:
            sequence.is_leased = False
            sequence.status = SequenceStatus.ENDED
            self._free(sequence)
            del self.sequences[number]

    patch.setattr(Scheduler, "release", broken)


@variant
def preempts_what_is_leased(patch: pytest.MonkeyPatch) -> None:
    def broken(sequence: Sequence) -> bool:
        return (
            sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING)
            and not sequence.num_in_flight
        )

    patch.setattr(Sequence, "can_preempt", property(broken))


@variant
def preempts_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    def broken(sequence: Sequence) -> bool:
        return (
            sequence.status in (SequenceStatus.PREFILLING, SequenceStatus.RUNNING) and not sequence.is_leased
        )

    patch.setattr(Sequence, "can_preempt", property(broken))


@variant
def schedules_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._schedule_tokens

    def broken(
        self: Scheduler, sequence: Sequence, size: int, guesses: tuple[int, ...] = ()
    ) -> ScheduledSequence:
        work = real(self, sequence, size, guesses)
        sequence.num_in_flight = 0
        return work

    patch.setattr(Scheduler, "_schedule_tokens", broken)
    patch.setattr(Scheduler, "check_integrity", lambda self: None)


@variant
def ignores_the_salt(patch: pytest.MonkeyPatch) -> None:
    real = PrefixCache._units
    patch.setattr(PrefixCache, "_units", lambda self, tokens, salt: real(self, tokens, ""))

    def broken(
        self: PrefixCache, key: bytes, parent: PrefixNode | None, unit: bytes, salt: str
    ) -> PrefixNode | None:
        return self._nodes.get(key)

    patch.setattr(PrefixCache, "_find", broken)


@variant
def trusts_a_poor_hash(patch: pytest.MonkeyPatch) -> None:
    real = PrefixCache.__init__

    def poor(self: PrefixCache, pools: object, **options: object) -> None:
        real(self, pools, **options, digest=lambda raw: bytes([sum(raw) % 7]))

    def broken(
        self: PrefixCache, key: bytes, parent: PrefixNode | None, unit: bytes, salt: str
    ) -> PrefixNode | None:
        return self._nodes.get(key)

    patch.setattr(PrefixCache, "__init__", poor)
    patch.setattr(PrefixCache, "_find", broken)


@variant
def reuses_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.allocate

    def broken(
        self: KVCacheManager, sequence: Sequence, *, num_reused_max: int, is_windowed_whole: bool
    ) -> bool:
        return real(self, sequence, num_reused_max=num_reused_max + 1, is_windowed_whole=is_windowed_whole)

    patch.setattr(KVCacheManager, "allocate", broken)


@variant
def passes_a_page_too_early(patch: pytest.MonkeyPatch) -> None:
    real = PageGeometry.num_out_of_window
    patch.setattr(
        PageGeometry, "num_out_of_window", lambda self, group, n, prompt: real(self, group, n + 1, prompt)
    )


@variant
def caches_pages_for_units(patch: pytest.MonkeyPatch) -> None:
    real = PageGeometry.__init__

    def broken(self: PageGeometry, *arguments: object) -> None:
        real(self, *arguments)
        if self.prefix_unit_tokens:
            self.prefix_unit_tokens, self.prefix_unit_pages = self.page_tokens, 1

    patch.setattr(PageGeometry, "__init__", broken)


@variant
def counts_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PageGeometry, "_extremes", lambda self: (self._num_ranks - 1,))


@variant
def takes_a_draft_for_a_layer(patch: pytest.MonkeyPatch) -> None:
    """What a draft stored was computed with the token after a prefix, which others have not."""
    real = PageGeometry.__init__

    def broken(self: PageGeometry, *arguments: object) -> None:
        real(self, *arguments)
        self.num_lookahead = 0

    patch.setattr(PageGeometry, "__init__", broken)


@variant
def keeps_a_guess_that_was_wrong(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler._append_tokens

    def broken(self: Scheduler, sequence: Sequence, work: ScheduledSequence, tokens: list[int]) -> None:
        real(self, sequence, work, tokens)
        sequence.num_computed = sequence.num_scheduled = work.start + len(work.tokens)

    patch.setattr(Scheduler, "_append_tokens", broken)
    patch.setattr(Scheduler, "check_integrity", lambda self: None)


@variant
def guesses_past_the_end(patch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, sequence: Sequence, num_most: int) -> tuple[int, ...]:
        del self, num_most
        return sequence.draft_tokens

    patch.setattr(Scheduler, "_guesses", broken)


@variant
def takes_pages_for_the_guesses_of_a_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_has_room", lambda self, sequence, count: self.kv_cache.grow(sequence, count))


@variant
def gives_further_guesses_no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_has_room", lambda self, sequence, count: True)


@variant
def caches_what_a_fork_has_not_computed(patch: pytest.MonkeyPatch) -> None:
    real = KVCacheManager.cache_prefix

    def broken(self: KVCacheManager, sequence: Sequence) -> None:
        hidden, sequence.draft_hidden = sequence.draft_hidden, None
        real(self, sequence)
        sequence.draft_hidden = hidden

    patch.setattr(KVCacheManager, "cache_prefix", broken)


@variant
def lets_sources_take_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_has_source_room", lambda self, sequence: True)


@variant
def takes_what_never_fits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_check_new", lambda self, sequence: None)


def find(num_walks: int) -> str:
    """What the first walk that fails says; empty if none does."""
    for seed in range(num_walks):
        try:
            walk(seed, NUM_MOVES)
        except (AssertionError, KeyError, IndexError) as error:
            return repr(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
def test_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    VARIANTS[name](monkeypatch)
    assert find(NUM_WALKS), f"{NUM_WALKS} walks saw nothing wrong"
