"""A scheduler, the memory that its batches write, and everybody who calls it; every call is checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from tests.engine.scheduler.memory import JUNK, Memory, entries, with_next

from baton.engine.commands import PageTables, ScheduledBatch, ScheduledSequence
from baton.engine.sampling_params import SamplingParams
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequence import Sequence, SequenceRole, SequenceStatus
from baton.errors import ConfigError

VOCABULARY = 3
STEPS_MAX = 4000


@dataclass(frozen=True, slots=True)
class Setting:
    """What a world is made of."""

    layout: str = "tp2"
    cache: str = "full"
    page_tokens: int = 2
    num_pages: int = 12
    num_slots: int = 3
    config: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(chunk_tokens=5, batch_tokens_max=8, sequences_max=4)
    )


@dataclass(slots=True)
class Lent:
    """Pages that a hand-over may touch, as it was told of them."""

    sequence: Sequence
    pages: PageTables
    num_held: int = 0
    sent: list[int] | None = None
    """What a target may copy, once the prompt is complete."""
    is_admitted: bool = False


class World:
    """Every method is something that a caller may do, and asserts what it may rely on."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.memory = Memory(setting.layout, setting.cache, setting.page_tokens)
        pools = {
            group: setting.num_pages if extent.has_tokens else setting.num_slots
            for group, extent in self.memory.extents.items()
        }
        self.scheduler = Scheduler(setting.config, self.memory.geometry, pools)
        self.tokens: dict[int, list[int]] = {}
        """All known tokens, kept apart from the scheduler's records."""
        self.salts: dict[int, str] = {}
        self.scheduled: dict[int, int] = {}
        self.pending: list[ScheduledBatch] = []
        """In flight, and the ranks have not come to them."""
        self.in_flight: list[ScheduledBatch] = []
        self.started: set[int] = set()
        self.accepted: dict[int, int] = {}
        """Guesses of the last step, if there were any."""
        self.forked: set[int] = set()
        """Forks that nothing was computed of yet."""
        self.lent: dict[int, Lent] = {}
        """Until they are released, whatever the scheduler thinks."""
        self.seen = Counter[str]()
        self.num_made = 0

    # Calls.

    def make(
        self, role: SequenceRole, prompt: list[int], max_tokens: int, n: int = 1, salt: str = ""
    ) -> Sequence:
        number = self.num_made
        self.num_made += 1
        params = SamplingParams(max_tokens=max_tokens, n=n)
        return Sequence(number, tuple(prompt), params, role=role, arrival_s=float(number), salt=salt)

    def add(self, sequence: Sequence) -> bool:
        try:
            self.scheduler.add(sequence)
        except ConfigError:
            assert not self.can_fit(sequence), "refused what fits"
            return False
        self._know(sequence, list(sequence.prompt))
        return True

    def reserve(self, sequence: Sequence) -> bool:
        try:
            reservation = self.scheduler.reserve(sequence)
        except ConfigError:
            assert not self.can_fit(sequence), "refused what fits"
            return False
        if reservation is None:
            return False
        self._know(sequence, list(sequence.prompt))
        self.started.add(sequence.number)
        self.scheduled[sequence.number] = sequence.num_prompt
        num_held = max(reservation.held.values(), default=0)
        self.seen["held"] += num_held > 0
        self.lent[sequence.number] = Lent(sequence, reservation.pages, num_held)
        wanted = self.entries_of(sequence)
        if num_held:
            self.memory.check(reservation.pages, wanted[:num_held], sequence.num_prompt, "what is held")
        return True

    def admit(self, sequence: Sequence) -> None:
        """The hand-over wrote what was not held; the first tokens come with it."""
        first = self._samples(self.plain_by_number(sequence.number)[-1], sequence.params.n)
        wanted, held = self.entries_by_number(sequence.number, first[:1]), sequence.num_cached
        self.lent[sequence.number].is_admitted = True
        self.memory.write(sequence.pages, held, wanted[held:], sequence.num_prompt)
        if held == len(wanted):
            self.memory.write(sequence.pages, held - 1, wanted[held - 1 :], sequence.num_prompt)
        self.scheduler.admit(sequence.number, first[0], self._guesses(sequence.number, first[:1], 3))
        self._sampled(sequence, first)

    def disturb(self, lent: Lent) -> None:
        """A writer that is not quiet yet writes into pages that it was granted."""
        prompt = lent.sequence.num_prompt
        self.memory.write(lent.pages, lent.num_held, [JUNK] * (prompt - lent.num_held), prompt)

    def schedule(self, limit: int | None = None) -> bool:
        batch = self.scheduler.schedule(limit)
        self._check_changes(*self.scheduler.take_changes())
        if batch is None:
            return False
        config = self.scheduler.config
        assert batch.sequences
        assert batch.num_rows <= config.batch_tokens_max
        assert len(batch.sequences) <= config.sequences_max
        kinds = [self._check_work(work) for work in batch.sequences]
        assert kinds == sorted(kinds, reverse=True), "decode rows come first"
        assert limit is None or sum(kinds) <= limit
        self.seen["copies"] += len(batch.copies)
        self.pending.append(batch)
        self.in_flight.append(batch)
        return True

    def run(self) -> None:
        """The ranks compute the next batch."""
        batch = self.pending.pop(0)
        self.memory.run(batch, {work.sequence: self._written(work) for work in batch.sequences})

    def complete(self) -> None:
        batch = self.in_flight.pop(0)
        if self.pending and self.pending[0] is batch:
            self.run()
        samples = {work.sequence: self._drawn(work) for work in batch.sequences if work.num_samples}
        proposals = {
            work.sequence: self._guesses(
                work.sequence, samples[work.sequence][: 1 + work.num_drafted], work.num_guesses
            )
            for work in batch.sequences
            if work.num_samples
        }
        live = {
            number: sequence
            for number, sequence in self.scheduler.sequences.items()
            if sequence.status is not SequenceStatus.ENDED
        }
        self.scheduler.complete(batch, samples, proposals)
        for work in batch.sequences:
            if work.num_samples and work.sequence in live:
                self._sampled(live[work.sequence], samples[work.sequence], is_guessed=work.num_drafted > 0)
                if work.num_drafted:
                    self.accepted[work.sequence] = len(samples[work.sequence]) - 1
                    num_right = len(samples[work.sequence]) - 1
                    self.seen["right"] += num_right > 0
                    self.seen["wrong"] += num_right < work.num_drafted
                    self.seen["partly right"] += 0 < num_right < work.num_drafted
                    # Only what stands was computed for good.
                    self.scheduled[work.sequence] = live[work.sequence].num_computed

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence.number)

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.abort(sequence.number)

    def release(self, lent: Lent) -> None:
        del self.lent[lent.sequence.number]
        self.scheduler.release(lent.sequence.number)

    # What is there.

    def in_state(self, *statuses: SequenceStatus) -> list[Sequence]:
        return [sequence for sequence in self.scheduler.sequences.values() if sequence.status in statuses]

    def awaited(self) -> list[Lent]:
        """Reserved and not admitted; some of it may have been given up."""
        return [
            lent
            for lent in self.lent.values()
            if lent.sequence.role is SequenceRole.TARGET and not lent.is_admitted
        ]

    def plain_by_number(self, number: int, more: Many[int] = ()) -> list[int]:
        """What the model stores for a sequence and further tokens."""
        return entries(self.salts[number], [*self.tokens[number], *more])

    def entries_by_number(self, number: int, more: Many[int] = ()) -> list[int]:
        """What is in the pages for each known token, and `more` to follow them."""
        plain = self.plain_by_number(number)
        if self.setting.cache != "draft":
            return plain
        return with_next(plain, [*self.tokens[number], *more, JUNK][1 : len(plain) + 1])

    def entries_of(self, sequence: Sequence) -> list[int]:
        return self.entries_by_number(sequence.number)

    def can_fit(self, sequence: Sequence) -> bool:
        """Whether it could end if it were alone, by a generous count for windows."""
        config, geometry = self.scheduler.config, self.memory.geometry
        prompt, total = sequence.num_prompt, sequence.num_tokens_max
        for group, pool in self.scheduler.kv_cache.pools.items():
            step = config.chunk_tokens * config.chunks_in_flight
            need = geometry.num_pages_max(group, total, prompt, step)
            if sequence.role is SequenceRole.SOURCE:
                need = geometry.num_pages(group, prompt, prompt)
            if need > pool.num_pages:
                return False
        return True

    def check(self) -> None:
        """What holds at any time."""
        self.scheduler.check_integrity()
        sources = [lent for lent in self.lent.values() if lent.sequence.role is SequenceRole.SOURCE]
        for lent in sources:
            if lent.sent is not None:
                name = f"source {lent.sequence.number}"
                self.memory.check(lent.pages, lent.sent, lent.sequence.num_prompt, name)
        ungranted = [lent.sequence for lent in sources if not lent.sequence.is_granted]
        for group, pool in self.scheduler.kv_cache.pools.items():
            num_held = len({page for sequence in ungranted for page in sequence.held_pages(group)})
            assert num_held <= pool.num_pages // 2, "ungranted sources hold over a half"

    def settle(self) -> None:
        """Lets everything come to its end, and asserts that it does."""
        for _ in range(STEPS_MAX):
            if self.scheduler.is_idle:
                break
            for sequence in self.in_state(SequenceStatus.RECEIVING):
                self.admit(sequence)
            for lent in list(self.lent.values()):
                if lent.sequence.status is not SequenceStatus.PREFILLING:
                    self.release(lent)
            for sequence in self.in_state(SequenceStatus.WAITING):
                if sequence.role is SequenceRole.SOURCE:
                    self.scheduler.grant(sequence.number)
            if not self.schedule() and not self.in_flight:
                assert self.scheduler.is_idle, f"stuck: {self.scheduler.sequences}"
            if self.in_flight:
                self.complete()
            self.check()
        assert self.scheduler.is_idle, f"it does not end: {self.scheduler.sequences}"
        for group, pool in self.scheduler.kv_cache.pools.items():
            assert pool.counts().num_used == 0, f"pages of {group} are lost: {pool.counts()}"

    # Parts.

    def _know(self, sequence: Sequence, tokens: list[int]) -> None:
        self.salts[sequence.number] = sequence.salt
        self.tokens[sequence.number] = tokens
        self.scheduled[sequence.number] = 0

    def _check_changes(self, started: list[Sequence], preempted: list[Sequence]) -> None:
        for sequence in preempted:
            assert sequence.role is not SequenceRole.SOURCE
            assert sequence.number in self.started
            assert not any(
                work.sequence == sequence.number for batch in self.in_flight for work in batch.sequences
            )
            self.scheduled[sequence.number] = 0
            self.forked.discard(sequence.number)
            self.accepted.pop(sequence.number, None)
            self.seen["preempted"] += 1
        for sequence in started:
            assert sequence.number not in self.started, "reported as started twice"
            self.started.add(sequence.number)
            self.seen["hits"] += sequence.num_cached > 0
            if sequence.role is SequenceRole.SOURCE:
                pages = {group: list(ids) for group, ids in sequence.pages.items()}
                self.lent[sequence.number] = Lent(sequence, pages)
                cached = self.entries_of(sequence)[: sequence.num_cached]
                self.memory.check(sequence.pages, cached, sequence.num_prompt, "what the source has cached")

    def _check_work(self, work: ScheduledSequence) -> bool:
        """Whether a work is decoding."""
        sequence, tokens = self.scheduler.sequences[work.sequence], self.tokens[work.sequence]
        assert work.sequence in self.started
        stop = work.start + len(work.tokens)
        assert work.tokens, "a work without tokens"
        known = work.tokens[: len(work.tokens) - work.num_drafted]
        stop -= work.num_drafted
        assert known == tokens[work.start : stop], "tokens that are unknown, or others"
        assert work.next_token == (tokens[stop] if stop < len(tokens) else None), "another one follows"
        is_late = work.sequence in self.forked and self.scheduled[work.sequence] == sequence.num_prompt
        assert (work.hidden is not None) == (is_late and self.memory.geometry.num_lookahead > 0)
        self.forked.discard(work.sequence)
        assert work.num_accepted == self.accepted.pop(work.sequence, 0), "a state would take in others"
        self.seen["guesses"] += work.num_drafted
        assert work.prompt_tokens == sequence.num_prompt
        before = self.scheduled[work.sequence]
        if before == 0:
            assert work.start == sequence.num_cached, "a prompt begins behind what is cached"
        else:
            assert work.start == before, "a sequence goes on where it was"
        self.scheduled[work.sequence] = stop
        flights = [
            other for batch in self.in_flight for other in batch.sequences if other.sequence == work.sequence
        ]
        assert len(flights) < self.scheduler.config.chunks_in_flight
        assert all(not other.num_samples for other in flights), "the token after it is not known"
        is_first = stop == sequence.num_prompt == len(tokens)
        forks = is_first and sequence.index == 0 and sequence.role is not SequenceRole.TARGET
        assert work.num_samples == (0 if stop < len(tokens) else sequence.params.n if forks else 1)
        is_decoding = sequence.status is SequenceStatus.RUNNING
        assert len(known) <= (1 if is_decoding else self.scheduler.config.chunk_tokens)
        assert work.num_drafted <= is_decoding * self.scheduler.config.num_guesses, "only what is decoded"
        if self.setting.cache == "draft" and work.num_samples:
            assert 1 <= work.num_guesses <= self.scheduler.config.num_guesses
        assert stop + work.num_drafted <= sequence.num_tokens_max, "a guess that could never stand"
        return is_decoding

    def _samples(self, last: int, count: int) -> list[int]:
        """Answers are a function of what was seen, so that equal prompts go on equally."""
        return [(last + index) % VOCABULARY for index in range(count)]

    def _drawn(self, work: ScheduledSequence) -> list[int]:
        """What is sampled: behind a guess that is right, one more."""
        sampled = self._samples(self.plain_by_number(work.sequence)[-1], work.num_samples)
        for guess in work.tokens[len(work.tokens) - work.num_drafted :]:
            if guess != sampled[-1]:
                break
            sampled += self._samples(self.plain_by_number(work.sequence, sampled)[-1], 1)
        return sampled

    def _guesses(self, number: int, sampled: Many[int], num_guesses: int) -> list[int]:
        """What a draft guesses to follow: mostly right, sometimes nothing."""
        guesses: list[int] = []
        while self.setting.cache == "draft" and len(guesses) < num_guesses:
            last = self.plain_by_number(number, [*sampled, *guesses])[-1]
            right = self._samples(last, 1)[0]
            if last % 8 == 7:
                break
            guesses.append((right + 1) % VOCABULARY if last % 4 == 2 else right)
        return guesses

    def _written(self, work: ScheduledSequence) -> list[int]:
        """The entries of a sequence as they are once a work is computed."""
        if self.setting.cache != "draft":
            return self.entries_by_number(work.sequence)
        guesses = work.tokens[len(work.tokens) - work.num_drafted :] if work.num_drafted else []
        sampled = self._drawn(work)[: 1 + work.num_drafted] if work.num_samples else []
        plain = self.plain_by_number(work.sequence, guesses)
        following = [*self.tokens[work.sequence], *sampled, *[JUNK] * len(plain)][1 : len(plain) + 1]
        return with_next(plain, following)

    def _sampled(self, sequence: Sequence, sampled: list[int], *, is_guessed: bool = False) -> None:
        if is_guessed:
            self.tokens[sequence.number] += sampled
            assert sequence.generated == self.tokens[sequence.number][sequence.num_prompt :]
            if len(sequence.generated) >= sequence.params.max_tokens:
                self.finish(sequence)
            return
        self.tokens[sequence.number].append(sampled[0])
        assert sequence.generated == self.tokens[sequence.number][sequence.num_prompt :]
        if sequence.role is SequenceRole.SOURCE:
            assert sequence.status is SequenceStatus.SENT
            self.lent[sequence.number].sent = self.entries_of(sequence)[: sequence.num_prompt]
            return
        answers = [sequence]
        if len(sampled) > 1:
            numbers = range(self.num_made, self.num_made + len(sampled) - 1)
            self.num_made += len(sampled) - 1
            answers += self.scheduler.fork(sequence.number, sampled[1:], numbers, b"row")
            for child, token in zip(answers[1:], sampled[1:], strict=True):
                self._know(child, [*sequence.prompt, token])
                self.started.add(child.number)
                self.scheduled[child.number] = child.num_computed
                self.seen["forks"] += child.status is SequenceStatus.RUNNING
                if child.status is SequenceStatus.RUNNING:
                    self.forked.add(child.number)
        for answer in answers:
            if len(answer.generated) >= answer.params.max_tokens:
                self.finish(answer)
