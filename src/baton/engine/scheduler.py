"""Decides which sequences of one dp group are computed next.

Sequences are ordered by age (arrival, then number), and the oldest goes first everywhere. A sequence gets
the pages of all its known tokens when it starts, and grows a page at a time. When no page is left, sequences
younger than the one that needs it are preempted: they free their pages and start again later. So the oldest
sequence that can be computed always is, and every sequence ends. Pages that a hand-over may touch are never
taken away; they come back through `release`.

A batch is in flight from `schedule` until `complete`. Sequences in flight are not preempted, and one that
ends meanwhile keeps its pages until the batch completes. Ranks run batches in the order they were scheduled,
and batches complete in that order.

Sources and targets could deadlock: a source holds pages until its target has some, on an instance that may
be a target itself. So sources without a grant may hold a share of the pool, none of them starts while an
older one waits for room at its target, and a target gets no pages while an older sequence waits for them.
A target also leaves room for the answers under way to grow: its pages are filled from a queue, and a prompt
that was just received should not be preempted by an older answer.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.engine.commands import PageCopy, PageTables, ScheduledBatch, ScheduledSequence
from baton.engine.kv_cache import KVCacheManager
from baton.engine.pages import PageGeometry
from baton.engine.sequence import Sequence, SequenceRole, SequenceStatus
from baton.errors import ConfigError, EngineError
from baton.plan.routes import TOKENS_MAX


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one dp group; `EngineConfig` has been checked."""

    chunk_tokens: int = 512
    """Tokens of one prompt that a step computes."""
    batch_tokens_max: int = 2048
    """Tokens of all sequences that a step computes."""
    sequences_max: int = 256
    """Sequences that are computed or received at once."""
    context_tokens_max: int = TOKENS_MAX
    """Prompt and answer together: the model's context."""
    chunks_in_flight: int = 1
    """Chunks of one prompt that may be in flight at once; more than one keeps pipeline stages busy."""
    ungranted_share_max: float = 0.5
    """The share of the pool that sources without a grant may hold."""
    growth_tokens: int = 512
    """Further tokens of every answer under way, as far as it may get so long, that a prompt has to leave room
    for when it is received."""
    num_guesses: int = 0
    """Draft tokens to predict after a step."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Where a prompt is received: page tables, and the tokens by group that are already there."""

    pages: PageTables
    held: dict[str, int]


class Scheduler:
    """The sequences of one dp group, their pages and the batches in flight; for one thread."""

    def __init__(self, config: SchedulerConfig, geometry: PageGeometry, num_pages: Mapping[str, int]) -> None:
        self.config = config
        self.geometry = geometry
        self.kv_cache = KVCacheManager(geometry, num_pages)
        self.sequences: dict[int, Sequence] = {}
        """All that wait or have pages, by number."""
        self.waiting: list[Sequence] = []
        """Oldest first."""
        self.in_flight: deque[ScheduledBatch] = deque()
        self.copies: list[tuple[int, PageCopy]] = []
        """Page copies for the next batch, with the number of the child that each is for."""
        self._started: list[Sequence] = []
        self._preempted: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence to be prefilled here; raises ConfigError on one that could never end."""
        assert sequence.role is not SequenceRole.TARGET, "a target's sequence is reserved, not added"
        self._check_new(sequence)
        self.sequences[sequence.number] = sequence
        self._wait(sequence)

    def reserve(self, sequence: Sequence) -> Reservation | None:
        """Allocates pages for a prompt from a source; None: no room now, and the sequence is not taken.

        Raises ConfigError on a sequence that could never end.
        """
        assert sequence.role is SequenceRole.TARGET, "only a target's sequence is reserved"
        self._check_new(sequence)
        if not self.num_slots or self._is_older_waiting(sequence) or not self._has_room_to_grow(sequence):
            return None
        if not self.kv_cache.allocate_for_receive(sequence):
            return None
        self.sequences[sequence.number] = sequence
        sequence.status, sequence.is_leased, sequence.is_started = SequenceStatus.RECEIVING, True, True
        return Reservation(
            {group: list(ids) for group, ids in sequence.pages.items()},
            dict.fromkeys(self.geometry.groups if self.kv_cache.prefixes else (), sequence.num_cached),
        )

    def admit(self, number: int, first_token: int, draft_tokens: Iterable[int] = ()) -> Sequence:
        """Starts decoding a reserved sequence whose prompt has arrived; `fork` makes its other answers.

        `draft_tokens` are the guesses of the source's draft, for a target that runs drafts too.
        """
        sequence = self._get(number)
        assert sequence.status is SequenceStatus.RECEIVING, (
            f"sequence {number} is {sequence.status.value}, not receiving"
        )
        sequence.num_computed = sequence.num_scheduled = sequence.num_prompt
        sequence.generated.append(first_token)
        sequence.draft_tokens = tuple(draft_tokens)[: self.config.num_guesses]
        sequence.status = SequenceStatus.RUNNING
        self.kv_cache.cache_prefix(sequence)
        return sequence

    def fork(
        self, number: int, tokens: Iterable[int], numbers: Iterable[int], hidden: bytes | None = None
    ) -> list[Sequence]:
        """Makes the other answers of a request from their first tokens, under these numbers.

        Call it before the first answer is finished or scheduled again. `hidden` is the row that the tokens
        were sampled from, where drafts run.
        """
        parent = self._get(number)
        is_running = parent.status is SequenceStatus.RUNNING
        is_ready = is_running and len(parent.generated) == 1 and not parent.num_in_flight
        assert is_ready, f"sequence {number} is not right behind its prompt"
        children: list[Sequence] = []
        for index, (token, child_number) in enumerate(zip(tokens, numbers, strict=True), start=1):
            assert child_number not in self.sequences, f"sequence {child_number} exists already"
            child = Sequence(
                number=child_number,
                prompt=parent.prompt,
                params=parent.params,
                role=parent.role,
                arrival_s=parent.arrival_s,
                dp=parent.dp,
                index=index,
                salt=parent.salt,
                prompt_embeddings=parent.prompt_embeddings,
                generated=[token],
                is_started=True,
            )
            copies = self.kv_cache.fork(parent, child)
            self.sequences[child_number] = child
            if copies is None:
                self._wait(child)
            else:
                child.status = SequenceStatus.RUNNING
                child.draft_hidden = hidden if self.geometry.num_lookahead else None
                self.copies += [(child_number, copy) for copy in copies]
            children.append(child)
        return children

    def schedule(
        self, decodes_max: int | None = None, oldest_target: tuple[float, int] | None = None
    ) -> ScheduledBatch | None:
        """Makes the next batch: decodes first, then chunks of started prompts, then waiting prompts.

        At most `decodes_max` sequences decode, so that several batches in flight share them. A prompt
        younger than `oldest_target`, the age of the oldest one that has to be reserved, does not start.
        """
        works: list[ScheduledSequence] = []
        self._schedule_decodes(works, self.config.sequences_max if decodes_max is None else decodes_max)
        for sequence in self._oldest_first(SequenceStatus.PREFILLING):
            # An older sequence may have preempted it in the meantime.
            is_prefilling = sequence.status is SequenceStatus.PREFILLING
            if is_prefilling and sequence.num_in_flight < self.config.chunks_in_flight:
                self._schedule_chunk(works, sequence)
        self._schedule_waiting(works, oldest_target)
        if not works:
            return None
        batch = ScheduledBatch(works, [copy for _, copy in self.copies])
        self.copies.clear()
        self.in_flight.append(batch)
        return batch

    def decodes_max(self, num_batches: int) -> int:
        """The limit that spreads the running sequences over this many batches in flight."""
        num_running = sum(1 for s in self.sequences.values() if s.status is SequenceStatus.RUNNING)
        return max(1, -(-num_running // num_batches))

    def complete(
        self,
        batch: ScheduledBatch,
        samples: Mapping[int, list[int]],
        draft_tokens: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Takes the sampled tokens, by sequence, of the oldest batch in flight.

        Where guesses were verified, there is one token for each accepted guess and one more. `draft_tokens`
        are the guesses for the next step.
        """
        is_next = bool(self.in_flight) and self.in_flight[0] is batch
        assert is_next, "batches complete in the order they were scheduled"
        self.in_flight.popleft()
        self.kv_cache.finish_copies(batch.copies)
        for work in batch.sequences:
            sequence = self.sequences[work.sequence]
            sequence.num_in_flight -= 1
            is_ended = sequence.status is SequenceStatus.ENDED
            tokens = [] if is_ended else samples.get(work.sequence, [])
            num_accepted = max(0, len(tokens) - 1) if work.num_drafted else 0
            sequence.num_computed = work.start + len(work.tokens) - work.num_drafted + num_accepted
            sequence.num_accepted = num_accepted
            sequence.num_scheduled = max(sequence.num_scheduled, sequence.num_computed)
            self.kv_cache.free_out_of_window(sequence)
            if is_ended:
                self._forget_if_unused(sequence)
            elif work.num_samples:
                self._append_tokens(sequence, work, tokens)
                sequence.draft_tokens = tuple((draft_tokens or {}).get(work.sequence, ()))

    def finish(self, number: int) -> None:
        """Ends a complete answer; its prefix stays cached, and pages of a hand-over are kept for it."""
        self._end(self._get(number))

    def abort(self, number: int) -> None:
        """Ends a sequence if it still exists."""
        if number in self.sequences:
            self._end(self.sequences[number])

    def hold(self, number: int) -> None:
        """Records that the target has no room yet for a source's sequence."""
        if number in self.sequences:
            self.sequences[number].is_target_full = True

    def grant(self, number: int) -> None:
        """Records that the target has pages for a source's sequence."""
        if number in self.sequences:
            self.sequences[number].is_granted = True

    def release(self, number: int) -> None:
        """Records that the hand-over no longer touches a sequence's pages; at a source the sequence ends."""
        sequence = self.sequences.get(number)
        if sequence is None:
            return
        sequence.is_leased = False
        if sequence.role is SequenceRole.SOURCE or sequence.status is SequenceStatus.ENDED:
            self._end(sequence)

    def take_changes(self) -> tuple[list[Sequence], list[Sequence]]:
        """What was started and what preempted since this was last called.

        The ranks have to know of the former before the batch; the latter start again by themselves.
        """
        started, preempted, self._started, self._preempted = self._started, self._preempted, [], []
        return started, preempted

    def num_tokens_max(self, prompt_tokens: int) -> int:
        """The longest prompt and answer together that are accepted for a prompt of this length."""

        def is_too_long(num_tokens: int) -> bool:
            return any(
                self._num_pages_max(group, num_tokens - 1, prompt_tokens) > pool.num_pages
                for group, pool in self.kv_cache.pools.items()
            )

        return bisect_right(range(1, self.config.context_tokens_max + 1), False, key=is_too_long)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence waits, runs or holds pages."""
        return not self.sequences

    @property
    def num_slots(self) -> int:
        """How many more sequences may be computed or received at once."""
        active = (SequenceStatus.PREFILLING, SequenceStatus.RUNNING, SequenceStatus.RECEIVING)
        num_active = sum(1 for sequence in self.sequences.values() if sequence.status in active)
        return max(0, self.config.sequences_max - num_active)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and every sequence is accounted for."""
        for number, sequence in self.sequences.items():
            assert sequence.number == number, f"sequence {sequence.number} is filed as {number}"
            _check_sequence(sequence)
        queued = [sequence.number for sequence in self.waiting]
        expected = [sequence.number for sequence in self._oldest_first(SequenceStatus.WAITING)]
        assert queued == expected, f"sequences {queued} are in the queue, {expected} are waiting"
        self._check_in_flight()
        copies = [copy for batch in self.in_flight for copy in batch.copies]
        copies += [copy for _, copy in self.copies]
        self.kv_cache.check_integrity(self.sequences.values(), copies)

    # Scheduling.

    def _schedule_decodes(self, works: list[ScheduledSequence], decodes_max: int) -> None:
        num_left = self.config.batch_tokens_max
        for sequence in self._oldest_first(SequenceStatus.RUNNING):
            if len(works) >= min(decodes_max, self.config.sequences_max) or not num_left:
                return
            # An older sequence may have preempted it in the meantime.
            is_running = sequence.status is SequenceStatus.RUNNING
            is_complete = len(sequence.generated) >= sequence.params.max_tokens
            if not is_running or sequence.num_in_flight or is_complete:
                continue
            if self._make_room(sequence, sequence.num_tokens):
                works.append(self._schedule_tokens(sequence, 1, self._guesses(sequence, num_left - 1)))
                num_left -= len(works[-1].tokens)

    def _guesses(self, sequence: Sequence, num_guesses_max: int) -> tuple[int, ...]:
        """Draft tokens to verify with a sequence's next token; no sequence is preempted for them."""
        num_guesses = min(num_guesses_max, sequence.num_tokens_max - sequence.num_tokens)
        guesses = sequence.draft_tokens[: max(0, num_guesses)]
        while guesses and not self.kv_cache.grow(sequence, sequence.num_tokens + len(guesses)):
            guesses = guesses[:-1]
        return guesses

    def _num_guesses(self, sequence: Sequence, num_tokens: int) -> int:
        """Draft tokens to predict behind `num_tokens`, of which all but the first take room for an entry.

        A source takes no page for them: the room of others is counted without.
        """
        num_guesses = self.config.num_guesses
        while num_guesses > 1:
            num_stored = num_tokens + num_guesses - 1
            if num_stored <= self.config.context_tokens_max and self._has_room(sequence, num_stored):
                break
            num_guesses -= 1
        return num_guesses

    def _has_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a sequence has pages for this many tokens, or, but for a source, gets them now."""
        if sequence.role is not SequenceRole.SOURCE:
            return self.kv_cache.grow(sequence, num_tokens)
        return all(
            self.geometry.num_pages(group, num_tokens, sequence.num_prompt) <= len(ids)
            for group, ids in sequence.pages.items()
        )

    def _schedule_chunk(self, works: list[ScheduledSequence], sequence: Sequence) -> None:
        stop = sequence.num_tokens
        if sequence.prompt_embeddings is not None and sequence.num_scheduled < sequence.num_prompt:
            # A chunk has either embeddings or ids: it ends with the prompt.
            stop = sequence.num_prompt
        num_left = self.config.batch_tokens_max - _num_rows(works)
        size = min(self.config.chunk_tokens, num_left, stop - sequence.num_scheduled)
        if size < 1 or len(works) >= self.config.sequences_max:
            return
        if self._make_room(sequence, sequence.num_scheduled + size):
            works.append(self._schedule_tokens(sequence, size))

    def _schedule_waiting(
        self, works: list[ScheduledSequence], oldest_target: tuple[float, int] | None
    ) -> None:
        is_source_blocked = False
        for sequence in list(self.waiting):
            if _num_rows(works) >= self.config.batch_tokens_max or not self.num_slots:
                return
            if oldest_target is not None and sequence.age > oldest_target and not sequence.is_granted:
                continue
            if _is_ungranted(sequence) and (is_source_blocked or not self._has_source_room(sequence)):
                # Others may overtake it, but no other source without a grant.
                is_source_blocked = True
                continue
            if not self._start(sequence):
                return
            self._schedule_chunk(works, sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Moves a sequence from waiting to prefilling; False: there is no room."""
        is_source = sequence.role is SequenceRole.SOURCE
        # The last token is always computed, because the next one is sampled from its output.
        num_reused_max = sequence.num_tokens - 1 if sequence.prompt_logprobs is None else 0
        if not self.kv_cache.allocate(sequence, num_reused_max=num_reused_max, is_windowed_whole=is_source):
            return False
        self.waiting.remove(sequence)
        sequence.status = SequenceStatus.PREFILLING
        sequence.is_leased = is_source
        if not sequence.is_started:
            sequence.is_started = True
            self._started.append(sequence)
        return True

    def _schedule_tokens(
        self, sequence: Sequence, size: int, guesses: tuple[int, ...] = ()
    ) -> ScheduledSequence:
        start, stop = sequence.num_scheduled, sequence.num_scheduled + size
        sequence.num_scheduled = stop
        sequence.num_in_flight += 1
        is_last = stop == sequence.num_tokens
        hidden, sequence.draft_hidden = sequence.draft_hidden, None
        num_accepted, sequence.num_accepted = sequence.num_accepted, 0
        num_stored = stop + len(guesses)
        num_guesses = self._num_guesses(sequence, num_stored) if is_last else 0
        num_stored += max(0, num_guesses - 1)
        return ScheduledSequence(
            sequence=sequence.number,
            start=start,
            tokens=[*sequence.tokens(start, stop), *guesses],
            pages={
                group: ids[: self.geometry.num_pages(group, num_stored, sequence.num_prompt)]
                for group, ids in sequence.pages.items()
            },
            prompt_tokens=sequence.num_prompt,
            num_samples=sequence.num_samples_last if is_last else 0,
            embeddings=sequence.embeddings(start, stop),
            num_drafted=len(guesses),
            next_token=None if is_last else sequence.tokens(stop, stop + 1)[0],
            num_accepted=num_accepted,
            num_guesses=num_guesses,
            hidden=hidden,
            prompt_logprobs=sequence.prompt_logprobs,
        )

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gets pages for this many tokens, from younger sequences if need be; False: it has to wait."""
        while not self.kv_cache.grow(sequence, num_tokens):
            younger = [s for s in self.sequences.values() if s.can_preempt and s.age > sequence.age]
            if not younger:
                return False
            self._preempt(max(younger, key=lambda s: s.age))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.kv_cache.cache_prefix(sequence)
        self._free(sequence)
        self._wait(sequence)
        self._preempted.append(sequence)

    def _has_source_room(self, sequence: Sequence) -> bool:
        """Whether a source without a grant may start.

        Together they hold a share of the pool, and leave room for any other that may be granted first.
        """
        if sequence.is_target_full:
            return False
        holders = [
            s for s in self.sequences.values() if _is_ungranted(s) and s.status is not SequenceStatus.WAITING
        ]
        others = (s for s in self.waiting if s.role is SequenceRole.SOURCE and s is not sequence)
        num_longest = max((s.num_prompt for s in others), default=0)
        for group, pool in self.kv_cache.pools.items():
            num_wanted = self.geometry.num_pages(group, sequence.num_prompt, sequence.num_prompt)
            # Sources that hit the same prefix hold its pages together.
            held = {page for holder in holders for page in holder.held_pages(group)}
            room = self.geometry.num_pages(group, num_longest, num_longest) if num_longest else 0
            num_max = min(int(pool.num_pages * self.config.ungranted_share_max), pool.num_pages - room)
            if num_wanted + len(held) > num_max:
                return False
        return True

    def _has_room_to_grow(self, sequence: Sequence) -> bool:
        """Whether the answers under way, and this one, could grow by some tokens once it has its prompt."""
        active = [
            s
            for s in self.sequences.values()
            if s.status in (SequenceStatus.RUNNING, SequenceStatus.RECEIVING, SequenceStatus.PREFILLING)
            and s.role is not SequenceRole.SOURCE
        ]
        if not active:
            return True
        for group in self.kv_cache.pools:
            num_wanted = sum(self._num_pages_to_grow(group, s) for s in [*active, sequence])
            if num_wanted > self.kv_cache.num_available(group):
                return False
        return True

    def _num_pages_to_grow(self, group: str, sequence: Sequence) -> int:
        num_tokens = min(sequence.num_tokens_max, sequence.num_tokens + self.config.growth_tokens)
        num_pages = self.geometry.num_pages(group, num_tokens, sequence.num_prompt)
        num_freed = self.geometry.num_out_of_window(group, num_tokens, sequence.num_prompt)
        return max(0, num_pages - num_freed - len(sequence.held_pages(group)))

    def _is_older_waiting(self, sequence: Sequence) -> bool:
        """Whether an older sequence waits for pages that a reservation would take."""
        for older in self.waiting:
            if older.age > sequence.age:
                return False
            if _is_ungranted(older) and not self._has_source_room(older):
                continue
            return any(
                self.geometry.num_pages(group, older.num_tokens, older.num_prompt)
                + self.geometry.num_pages(group, sequence.num_prompt, sequence.num_prompt)
                > self.kv_cache.num_available(group)
                for group in self.kv_cache.pools
            )
        return False

    # Sequences.

    def _append_tokens(self, sequence: Sequence, work: ScheduledSequence, tokens: list[int]) -> None:
        num_max = work.num_samples + work.num_drafted
        num_min = 1 if work.num_drafted else num_max
        assert num_min <= len(tokens) <= num_max, (
            f"sequence {work.sequence}: {len(tokens)} tokens sampled, {num_min} to {num_max} asked for"
        )
        guesses = work.tokens[len(work.tokens) - work.num_drafted :]
        assert not work.num_drafted or tokens[:-1] == guesses[: len(tokens) - 1], (
            f"sequence {work.sequence}: {tokens} sampled where {guesses} was guessed"
        )
        sequence.generated += tokens if work.num_drafted else tokens[:1]
        if sequence.status is SequenceStatus.PREFILLING:
            self.kv_cache.cache_prefix(sequence)
        is_source = sequence.role is SequenceRole.SOURCE
        sequence.status = SequenceStatus.SENT if is_source else SequenceStatus.RUNNING

    def _end(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)
        sequence.status = SequenceStatus.ENDED
        self._forget_if_unused(sequence)

    def _forget_if_unused(self, sequence: Sequence) -> None:
        """Forgets an ended sequence once no batch and no hand-over uses its pages."""
        if sequence.num_in_flight or sequence.is_leased:
            return
        self.kv_cache.cache_prefix(sequence)
        self._free(sequence)
        del self.sequences[sequence.number]

    def _free(self, sequence: Sequence) -> None:
        # Copies into pages that are freed are cancelled.
        cancelled = [copy for number, copy in self.copies if number == sequence.number]
        self.copies = [(number, copy) for number, copy in self.copies if number != sequence.number]
        self.kv_cache.finish_copies(cancelled)
        self.kv_cache.free(sequence)
        sequence.draft_tokens, sequence.draft_hidden, sequence.num_accepted = (), None, 0

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        insort(self.waiting, sequence, key=lambda s: s.age)

    def _oldest_first(self, status: SequenceStatus) -> list[Sequence]:
        sequences = [sequence for sequence in self.sequences.values() if sequence.status is status]
        return sorted(sequences, key=lambda sequence: sequence.age)

    def _get(self, number: int) -> Sequence:
        sequence = self.sequences.get(number)
        if sequence is None:
            raise EngineError(f"no sequence {number}; it ended, or was never added")
        return sequence

    # Checks.

    def _check_new(self, sequence: Sequence) -> None:
        """Raises ConfigError on a sequence that could not end even if it were alone."""
        assert sequence.number not in self.sequences, f"sequence {sequence.number} exists already"
        num_prompt, raw = sequence.num_prompt, sequence.prompt_embeddings
        if num_prompt < 1:
            raise ConfigError("a prompt of no tokens; give at least one")
        if raw is not None and (not raw or len(raw) % (4 * num_prompt)):
            raise ConfigError(
                f"{len(raw)} bytes of input embeddings for {num_prompt} tokens; "
                "give float32 rows of equal length"
            )
        is_source = sequence.role is SequenceRole.SOURCE
        num_total = num_prompt if is_source else num_prompt + sequence.params.max_tokens
        name = f"a prompt of {num_prompt} tokens"
        if not is_source:
            name += f" and {num_total - num_prompt} to generate"
        if num_total > self.config.context_tokens_max:
            raise ConfigError(
                f"{name}: {num_total} tokens, the context has {self.config.context_tokens_max}; ask for fewer"
            )
        for group, pool in self.kv_cache.pools.items():
            num_pages = self._num_pages_max(group, sequence.num_tokens_max, num_prompt)
            if is_source:
                num_pages = self.geometry.num_pages(group, num_prompt, num_prompt)
            if num_pages > pool.num_pages:
                num_fit = 0 if is_source else self.num_tokens_max(num_prompt)
                remedy = "shorten the prompt" if is_source else f"at most {num_fit} tokens fit"
                raise ConfigError(
                    f"{name} needs {num_pages} pages of group {group!r}, the pool has {pool.num_pages}; "
                    f"{remedy}, or give the pool more pages"
                )

    def _num_pages_max(self, group: str, num_tokens: int, prompt_tokens: int) -> int:
        step_tokens = self.config.chunk_tokens * self.config.chunks_in_flight
        return self.geometry.num_pages_max(group, num_tokens, prompt_tokens, step_tokens)

    def _check_in_flight(self) -> None:
        num_in_flight = Counter(work.sequence for batch in self.in_flight for work in batch.sequences)
        for number, sequence in self.sequences.items():
            assert num_in_flight[number] == sequence.num_in_flight, (
                f"sequence {number} is in {num_in_flight[number]} batches, "
                f"{sequence.num_in_flight} are counted"
            )
        lost = sorted(set(num_in_flight) - set(self.sequences))
        assert not lost, f"sequences {lost} are in flight and forgotten"
        for batch in self.in_flight:
            for work in batch.sequences:
                sequence = self.sequences[work.sequence]
                for group, ids in work.pages.items():
                    first = sequence.num_freed[group]
                    assert sequence.pages[group][first : len(ids)] == ids[first:], (
                        f"sequence {work.sequence} is in flight with pages of {group} that it no longer has"
                    )


def _num_rows(works: Iterable[ScheduledSequence]) -> int:
    return sum(len(work.tokens) for work in works)


def _is_ungranted(sequence: Sequence) -> bool:
    """Whether a source's sequence has no pages at its target yet."""
    return sequence.role is SequenceRole.SOURCE and not sequence.is_granted


def _check_sequence(sequence: Sequence) -> None:
    """Raises AssertionError unless a sequence's counts and flags fit its status."""
    name = f"sequence {sequence.number} ({sequence.status.value})"
    computed, scheduled, num_prompt = sequence.num_computed, sequence.num_scheduled, sequence.num_prompt
    assert 0 <= computed <= scheduled <= sequence.num_tokens, (
        f"{name} has {computed} tokens computed and {scheduled} scheduled of {sequence.num_tokens}"
    )
    assert computed == scheduled or sequence.num_in_flight, f"{name} waits for tokens of no batch in flight"
    match sequence.status:
        case SequenceStatus.WAITING:
            is_bare = not (sequence.pages or scheduled or sequence.is_leased or sequence.num_in_flight)
            assert is_bare, f"{name} has pages, a lease or a batch in flight"
        case SequenceStatus.RUNNING:
            assert computed == sequence.num_tokens - 1, (
                f"{name} has {computed} of {sequence.num_tokens} computed"
            )
            assert sequence.role is not SequenceRole.SOURCE, f"{name} belongs to a source"
        case SequenceStatus.SENT:
            is_whole = sequence.is_leased and computed == num_prompt
            assert is_whole, f"{name} has {computed} of {num_prompt} computed, or no lease"
            assert sequence.role is SequenceRole.SOURCE, f"{name} does not belong to a source"
        case SequenceStatus.RECEIVING:
            assert sequence.role is SequenceRole.TARGET, f"{name} does not belong to a target"
            assert not sequence.num_in_flight, f"{name} is computed"
        case SequenceStatus.ENDED:
            assert sequence.is_leased or sequence.num_in_flight, f"{name} keeps its pages without a reason"
        case SequenceStatus.PREFILLING:
            pass
