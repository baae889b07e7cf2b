"""Who is computed next in one dp group.

Theory. Sequences are ordered by age (arrival, then number) and the oldest goes first, everywhere. A sequence
takes the pages of all its known tokens when it begins and grows a page at a time. When there is none left,
sequences younger than the one that needs it give theirs back and begin again later. So the oldest that can
be computed always is, and with that every sequence ends. Pages that a hand-over may touch are nobody's to
give: they come back by `release`.

A batch is in flight from `schedule` until `complete`. What is in flight is left alone: it is not preempted,
and what ends meanwhile keeps its pages until the batch is through. Ranks follow batches in the order they
were made, and batches complete in that order.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

from baton.engine.books.integrity import check_books
from baton.engine.books.limits import SchedulerConfig, check_fit, num_tokens_max
from baton.engine.books.reports import Changes, Counts, Reservation
from baton.engine.books.room import Room
from baton.engine.books.sequence import Ahead, Role, Sequence, State
from baton.engine.books.shares import Shares
from baton.engine.books.turns import has_half, is_older_waiting, is_ungranted
from baton.engine.commands import Batch, PageCopy, ScheduledSequence
from baton.errors import EngineError

ACTIVE = (State.PREFILLING, State.RUNNING, State.RECEIVING)
"""States that count against the sequences at once."""


class Scheduler:
    """The sequences of one dp group, their pages and the batches in flight, for one thread."""

    def __init__(self, config: SchedulerConfig, shares: Shares, num_pages: Mapping[str, int]) -> None:
        self.config = config
        self.shares = shares
        self.room = Room(shares, num_pages)
        self.sequences: dict[int, Sequence] = {}
        """All that wait or have pages, by number."""
        self.waiting: list[Sequence] = []
        """Oldest first."""
        self.flying: deque[Batch] = deque()
        self.copies: list[tuple[int, PageCopy]] = []
        """For the next batch, with the child that each is for."""
        self._changes = Changes()

    # What the caller brings in.

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence to be prefilled here; raises ConfigError on one that could never end."""
        assert sequence.role is not Role.TARGET, "a target's sequence is reserved, not added"
        self._check_new(sequence)
        self.sequences[sequence.number] = sequence
        self._wait(sequence)

    def reserve(self, sequence: Sequence) -> Reservation | None:
        """Pages for a prompt that comes from a source; None: no room now, and the sequence is not taken.

        Raises ConfigError on a sequence that could never end.
        """
        assert sequence.role is Role.TARGET, "only a target's sequence is reserved"
        self._check_new(sequence)
        if self._num_active() >= self.config.sequences_max or is_older_waiting(self, sequence):
            return None
        if not self.room.receive(sequence):
            return None
        self.sequences[sequence.number] = sequence
        sequence.state, sequence.is_leased, sequence.is_begun = State.RECEIVING, True, True
        groups = self.shares.groups if self.room.prefix else ()
        return Reservation(
            {group: list(ids) for group, ids in sequence.pages.items()},
            dict.fromkeys(groups, sequence.num_cached),
        )

    def admit(self, number: int, first_tokens: Iterable[int], proposal: int | None = None) -> Sequence:
        """A reserved prompt has arrived: it runs on from its first token; fork for the others.

        `proposal` is what the source's draft guesses to follow, for a target that has one too.
        """
        sequence = self._known(number)
        assert sequence.state is State.RECEIVING, (
            f"sequence {number} is {sequence.state.value}, not receiving"
        )
        sequence.num_computed = sequence.num_scheduled = sequence.num_prompt
        sequence.generated.append(next(iter(first_tokens)))
        sequence.ahead.proposal = proposal if self.shares.num_ahead else None
        sequence.state = State.RUNNING
        self.room.remember(sequence)
        return sequence

    def fork(
        self, number: int, tokens: Iterable[int], numbers: Iterable[int], hidden: bytes | None = None
    ) -> list[Sequence]:
        """The other answers of a request whose first tokens were sampled together, under these numbers.

        To be called before the first answer is finished or scheduled again. `hidden` is the row that they
        were sampled from, where drafts run.
        """
        parent = self._known(number)
        is_ready = parent.state is State.RUNNING and len(parent.generated) == 1 and not parent.num_flights
        assert is_ready, f"sequence {number} is not right behind its prompt"
        children: list[Sequence] = []
        for index, (token, child_number) in enumerate(zip(tokens, numbers, strict=True), start=1):
            assert child_number not in self.sequences, f"sequence {child_number} is there already"
            asked = replace(parent.asked, number=child_number, index=index)
            child = Sequence(asked, generated=[token], is_begun=True)
            copies = self.room.fork(parent, child)
            self.sequences[child_number] = child
            if copies is None:
                self._wait(child)
            else:
                child.state = State.RUNNING
                child.ahead.hidden = hidden if self.shares.num_ahead else None
                self.copies += [(child_number, copy) for copy in copies]
            children.append(child)
        return children

    # Batches.

    def schedule(self, limit: int | None = None) -> Batch | None:
        """The next batch, decoding first; at most `limit` sequences decode, so that several share them."""
        works: list[ScheduledSequence] = []
        self._take_decodes(works, self.config.sequences_max if limit is None else limit)
        self._take_chunks(works)
        self._take_waiting(works)
        if not works:
            return None
        batch = Batch(works, [copy for _, copy in self.copies])
        self.copies.clear()
        self.flying.append(batch)
        return batch

    def limit_for(self, num_batches: int) -> int:
        """The limit that deals the running sequences over so many batches in flight."""
        num_running = sum(1 for one in self.sequences.values() if one.state is State.RUNNING)
        return max(1, -(-num_running // num_batches))

    def complete(
        self, batch: Batch, samples: Mapping[int, list[int]], proposals: Mapping[int, int] | None = None
    ) -> None:
        """The oldest batch in flight is through; tokens by sequence, as many as each work asked for.

        Behind guesses there is a token for each one that stands and one more; `proposals` are further ones.
        """
        is_next = bool(self.flying) and self.flying[0] is batch
        assert is_next, "batches complete in the order they were made"
        self.flying.popleft()
        self.room.end_copies(batch.copies)
        for work in batch.sequences:
            sequence = self.sequences[work.sequence]
            sequence.num_flights -= 1
            found = samples.get(work.sequence, []) if sequence.state is not State.ENDED else []
            num_right = max(0, len(found) - 1) if work.num_drafted else 0
            sequence.num_computed = work.start + len(work.tokens) - work.num_drafted + num_right
            sequence.num_scheduled = max(sequence.num_scheduled, sequence.num_computed)
            self.room.trim(sequence)
            if sequence.state is State.ENDED:
                self._settle(sequence)
            elif work.num_samples:
                self._sampled(sequence, work, found)
                sequence.ahead.proposal = (proposals or {}).get(work.sequence)

    # Endings.

    def finish(self, number: int) -> None:
        """The answer is complete; its prefix stays cached, and pages that a hand-over has are kept for it."""
        self._end(self._known(number))

    def abort(self, number: int) -> None:
        """Nothing more is wanted of a sequence; nothing happens if it is gone already."""
        if number in self.sequences:
            self._end(self.sequences[number])

    def granted(self, number: int) -> None:
        """The target has pages for a source's sequence."""
        if number in self.sequences:
            self.sequences[number].is_granted = True

    def release(self, number: int) -> None:
        """The hand-over, on either side, will not touch a sequence's pages any more; at a source it ends."""
        sequence = self.sequences.get(number)
        if sequence is None:
            return
        sequence.is_leased = False
        if sequence.role is Role.SOURCE or sequence.state is State.ENDED:
            self._end(sequence)

    # What the caller asks.

    def take_changes(self) -> Changes:
        """What happened since this was last called."""
        found, self._changes = self._changes, Changes()
        return found

    def num_tokens_max(self, prompt_tokens: int) -> int:
        """Prompt and answer together, at most, that `add` and `reserve` take for a prompt of this length."""
        return num_tokens_max(self.room, self.config, prompt_tokens)

    def counts(self) -> Counts:
        """For metrics."""
        states = [sequence.state for sequence in self.sequences.values()]
        leased = [sequence for sequence in self.sequences.values() if sequence.is_leased]
        return Counts(
            num_waiting=len(self.waiting),
            num_prefilling=states.count(State.PREFILLING),
            num_running=states.count(State.RUNNING),
            num_receiving=states.count(State.RECEIVING),
            num_sent=states.count(State.SENT),
            num_ended=states.count(State.ENDED),
            pages=self.room.counts(),
            num_leased={
                group: sum(len(sequence.holding.held(group)) for sequence in leased)
                for group in self.shares.groups
            },
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or holds pages."""
        return not self.sequences

    def check_integrity(self) -> None:
        """Raises AssertionError, with what is wrong, unless every page and sequence is accounted for."""
        check_books(self)

    # Choosing.

    def _take_decodes(self, works: list[ScheduledSequence], limit: int) -> None:
        spare = self.config.batch_tokens_max
        for sequence in self._oldest_first(State.RUNNING):
            if len(works) >= min(limit, self.config.sequences_max) or not spare:
                return
            # One that was chosen for preemption by an older one is not running any more.
            if sequence.state is not State.RUNNING or sequence.num_flights or not sequence.has_room_to_grow:
                continue
            if self._has_made_room(sequence, sequence.num_tokens):
                works.append(self._work(sequence, 1, self._guesses(sequence, spare - 1)))
                spare -= len(works[-1].tokens)

    def _guesses(self, sequence: Sequence, num_most: int) -> tuple[int, ...]:
        """What may be computed beside a sequence's token; nobody gives pages back for it."""
        proposal, num_tokens = sequence.ahead.proposal, sequence.num_tokens + 1
        can_stand = num_tokens <= sequence.num_tokens_max and num_most > 0
        if proposal is None or not can_stand or not self.room.grow(sequence, num_tokens):
            return ()
        return (proposal,)

    def _take_chunks(self, works: list[ScheduledSequence]) -> None:
        for sequence in self._oldest_first(State.PREFILLING):
            if sequence.state is State.PREFILLING and sequence.num_flights < self.config.chunks_in_flight:
                self._take_chunk(works, sequence)

    def _take_chunk(self, works: list[ScheduledSequence], sequence: Sequence) -> None:
        stop = sequence.num_tokens
        if sequence.asked.embeddings is not None and sequence.num_scheduled < sequence.num_prompt:
            # A work has rows of one sort: embeddings end with the prompt.
            stop = sequence.num_prompt
        spare = self.config.batch_tokens_max - sum(len(work.tokens) for work in works)
        size = min(self.config.chunk_tokens, spare, stop - sequence.num_scheduled)
        if size < 1 or len(works) >= self.config.sequences_max:
            return
        if self._has_made_room(sequence, sequence.num_scheduled + size):
            works.append(self._work(sequence, size))

    def _take_waiting(self, works: list[ScheduledSequence]) -> None:
        is_source_barred = False
        num_rows = sum(len(work.tokens) for work in works)
        for sequence in list(self.waiting):
            if num_rows >= self.config.batch_tokens_max or self._num_active() >= self.config.sequences_max:
                return
            if is_ungranted(sequence) and (is_source_barred or not has_half(self, sequence)):
                # Others go past it, but none that would take its turn.
                is_source_barred = True
                continue
            if not self._begin(sequence):
                return
            self._take_chunk(works, sequence)
            num_rows = sum(len(work.tokens) for work in works)

    def _begin(self, sequence: Sequence) -> bool:
        """From waiting to prefilling; False: there is no room."""
        is_source = sequence.role is Role.SOURCE
        # The last token is computed in any case: what follows it is sampled from there.
        if not self.room.start(sequence, num_reused_max=sequence.num_tokens - 1, is_windowed_whole=is_source):
            return False
        self.waiting.remove(sequence)
        sequence.state = State.PREFILLING
        sequence.is_leased = is_source
        if not sequence.is_begun:
            sequence.is_begun = True
            self._changes.started.append(sequence)
        return True

    def _work(self, sequence: Sequence, size: int, guesses: tuple[int, ...] = ()) -> ScheduledSequence:
        start, stop = sequence.num_scheduled, sequence.num_scheduled + size
        sequence.num_scheduled = stop
        sequence.num_flights += 1
        is_last = stop == sequence.num_tokens
        hidden, sequence.ahead.hidden = sequence.ahead.hidden, None
        return ScheduledSequence(
            sequence=sequence.number,
            start=start,
            tokens=[*sequence.tokens(start, stop), *guesses],
            pages={
                group: ids[: self.shares.num_pages(group, stop + len(guesses), sequence.num_prompt)]
                for group, ids in sequence.pages.items()
            },
            prompt_tokens=sequence.num_prompt,
            num_samples=sequence.num_samples_last if is_last else 0,
            embeddings=sequence.embeddings(start, stop),
            num_drafted=len(guesses),
            next_token=None if is_last else sequence.tokens(stop, stop + 1)[0],
            hidden=hidden,
        )

    def _has_made_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for so many tokens, taken from younger sequences if need be; False: it has to wait."""
        while not self.room.grow(sequence, num_tokens):
            younger = [one for one in self.sequences.values() if _can_preempt(one) and one.age > sequence.age]
            if not younger:
                return False
            self._preempt(max(younger, key=lambda one: one.age))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.room.remember(sequence)
        self._give_back(sequence)
        self._wait(sequence)
        self._changes.preempted.append(sequence)

    # Keeping the records.

    def _sampled(self, sequence: Sequence, work: ScheduledSequence, tokens: list[int]) -> None:
        num_most = work.num_samples + work.num_drafted
        num_least = 1 if work.num_drafted else num_most
        assert num_least <= len(tokens) <= num_most, (
            f"sequence {work.sequence}: {len(tokens)} tokens sampled, {num_least} to {num_most} asked for"
        )
        guesses = work.tokens[len(work.tokens) - work.num_drafted :]
        assert not work.num_drafted or tokens[:-1] == guesses[: len(tokens) - 1], (
            f"sequence {work.sequence}: {tokens} sampled where {guesses} was guessed"
        )
        sequence.generated += tokens if work.num_drafted else tokens[:1]
        if sequence.state is State.PREFILLING:
            self.room.remember(sequence)
        sequence.state = State.SENT if sequence.role is Role.SOURCE else State.RUNNING

    def _end(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        sequence.state = State.ENDED
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Forgets an ended sequence as soon as nobody touches its pages."""
        if sequence.num_flights or sequence.is_leased:
            return
        self.room.remember(sequence)
        self._give_back(sequence)
        del self.sequences[sequence.number]

    def _give_back(self, sequence: Sequence) -> None:
        # A copy to pages that are given back is not made.
        mine = [copy for number, copy in self.copies if number == sequence.number]
        self.copies = [one for one in self.copies if one[0] != sequence.number]
        self.room.end_copies(mine)
        self.room.give_back(sequence)
        sequence.ahead = Ahead()

    def _wait(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=lambda one: one.age)

    def _oldest_first(self, state: State) -> list[Sequence]:
        found = [sequence for sequence in self.sequences.values() if sequence.state is state]
        return sorted(found, key=lambda sequence: sequence.age)

    def _num_active(self) -> int:
        return sum(1 for sequence in self.sequences.values() if sequence.state in ACTIVE)

    def _check_new(self, sequence: Sequence) -> None:
        assert sequence.number not in self.sequences, f"sequence {sequence.number} is there already"
        check_fit(self.room, self.config, sequence)

    def _known(self, number: int) -> Sequence:
        sequence = self.sequences.get(number)
        if sequence is None:
            raise EngineError(f"no sequence {number}; it ended, or was never added")
        return sequence


def _can_preempt(sequence: Sequence) -> bool:
    is_computed = sequence.state in (State.PREFILLING, State.RUNNING)
    return is_computed and not sequence.num_flights and not sequence.is_leased
