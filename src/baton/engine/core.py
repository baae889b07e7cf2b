"""The engine core: schedules steps and hand-overs, and turns the workers' replies into output.

One scheduler per dp group decides which sequences are computed. `step` schedules until every pipeline stage
has work and sends it to the workers; `on_reply` takes what they computed and outputs it. Nothing here blocks.

A request whose KV cache comes from a source waits (`_waiting_for_kv`) until pages are reserved for it. Pages
of a hand-over stay leased until every rank that may touch them has released it, whatever became of the
request."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

import msgspec

from baton.engine.commands import (
    AbortTransfer,
    Command,
    CopiesDone,
    DeclineTransfer,
    EndSequence,
    PageTables,
    QueueTransfer,
    ReceiveKV,
    Reply,
    SampledToken,
    ScheduledBatch,
    ScheduledSequence,
    SendCached,
    SendKV,
    StartSequence,
    Step,
    StepDone,
    TransferUpdate,
)
from baton.engine.config import EngineConfig, EngineSizes
from baton.engine.drafting import FAILURE, hidden_of, problem_of, proposals_of
from baton.engine.load import LoadMonitor, QueueSnapshot
from baton.engine.pages import PageGeometry
from baton.engine.requests import (
    EngineRequest,
    EventSink,
    InboundHandoff,
    ModelContext,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestFinished,
    check_request,
)
from baton.engine.sampling_params import Progress, ending
from baton.engine.scheduler import Scheduler, SchedulerConfig
from baton.engine.sequence import Sequence, SequenceRole
from baton.engine.tokenizer import AnswerText
from baton.engine.trace import RequestTrace
from baton.errors import ConfigError, EngineError
from baton.protocol.outcomes import Aux, Cause, Failed, Finished, Outcome, Ready, Stage, Why
from baton.protocol.timings import Timings
from baton.session import prompt_digest

HANDED, ABORTED = "handed", "abort"
COUNTERS = ("preempted", "unpipelined", "pipelined", "drafted", "accepted")
CHECKED_PAGES_MAX = 10_000
"""Larger pools are not checked when idle: that takes a good part of a second, and a request would wait."""
RENEW_S = Timings().offer_s / 4
"""How often the peers of queued transfers are told that the queue moves."""


@dataclass(slots=True)
class InFlightStep:
    """A step that the workers compute."""

    step: Step
    replies: dict[int, StepDone] = field(default_factory=dict)
    """By rank."""


@dataclass(slots=True)
class AnswerState:
    """One of a request's answers."""

    index: int
    text: AnswerText | None
    num_generated: int = 0
    """Including those that another instance generated."""
    finish: str | None = None
    last_token_s: float = 0.0
    """When its latest token was output; 0: none was output here."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One request; only the instance's thread uses it."""

    number: int
    request: EngineRequest
    sink: EventSink
    trace: RequestTrace
    model: ModelContext
    dp: int = 0
    answers: dict[int, AnswerState] = field(default_factory=dict)
    """By the number of the sequence; the first answer has the request's own number. Answers that have no
    sequence (yet) are under their negated index."""
    is_announced: bool = False
    """The peer of its hand-over was told that it waits here."""
    is_handing_over: bool = False
    """The ranks know of its hand-over, and some have not released it."""
    num_releases: int = 0
    is_closed: bool = False
    """The caller gets no more chunks: the request failed or was aborted."""
    prompt_logprobs: list[SampledToken] = field(default_factory=list)
    early_s: float = 0.0
    """When a source's first tokens arrived ahead of the cache; 0 before that."""

    @property
    def is_source(self) -> bool:
        return isinstance(self.request.handoff, OutboundHandoff)

    @property
    def is_target(self) -> bool:
        return isinstance(self.request.handoff, InboundHandoff)

    @property
    def is_open(self) -> bool:
        """Whether an answer continues."""
        return not self.is_closed and any(answer.finish is None for answer in self.answers.values())

    @property
    def handoff_s(self) -> float | None:
        """What its hand-over took beyond compute, as this side sees it; None: it had none, or it failed."""
        begun_s = self.trace.prompt_s if self.is_source else self.early_s
        is_known = self.trace.is_handed_over and begun_s and not self.is_closed
        return self.trace.settled_s - begun_s if is_known else None

    @property
    def digest(self) -> bytes:
        """Both sides of a hand-over have to agree on it."""
        request = self.request
        return prompt_digest(request.known, salt=request.salt, embeddings=request.embeddings or b"").value

    def open_answer(self, number: int, index: int) -> None:
        """Makes a sequence's answer; one that was opened without a sequence continues."""
        if index and (answer := self.answers.pop(-index, None)) is not None:
            self.answers[number] = answer
            return
        request, model, text = self.request, self.model, None
        if model.tokenizer is not None:
            text = AnswerText(model.tokenizer, request.params, model.eos_ids, request.tokens)
            for token in request.generated:
                text.push(token)  # its text was output by the instance that generated it
        self.answers[number] = AnswerState(request.index + index, text, len(request.generated))

    def open_answers(self, num_answers: int) -> list[int]:
        """Makes all answers, with or without a sequence; returns their keys."""
        numbers = [self.number, *(-index for index in range(1, num_answers))]
        for index, number in enumerate(numbers):
            if number not in self.answers:
                self.open_answer(number, index)
        return numbers

    def append(self, number: int, sampled: SampledToken, now_s: float, *, is_last: bool = False) -> bool:
        """Outputs a token of an answer; True: the answer is complete."""
        answer = self.answers[number]
        if self.is_closed or answer.finish is not None:
            return True
        prompt_logprobs = () if answer.last_token_s else self.prompt_logprobs
        answer.num_generated += 1
        answer.last_token_s = now_s
        text = answer.text.push(sampled.token) if answer.text else ""
        progress = Progress(
            last_token=sampled.token,
            num_generated=answer.num_generated,
            num_tokens=len(self.request.tokens) + answer.num_generated,
            context_max=self.model.context_max,
            has_stop_string=bool(answer.text and answer.text.has_stop_string),
        )
        answer.finish = ending(progress, self.request.params, self.model.eos_ids)
        if answer.finish is None and is_last:
            answer.finish = HANDED
        elif answer.finish is not None and answer.text:
            text += answer.text.finish()
        self.trace.token_s = self.trace.token_s or now_s
        self.sink(OutputChunk(answer.index, (sampled,), text, answer.finish, prompt_logprobs))
        return answer.finish is not None

    def finish_at_source(self) -> None:
        """Ends the open answers with "length": the source ended them, having less room than this instance."""
        for answer in self.answers.values():
            if answer.finish is None and not self.is_closed:
                answer.finish = "length"
                text = answer.text.finish() if answer.text else ""
                self.sink(OutputChunk(answer.index, (), text, answer.finish))

    def abort(self) -> None:
        """Ends the open answers for the caller."""
        if self.is_closed:
            return
        for answer in self.answers.values():
            if answer.finish is None:
                answer.finish = ABORTED
                self.sink(OutputChunk(answer.index, (), "", ABORTED))
        self.is_closed = True

    def fail(self, text: str, cause: Cause | None) -> None:
        """Reports the failure to the caller, once."""
        if not self.is_closed:
            self.is_closed = True
            self.sink(RequestError(cause, text, self.trace))

    def finish(self, now_s: float) -> None:
        """Reports the trace: nothing of the request is left here."""
        self.trace.ended_s = now_s
        self.sink(RequestFinished(self.trace))


class EngineCore:
    """Requests, steps and hand-overs of one instance.

    Any thread may call the methods up to `num_tokens_max`, the instance's thread the others. `send` sends a
    command to the workers; `post` has the instance's thread make a call.
    """

    def __init__(
        self,
        config: EngineConfig,
        sizes: EngineSizes,
        model: ModelContext,
        send: Callable[[Command], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._config = config
        self._layout = sizes.layout
        self._model = model
        self._send = send
        self._post = post
        self._submit_lock = threading.Lock()
        """Guards the two below."""
        self._num_submitted = 0
        self._why_not_running = "it was not started"
        self._num_stages = sizes.layout.size("pp")
        limits = SchedulerConfig(
            chunk_tokens=config.chunk_tokens,
            batch_tokens_max=2 * max(config.chunk_tokens, config.sequences_max),
            sequences_max=config.sequences_max,
            context_tokens_max=sizes.context_max,
            chunks_in_flight=self._num_stages,
            ungranted_share_max=config.ungranted_share_max,
            growth_tokens=config.growth_tokens,
            num_guesses=config.draft_tokens,
        )
        geometry = PageGeometry(sizes.layout, sizes.cache, config.page_tokens)
        self.schedulers = [
            Scheduler(limits, geometry, sizes.num_pages) for _ in range(sizes.layout.size("dp"))
        ]
        self._numbers = itertools.count(1)
        """Of requests and sequences."""
        self._step_numbers = itertools.count(1)
        self.requests: dict[int, RequestState] = {}
        """By the number of every sequence of theirs."""
        self._waiting_for_kv: list[deque[RequestState]] = [deque() for _ in self.schedulers]
        """By dp group, oldest first: requests from a source without pages."""
        self._new_sources: list[RequestState] = []
        """Those that the schedulers may not have seen yet."""
        self._has_moved = False
        """Whether anything was computed or handed over since the peers of queued transfers were told so."""
        self._renewed_s = 0.0
        self._in_flight: deque[InFlightStep] = deque()
        self._is_checked = True
        self._num_taken = 0
        self.queue_s_max = 0.0
        """As in EngineConfig, once the instance is warm."""
        self.monitor = LoadMonitor(self.schedulers)
        self.counters: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def submit(self, request: EngineRequest, sink: EventSink) -> int:
        """Queues a request and returns its number.

        Raises ConfigError on a request that could never be served, and FullError if too many wait already.
        """
        self.check(request)
        number = next(self._numbers)
        add = partial(self._add_request, number, request, sink, monotonic())
        with self._submit_lock:
            if self._why_not_running:
                raise EngineError(f"{self._config.name} is not running: {self._why_not_running}")
            self.monitor.check_admission(self._config.name, self._num_submitted, self._config.queue_max)
            self._num_submitted += 1
            self._post(add)
        return number

    def abort(self, number: int, text: str = "aborted by the caller") -> None:
        """Gives a request up, on both sides of its hand-over; its pages return when they can."""
        self._post(lambda: self._abort(number, text, monotonic()))

    def check(self, request: EngineRequest) -> None:
        """Raises ConfigError on a request that could never be served."""
        if request.dp is not None and not 0 <= request.dp < len(self.schedulers):
            raise ConfigError(f"dp is {request.dp}: give a dp group from 0 to {len(self.schedulers) - 1}")
        check_request(request, self._model, self.schedulers[0])

    def num_tokens_max(self, num_prompt: int) -> int:
        """The longest prompt and answer together for a prompt of this length."""
        return self.schedulers[0].num_tokens_max(num_prompt)

    def set_running(self, why_not: str = "") -> None:
        """Accepts requests from now on, or refuses them for this reason."""
        with self._submit_lock:
            self._why_not_running = why_not

    def _add_request(self, number: int, request: EngineRequest, sink: EventSink, arrived_s: float) -> None:
        self._num_taken += 1
        state = RequestState(number, request, sink, RequestTrace(arrived_s), self._model)
        state.dp = request.dp if request.dp is not None else self._least_loaded_dp()
        state.open_answer(number, 0)
        self.requests[number] = state
        if state.is_target:
            self._waiting_for_kv[state.dp].append(state)
            return
        if state.is_source:
            self._new_sources.append(state)
        try:
            self.schedulers[state.dp].add(self._make_sequence(state))
        except ConfigError as error:
            self._refuse(state, str(error))

    def _abort(self, number: int, text: str, now_s: float) -> None:
        state = self.requests.get(number)
        if state is not None:
            state.abort()
            self._drop(state, text, now_s)

    def fail_all(self, text: str) -> None:
        """Fails every request: the instance has ended."""
        cause = Cause(Why.PEER_LOST, Stage.COPY, self._config.name, text=text)
        for state in list(self.requests.values()):
            state.fail(text, cause)
        self.requests.clear()

    def step(self, now_s: float) -> None:
        """Reserves pages for received prompts, and gives every pipeline stage a step."""
        if self.queue_s_max:
            self._expire_queued(now_s)
        self._reserve_pages(now_s)
        has_free_stage = len(self._in_flight) < self._num_stages
        while len(self._in_flight) < self._num_stages and (scheduled := self._schedule(now_s)):
            self._in_flight.append(scheduled)
            self._send(scheduled.step)
        if has_free_stage:
            self._announce_queued()
        if self._has_moved and now_s >= self._renewed_s + RENEW_S:
            self._renew_queued(now_s)
        self._update_load(has_free_stage, now_s)
        if not self.requests and not self._is_checked:
            self._is_checked = True
            for scheduler in self.schedulers:
                if all(pool.num_pages <= CHECKED_PAGES_MAX for pool in scheduler.kv_cache.pools.values()):
                    scheduler.check_integrity()

    def _expire_queued(self, now_s: float) -> None:
        limit_s = self.queue_s_max
        for state in list(self.requests.values()):
            if not state.trace.begun_s and now_s - state.trace.arrived_s >= limit_s:
                text = f"{self._config.name} did not begin within {limit_s:g} s (--queue-timeout)"
                state.fail(f"{text}; ask again later, or add instances", None)
                self._drop(state, text, now_s)

    def on_reply(self, reply: Reply, now_s: float) -> None:
        """Takes a message of a worker."""
        match reply:
            case StepDone():
                self._has_moved = True
                computed = next(s for s in self._in_flight if s.step.number == reply.number)
                computed.replies[reply.rank] = reply
                while self._in_flight and len(self._in_flight[0].replies) == self._layout.num_ranks:
                    self._postprocess(self._in_flight.popleft(), now_s)
            case TransferUpdate():
                self._on_handoff(reply, now_s)
            case CopiesDone(rank, sequence, copies):
                if state := self.requests.get(sequence):
                    state.trace.copies[rank] = copies

    # Steps.

    def _schedule(self, now_s: float) -> InFlightStep | None:
        batches = []
        for scheduler, targets in zip(self.schedulers, self._waiting_for_kv, strict=True):
            decodes_max = scheduler.decodes_max(self._num_stages) if self._num_stages > 1 else None
            oldest_target = (targets[0].trace.arrived_s, targets[0].number) if targets else None
            batches.append(scheduler.schedule(decodes_max, oldest_target) or ScheduledBatch())
        for scheduler in self.schedulers:
            started, preempted = scheduler.take_changes()
            self.counters["preempted"] += len(preempted)
            for sequence in started:
                # The workers have to know of a sequence before its first step.
                state = self.requests[sequence.number]
                state.trace.begun_s = now_s
                state.trace.num_cached = sequence.num_cached
                self._send_begin(sequence)
                if state.is_source:
                    self._send_handoff(state, sequence.num_cached, sequence.pages)
        if not any(batch.sequences for batch in batches):
            return None
        return InFlightStep(Step(next(self._step_numbers), batches))

    def _postprocess(self, computed: InFlightStep, now_s: float) -> None:
        """Appends what a step sampled and outputs it."""
        for dp, batch in enumerate(computed.step.batches):
            if not batch.sequences:
                continue
            replies = [computed.replies[rank] for rank in self._layout.group(dp)]
            # One rank of the group samples.
            sampled = next((reply for reply in replies if reply.samples), replies[0])
            self._trace_prompts(batch, replies)
            num_prompt_rows = sum(
                len(work.tokens) for work in batch.sequences if work.start < work.prompt_tokens
            )
            start_s, stop_s = min(r.start_s for r in replies), max(r.stop_s for r in replies)
            self.monitor.record_step(num_prompt_rows, start_s, stop_s)
            tokens = {number: [s.token for s in samples] for number, samples in sampled.samples.items()}
            self.schedulers[dp].complete(batch, tokens, sampled.proposals)
            for work in batch.sequences:
                if work.prompt_logprobs is not None and work.sequence in self.requests:
                    self._add_prompt_logprobs(self.requests[work.sequence], work, replies)
                if work.num_samples and work.sequence in self.requests:
                    self._output_tokens(self.requests[work.sequence], work, sampled, now_s)

    def _add_prompt_logprobs(
        self, state: RequestState, work: ScheduledSequence, replies: list[StepDone]
    ) -> None:
        if work.start == 0:
            state.prompt_logprobs = []  # it may have been preempted
        for reply in replies:
            state.prompt_logprobs += reply.prompt_logprobs.get(work.sequence, [])

    def _trace_prompts(self, batch: ScheduledBatch, replies: list[StepDone]) -> None:
        """Adds a step to the traces of the prompts in it."""
        for work in batch.sequences:
            state = self.requests.get(work.sequence)
            if state is None or work.start >= work.prompt_tokens or state.trace.token_s:
                continue
            trace = state.trace
            for reply in replies:
                trace.groups.setdefault(reply.rank, []).extend(reply.groups)
                if state.is_source and reply.unpipelined:
                    trace.unpipelined.append(reply.unpipelined)
            ends_s = [group.stop_s for reply in replies for group in reply.groups]
            trace.prompt_s = max(ends_s, default=trace.prompt_s)
            if state.is_source:
                is_whole = any(reply.unpipelined for reply in replies)
                self.counters["unpipelined" if is_whole else "pipelined"] += 1

    def _output_tokens(
        self, state: RequestState, work: ScheduledSequence, step: StepDone, now_s: float
    ) -> None:
        """Outputs the new tokens of one answer, or the first tokens of all answers."""
        number, samples = work.sequence, step.samples[work.sequence]
        if work.num_drafted:
            self.counters["drafted"] += work.num_drafted
            self.counters["accepted"] += len(samples) - 1
        if state.is_closed:
            return
        if failure := step.failures.get(number):
            text = f"the output cannot continue in its format ({failure}); simplify the format"
            state.fail(text, Cause(Why.REFUSED_PROMPT, Stage.COMMIT, self._config.name, text=text))
            self._drop(state, text, now_s)
            return
        if state.is_source:
            for answer, sampled in zip(state.open_answers(len(samples)), samples, strict=True):
                state.append(answer, sampled, now_s, is_last=True)
            # The hand-over may have settled before the last rank completed this step.
            self._close_if_done(state, now_s)
            return
        if state.is_target and not state.trace.stepped_s:
            state.trace.stepped_s = now_s
        if last_token_s := state.answers[number].last_token_s:
            num_tokens = len(samples) if work.num_drafted else 1
            self.monitor.record_decode(now_s - last_token_s, num_tokens)
        # Tokens behind accepted guesses follow each other; otherwise the others are first tokens of forks.
        numbers = [number] * len(samples)
        if not work.num_drafted:
            numbers = self._fork(state, number, samples, step.hidden.get(number))
        for answer, sampled in zip(numbers, samples, strict=True):
            is_finished = state.answers[answer].finish is not None
            if not is_finished and state.append(answer, sampled, now_s):
                self._finish_answer(state, answer, now_s)

    def _fork(
        self, state: RequestState, number: int, samples: list[SampledToken], hidden: bytes | None
    ) -> list[int]:
        """Makes a sequence for each further first token; returns the numbers of all."""
        numbers = [next(self._numbers) for _ in samples[1:]]
        if numbers:
            tokens = [sampled.token for sampled in samples[1:]]
            for child in self.schedulers[state.dp].fork(number, tokens, numbers, hidden):
                self.requests[child.number] = state
                state.open_answer(child.number, child.index)
                self._send_begin(child)
        return [number, *numbers]

    def _send_begin(self, sequence: Sequence) -> None:
        request = self.requests[sequence.number].request
        tokens = sequence.tokens(0, sequence.num_tokens)
        # The scheduler treats tokens generated elsewhere as prompt; the sampler must not.
        num_prompt, index = len(request.tokens), request.index + sequence.index
        self._send(StartSequence(sequence.number, sequence.dp, tokens, num_prompt, request.params, index))

    def _make_sequence(self, state: RequestState) -> Sequence:
        """The request's first answer; to the scheduler, tokens generated elsewhere are part of the prompt."""
        request = state.request
        num_left = request.params.max_tokens - len(request.generated)
        # The caller of an answer that continues has those of the prompt.
        prompt_logprobs = None if request.generated else request.params.prompt_logprobs
        role = SequenceRole.LOCAL
        if request.handoff is not None:
            role = SequenceRole.SOURCE if state.is_source else SequenceRole.TARGET
        return Sequence(
            number=state.number,
            prompt=request.known,
            params=msgspec.structs.replace(
                request.params, max_tokens=num_left, prompt_logprobs=prompt_logprobs
            ),
            role=role,
            arrival_s=state.trace.arrived_s,
            dp=state.dp,
            # A unique salt matches no other request's prefix.
            salt=request.salt if self._config.has_prefix_cache else f"request {state.number}",
            prompt_embeddings=request.embeddings,
        )

    # Hand-overs.

    def _reserve_pages(self, now_s: float) -> None:
        """Reserves pages for waiting targets, oldest first; declines what never fits.

        If one has to wait, its source is notified, so that it does not compute what cannot be received yet.
        """
        for waiting in self._waiting_for_kv:
            while waiting and self._reserve(waiting[0], now_s):
                waiting.popleft()
            for state in reversed(waiting):
                if state.is_announced:
                    break
                self._send_queued(state)

    def _reserve(self, state: RequestState, now_s: float) -> bool:
        """Whether a request need not wait any longer."""
        try:
            reservation = self.schedulers[state.dp].reserve(self._make_sequence(state))
        except ConfigError as error:
            self._decline(state, str(error))
            self._refuse(state, str(error))
            return True
        if reservation is None:
            return False
        handoff = state.request.handoff
        assert isinstance(handoff, InboundHandoff)
        state.is_handing_over = True
        state.trace.begun_s = now_s
        state.trace.num_held = max(reservation.held.values(), default=0)
        self._send(
            ReceiveKV(
                sequence=state.number,
                dp=state.dp,
                transfer=handoff.transfer,
                source=handoff.source,
                digest=state.digest,
                num_tokens=state.request.num_known,
                held=reservation.held,
                pages=reservation.pages,
                source_dp=handoff.source_dp,
            )
        )
        return True

    def _decline(self, state: RequestState, text: str) -> None:
        handoff = state.request.handoff
        assert isinstance(handoff, InboundHandoff)
        self._send(DeclineTransfer(state.dp, handoff.transfer, handoff.source, text))

    def _announce_queued(self) -> None:
        """Has the targets of prompts that could not start know of them, so that they can grant."""
        for state in self._new_sources:
            if not state.is_handing_over and self.requests.get(state.number) is state:
                self._send_handoff(state, 0, {}, is_queued=True)
        self._new_sources.clear()

    def _renew_queued(self, now_s: float) -> None:
        self._has_moved, self._renewed_s = False, now_s
        for state in self.requests.values():
            if state.is_announced and not state.trace.begun_s:
                self._send_queued(state)

    def _send_queued(self, state: RequestState) -> None:
        handoff = state.request.handoff
        assert handoff is not None
        state.is_announced = True
        source = handoff.source if isinstance(handoff, InboundHandoff) else ""
        self._send(QueueTransfer(state.dp, handoff.transfer, source))

    def _send_handoff(
        self, state: RequestState, num_cached: int, pages: PageTables, *, is_queued: bool = False
    ) -> None:
        handoff = state.request.handoff
        assert isinstance(handoff, OutboundHandoff)
        if state.is_announced:
            if num_cached:
                self._send(SendCached(state.number, num_cached, pages))
            return
        state.is_handing_over, state.is_announced = True, is_queued
        self._send(
            SendKV(
                sequence=state.number,
                dp=state.dp,
                transfer=handoff.transfer,
                digest=state.digest,
                num_tokens=state.request.num_known,
                num_cached=num_cached,
                pages=pages,
                is_pipelined=handoff.is_pipelined,
                policy=handoff.policy,
                is_queued=is_queued,
            )
        )

    def _on_handoff(self, reply: TransferUpdate, now_s: float) -> None:
        state = self.requests.get(reply.sequence)
        if state is None:
            return
        scheduler, handoff = self.schedulers[state.dp], state.request.handoff
        if reply.is_target_full:
            scheduler.hold(state.number)
        if reply.is_granted:
            scheduler.grant(state.number)
        if reply.early is not None and not state.early_s:
            state.early_s = now_s
            if isinstance(handoff, InboundHandoff) and handoff.is_early and not state.is_closed:
                self._output_first_tokens(state, reply.early, now_s)
        if reply.outcome is not None and not state.trace.settled_s:
            state.trace.settled_s = now_s
            self._has_moved = self._has_moved or not isinstance(reply.outcome, Failed)
            self._settle(state, reply.outcome, now_s)
        if reply.is_released:
            state.num_releases += 1
            num_wanted = len(self._layout.group(state.dp)) if state.is_source else 1
            if state.num_releases == num_wanted:
                state.is_handing_over = False
                scheduler.release(state.number)
                self._close_if_done(state, now_s)

    def _settle(self, state: RequestState, outcome: Outcome, now_s: float) -> None:
        match outcome:
            case Failed(cause):
                state.trace.failure = str(cause)
                if state.is_source or state.is_open:
                    state.fail(str(cause), cause)
                self._drop(state, str(cause), now_s)
            case Ready(aux) if state.is_target and not state.is_closed:
                self._admit(state, aux, now_s)
            case Finished(aux) if state.is_target and not state.is_closed:
                self._output_first_tokens(state, aux, now_s)
                state.finish_at_source()
                self._drop(state, "the answer ended at its source", now_s)

    def _admit(self, state: RequestState, aux: Aux, now_s: float) -> None:
        """Starts decoding a prompt that has arrived."""
        samples = self._first_samples(state, aux, now_s)
        if not samples:
            return
        scheduler = self.schedulers[state.dp]
        self._send_begin(scheduler.admit(state.number, samples[0].token, proposals_of(aux)))
        numbers = self._fork(state, state.number, samples, hidden_of(aux))
        for number, sampled in zip(numbers, samples, strict=True):
            answer = state.answers[number]
            if answer.last_token_s:  # it was output before the cache arrived
                is_finished = answer.finish is not None
            else:
                is_finished = state.append(number, sampled, now_s)
            if is_finished:
                self._finish_answer(state, number, now_s)

    def _output_first_tokens(self, state: RequestState, aux: Aux, now_s: float) -> None:
        """Outputs first tokens of answers that have no sequence (yet), unless they were output before."""
        samples = self._first_samples(state, aux, now_s)
        if samples:
            for number, sampled in zip(state.open_answers(len(samples)), samples, strict=True):
                if not state.answers[number].last_token_s:
                    state.append(number, sampled, now_s)

    def _first_samples(self, state: RequestState, aux: Aux, now_s: float) -> list[SampledToken]:
        """The first tokens that a source sampled; none, and the request fails, if they are invalid."""
        num_wanted, vocab_size = state.request.params.n, self._model.vocab_size
        state.trace.num_cached = aux.cached_tokens
        problem = problem_of(aux, vocab_size, self._model.hidden_size)
        if len(aux.tokens) != num_wanted or not all(0 <= token < vocab_size for token in aux.tokens):
            problem = f"sampled {list(aux.tokens)}; {num_wanted} tokens were asked for"
            if failure := aux.fields.get(FAILURE):
                problem = f"cannot continue the output in its format ({failure})"
        if problem:
            handoff = state.request.handoff
            assert isinstance(handoff, InboundHandoff)
            text = f"source {handoff.source} {problem}"
            state.fail(text, Cause(Why.REFUSED_PROMPT, Stage.COMMIT, self._config.name, text=text))
            self._drop(state, text, now_s)
            return []
        if len(aux.logprobs) != len(aux.tokens):
            return [SampledToken(token) for token in aux.tokens]
        return [
            SampledToken(token, logprobs.get(token, 0.0), dict(logprobs))
            for token, logprobs in zip(aux.tokens, aux.logprobs, strict=True)
        ]

    # Ends.

    def _drop(self, state: RequestState, text: str, now_s: float) -> None:
        """Ends what is left of a request; pages that a hand-over may touch come back later."""
        waiting = self._waiting_for_kv[state.dp]
        if state in waiting:
            waiting.remove(state)
            self._decline(state, text)
        if state.is_source and not state.trace.begun_s:
            # The target waits for an offer: an empty one that is aborted tells it that none will come.
            state.trace.begun_s = now_s
            self._send_handoff(state, 0, {})
        if state.is_handing_over and not state.trace.settled_s:
            self._send(AbortTransfer(state.number, text))
        for number in [number for number, other in self.requests.items() if other is state]:
            self.schedulers[state.dp].abort(number)
            if number != state.number:
                self._forget_sequence(state, number, now_s)
        self._close_if_done(state, now_s)

    def _finish_answer(self, state: RequestState, number: int, now_s: float) -> None:
        self.schedulers[state.dp].finish(number)
        self._forget_sequence(state, number, now_s)

    def _forget_sequence(self, state: RequestState, number: int, now_s: float) -> None:
        self._send(EndSequence(number))
        if number != state.number:
            self.requests.pop(number, None)
        self._close_if_done(state, now_s)

    def _close_if_done(self, state: RequestState, now_s: float) -> None:
        """Forgets a request once its answers are complete and its pages are back."""
        if state.is_open or state.is_handing_over or self.requests.get(state.number) is not state:
            return
        # The workers still know a request that was aborted or handed over.
        self._send(EndSequence(state.number))
        del self.requests[state.number]
        self._is_checked = False
        if (handoff_s := state.handoff_s) is not None:
            self.monitor.record_handoff(handoff_s)
        state.finish(now_s)

    def _refuse(self, state: RequestState, text: str) -> None:
        """Fails a request that gets no pages."""
        state.fail(text, Cause(Why.OUT_OF_PAGES, Stage.GRANT, self._config.name, text=text))
        if state.is_source:
            self._drop(state, text, state.trace.arrived_s)
        else:
            del self.requests[state.number]

    # Load.

    def _least_loaded_dp(self) -> int:
        return min(range(len(self.schedulers)), key=self._num_known_tokens)

    def _num_known_tokens(self, dp: int) -> int:
        """Tokens of all requests of a dp group."""
        num_scheduled = sum(sequence.num_tokens for sequence in self.schedulers[dp].sequences.values())
        return num_scheduled + sum(state.request.num_known for state in self._waiting_for_kv[dp])

    def _update_load(self, has_free_stage: bool, now_s: float) -> None:
        waiting_for_kv = [state.request.num_known for queue in self._waiting_for_kv for state in queue]
        if has_free_stage:
            num_waiting = len(waiting_for_kv) + sum(len(scheduler.waiting) for scheduler in self.schedulers)
            num_slots = sum(scheduler.num_slots for scheduler in self.schedulers)
            self.monitor.queue = QueueSnapshot(self._num_taken, num_waiting, num_slots)
        num_requests = sum(1 for number, state in self.requests.items() if state.number == number)
        self.monitor.update(self.schedulers, waiting_for_kv, num_requests, now_s)
