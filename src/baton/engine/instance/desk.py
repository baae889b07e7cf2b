"""What an instance's thread decides: who is computed next, what is handed over, who hears what.

The books (baton.engine.books) say which sequences may be computed, one scheduler per dp group; the desk turns
that into orders for the ranks, and the ranks' answers into pieces for callers. Nothing here blocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

from baton.engine.books.sequence import Sequence
from baton.engine.commands import (
    AbortTransfer,
    Batch,
    CopiesDone,
    EndSequence,
    PageTables,
    Reply,
    SampledToken,
    ScheduledSequence,
    SendKV,
    StartSequence,
    Step,
    StepDone,
    TransferUpdate,
)
from baton.engine.drafting import hidden_of, problem_of, proposal_of
from baton.engine.instance.checking import check_request
from baton.engine.instance.load import Gauge, Queue, num_slots
from baton.engine.instance.lobby import Lobby
from baton.engine.instance.premises import Flying, Premises, Yield
from baton.engine.instance.record import Record, sampled_of
from baton.engine.requests import Generate, Inbound, Outbound, Sink, Story
from baton.errors import ConfigError
from baton.protocol.outcomes import Aux, Cause, Failed, Finished, Ready, Stage, Why

COUNTED = ("preempted", "unpipelined", "pipelined", "drafted", "accepted")
CHECK_PAGES_MAX = 10_000
"""Larger books are not checked when idle: that takes a good part of a second, and a request would wait."""


class Desk:
    """Requests, steps and hand-overs of one instance; everything but `check` on its thread."""

    def __init__(self, premises: Premises, numbers: Iterator[int]) -> None:
        self._premises = premises
        self._books = premises.schedulers
        self._tell = premises.tell
        self._numbers = numbers
        self._steps = itertools.count(1)
        self._records: dict[int, Record] = {}
        """By the number of every sequence that is theirs."""
        self._lobby = Lobby(self._books, premises.tell, self._refuse)
        self._flying: deque[Flying] = deque()
        self._is_checked = True
        self._num_taken = 0
        self.gauge = Gauge(self._books)
        self.counters: dict[str, int] = dict.fromkeys(COUNTED, 0)

    def check(self, request: Generate) -> None:
        """Raises ConfigError on what could never be served; any thread may ask."""
        found = self._premises
        check_request(request, found.facts, self._books[0], found.vocab_size)

    def num_tokens_max(self, num_prompt: int) -> int:
        """Prompt and answer together, at most, for a prompt of this length; any thread may ask."""
        return self._books[0].num_tokens_max(num_prompt)

    def take(self, number: int, request: Generate, sink: Sink, arrived_s: float) -> None:
        """A request comes in."""
        self._num_taken += 1
        record = Record(number, request, sink, Story(arrived_s), self._premises.facts)
        record.dp = min(range(len(self._books)), key=self._load)
        record.begin(number, 0)
        self._records[number] = record
        if record.is_target:
            self._lobby.enter(record)
            return
        try:
            self._books[record.dp].add(record.sequence())
        except ConfigError as error:
            self._refuse(record, str(error))

    def abort(self, number: int, text: str, now_s: float = 0.0) -> None:
        """A caller wants no more of a request."""
        record = self._records.get(number)
        if record is None:
            return
        record.abort()
        self._drop(record, text, now_s)

    def fail_all(self, text: str) -> None:
        """The instance ends: nobody waits for what cannot come."""
        for record in {id(each): each for each in self._records.values()}.values():
            record.give_up(text, Cause(Why.PEER_LOST, Stage.COPY, self._premises.name, text=text))
        self._records.clear()

    def pump(self, now_s: float) -> None:
        """Reserves what can be, and keeps as many steps under way as there are pipeline stages."""
        self._lobby.reserve(now_s)
        num_stages = self._premises.layout.size("pp")
        has_choice = len(self._flying) < num_stages
        while len(self._flying) < num_stages and self._launch(num_stages, now_s):
            pass
        lobby = self._lobby.sizes()
        if has_choice:
            num_waiting = len(lobby) + sum(len(books.waiting) for books in self._books)
            self.gauge.queue = Queue(self._num_taken, num_waiting, sum(map(num_slots, self._books)))
        num_requests = sum(1 for number, record in self._records.items() if record.number == number)
        self.gauge.look(self._books, lobby, num_requests, now_s)
        if not self._records and not self._is_checked:
            self._is_checked = True
            for books in self._books:
                if all(pool.num_pages <= CHECK_PAGES_MAX for pool in books.room.pools.values()):
                    books.check_integrity()

    def heard(self, answer: Reply, now_s: float) -> None:
        """A rank said something."""
        match answer:
            case StepDone():
                self._stepped(answer, now_s)
            case TransferUpdate():
                self._changed(answer, now_s)
            case CopiesDone(rank, sequence, copies):
                if record := self._records.get(sequence):
                    record.story.copies[rank] = copies

    # Steps.

    def _launch(self, num_stages: int, now_s: float) -> bool:
        batches = [
            books.schedule(books.limit_for(num_stages) if num_stages > 1 else None) for books in self._books
        ]
        for books in self._books:
            changes = books.take_changes()
            self.counters["preempted"] += len(changes.preempted)
            for sequence in changes.started:
                self._start(sequence, now_s)
        if not any(batches):
            return False
        step = Step(next(self._steps), [batch or Batch() for batch in batches])
        self._flying.append(Flying(step, batches, set(range(self._premises.layout.num_ranks))))
        self._tell(step)
        return True

    def _start(self, sequence: Sequence, now_s: float) -> None:
        """What ranks have to know of a sequence goes ahead of its first step."""
        record = self._records[sequence.number]
        record.story.begun_s = now_s
        record.story.num_cached = sequence.num_cached
        self._begin(sequence)
        if record.is_source:
            self._send(record, sequence.num_cached, sequence.pages)

    def _send(self, record: Record, num_cached: int, pages: PageTables) -> None:
        hand = record.request.hand
        assert isinstance(hand, Outbound)
        record.is_handing = True
        self._tell(
            SendKV(
                sequence=record.number,
                dp=record.dp,
                transfer=hand.transfer,
                digest=record.digest,
                num_tokens=record.request.num_known,
                num_cached=num_cached,
                pages=pages,
                is_pipelined=hand.is_pipelined,
                policy=hand.policy,
            )
        )

    def _begin(self, sequence: Sequence) -> None:
        asked, request = sequence.asked, self._records[sequence.number].request
        tokens, index = sequence.tokens(0, sequence.num_tokens), request.index + asked.index
        # By the request: the books take what was answered elsewhere for prompt, the sampler does not.
        self._tell(StartSequence(asked.number, asked.dp, tokens, len(request.tokens), request.params, index))

    def _stepped(self, done: StepDone, now_s: float) -> None:
        flying = next(each for each in self._flying if each.step.number == done.number)
        flying.missing.discard(done.rank)
        flying.done[done.rank] = done
        while self._flying and not self._flying[0].missing:
            self._complete(self._flying.popleft(), now_s)

    def _complete(self, flying: Flying, now_s: float) -> None:
        for dp, batch in enumerate(flying.batches):
            if batch is None:
                continue
            ranks = self._premises.layout.group(dp)
            dones = [flying.done[rank] for rank in ranks]
            found = Yield.of(dones)
            self._note(batch, dones)
            num_rows = sum(len(work.tokens) for work in batch.sequences if work.start < work.prompt_tokens)
            self.gauge.stepped(
                num_rows, min(each.start_s for each in dones), max(each.stop_s for each in dones)
            )
            self._books[dp].complete(batch, found.tokens, found.proposals)
            for work in batch.sequences:
                if work.num_samples and work.sequence in self._records:
                    self._sampled(self._records[work.sequence], work, found, now_s)

    def _note(self, batch: Batch, dones: list[StepDone]) -> None:
        """What a step adds to the stories of the prompts in it."""
        for work in batch.sequences:
            record = self._records.get(work.sequence)
            if record is None or work.start >= work.prompt_tokens or record.story.token_s:
                continue
            for done in dones:
                record.story.groups.setdefault(done.rank, []).extend(done.groups)
                if record.is_source and done.unpipelined:
                    record.story.unpipelined.append(done.unpipelined)
            ends = [group.stop_s for done in dones for group in done.groups]
            record.story.prompt_s = max(ends, default=record.story.prompt_s)
            if record.is_source:
                is_whole = any(done.unpipelined for done in dones)
                self.counters["unpipelined" if is_whole else "pipelined"] += 1

    def _sampled(self, record: Record, work: ScheduledSequence, yielded: Yield, now_s: float) -> None:
        """Tokens for one answer, or the first tokens of all of them."""
        number = work.sequence
        found = yielded.samples[number]
        if work.num_drafted:
            self.counters["drafted"] += work.num_drafted
            self.counters["accepted"] += len(found) - 1
        if record.is_over:
            return
        if record.is_source:
            for each, sampled in zip(record.begin_all(len(found)), found, strict=True):
                record.grow(each, sampled, now_s, is_last=True)
            # The hand-over may have been through before this step's last rank was.
            self._close_if_over(record, now_s)
            return
        if record.is_target and not record.story.stepped_s:
            record.story.stepped_s = now_s
        if record.has_begun(number):
            num_tokens = len(found) if work.num_drafted else 1
            self.gauge.decoded(now_s - record.answers[number].told_s, num_tokens)
        # Behind guesses tokens follow one another; else the others are first ones of its forks.
        numbers = [number] * len(found)
        if not work.num_drafted:
            numbers = self._forked(record, number, found, yielded.hidden.get(number))
        for each, sampled in zip(numbers, found, strict=True):
            if not record.has_ended(each) and record.grow(each, sampled, now_s):
                self._finish(record, each, now_s)

    def _forked(
        self, record: Record, number: int, found: list[SampledToken], hidden: bytes | None
    ) -> list[int]:
        """The sequences that so many first tokens are for."""
        numbers = [next(self._numbers) for _ in found[1:]]
        if numbers:
            tokens = [each.token for each in found[1:]]
            for child in self._books[record.dp].fork(number, tokens, numbers, hidden):
                self._records[child.number] = record
                record.begin(child.number, child.asked.index)
                self._begin(child)
        return [number, *numbers]

    def _finish(self, record: Record, number: int, now_s: float) -> None:
        self._books[record.dp].finish(number)
        self._forget(record, number, now_s)

    # Hand-overs.

    def _changed(self, answer: TransferUpdate, now_s: float) -> None:
        record = self._records.get(answer.sequence)
        if record is None:
            return
        books = self._books[record.dp]
        if answer.is_granted:
            books.granted(record.number)
        if answer.early is not None and not record.early_s:
            record.early_s = now_s
            if record.is_early and not record.is_over:
                self._tell_firsts(record, answer.early, now_s)
        if answer.outcome is not None and not record.story.settled_s:
            record.story.settled_s = now_s
            self._settled(record, answer.outcome, now_s)
        if answer.is_released:
            record.num_releases += 1
            wanted = len(self._premises.layout.group(record.dp)) if record.is_source else 1
            if record.num_releases == wanted:
                record.is_handing = False
                books.release(record.number)
                self._close_if_over(record, now_s)

    def _settled(self, record: Record, outcome: Ready | Finished | Failed, now_s: float) -> None:
        match outcome:
            case Failed(cause):
                if record.is_source or record.is_open:
                    record.give_up(str(cause), cause)
                self._drop(record, str(cause), now_s)
            case Ready(aux) if record.is_target and not record.is_over:
                self._admit(record, aux, now_s)
            case Finished(aux) if record.is_target and not record.is_over:
                self._tell_firsts(record, aux, now_s)
                record.cut_off()
                self._drop(record, "the answer ended at its source", now_s)

    def _tell_firsts(self, record: Record, aux: Aux, now_s: float) -> None:
        """First tokens of answers that have no sequences, or not yet; what was told is not told again."""
        found = self._firsts(record, aux, now_s)
        if found:
            for each, sampled in zip(record.begin_all(len(found)), found, strict=True):
                if not record.has_begun(each):
                    record.grow(each, sampled, now_s)

    def _admit(self, record: Record, aux: Aux, now_s: float) -> None:
        found = self._firsts(record, aux, now_s)
        if not found:
            return
        sequence = self._books[record.dp].admit(record.number, [found[0].token], proposal_of(aux))
        self._begin(sequence)
        numbers = self._forked(record, record.number, found, hidden_of(aux))
        for each, sampled in zip(numbers, found, strict=True):
            is_told = record.has_begun(each)
            if record.has_ended(each) if is_told else record.grow(each, sampled, now_s):
                self._finish(record, each, now_s)

    def _firsts(self, record: Record, aux: Aux, now_s: float) -> list[SampledToken]:
        """What a source sampled; nothing, and the request fails, where that cannot be."""
        num_wanted, vocab_size = record.request.params.n, self._premises.vocab_size
        record.story.num_cached = aux.cached_tokens
        problem = problem_of(aux, vocab_size, self._premises.hidden_size)
        if len(aux.tokens) != num_wanted or not all(0 <= token < vocab_size for token in aux.tokens):
            problem = f"sampled {list(aux.tokens)}; {num_wanted} tokens were asked for"
        if not problem:
            return sampled_of(aux)
        hand = record.request.hand
        assert isinstance(hand, Inbound)
        text = f"source {hand.source} {problem}"
        record.give_up(text, Cause(Why.REFUSED_PROMPT, Stage.COMMIT, self._premises.name, text=text))
        self._drop(record, text, now_s)
        return []

    # Endings.

    def _drop(self, record: Record, text: str, now_s: float) -> None:
        """Ends what is left of a request; pages that a hand-over may touch come back later."""
        self._lobby.leave(record, text)
        if record.is_source and not record.story.begun_s:
            # Its target waits for an offer, and hears in this way that there will be none.
            record.story.begun_s = now_s
            self._send(record, 0, {})
        if record.is_handing and not record.story.settled_s:
            self._tell(AbortTransfer(record.number, text))
        for number in [each for each, found in self._records.items() if found is record]:
            self._books[record.dp].abort(number)
            if number != record.number:
                self._forget(record, number, now_s)
        self._close_if_over(record, now_s)

    def _forget(self, record: Record, number: int, now_s: float) -> None:
        """One answer is over."""
        self._tell(EndSequence(number))
        if number != record.number:
            self._records.pop(number, None)
        self._close_if_over(record, now_s)

    def _close_if_over(self, record: Record, now_s: float) -> None:
        if record.is_open or record.is_handing or self._records.get(record.number) is not record:
            return
        # Ranks may have forgotten it already; one that was aborted or handed over they have not.
        self._tell(EndSequence(record.number))
        del self._records[record.number]
        self._is_checked = False
        if (handoff_s := record.handoff_s) is not None:
            self.gauge.handed(handoff_s)
        record.tell_story(now_s)

    def _refuse(self, record: Record, text: str) -> None:
        cause = Cause(Why.OUT_OF_PAGES, Stage.GRANT, self._premises.name, text=text)
        record.give_up(text, cause)
        if record.is_source:
            self._drop(record, text, record.story.arrived_s)
        else:
            del self._records[record.number]

    def _load(self, dp: int) -> int:
        """How many tokens a dp group has taken on."""
        known = sum(each.num_tokens for each in self._books[dp].sequences.values())
        return known + self._lobby.num_tokens(dp)
