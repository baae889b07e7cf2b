"""A request while an instance works on it: its answers, its event sink and its trace."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.engine.commands import SampledToken
from baton.engine.requests import (
    EngineRequest,
    EventSink,
    InboundHandoff,
    OutboundHandoff,
    OutputChunk,
    RequestError,
    RequestFinished,
)
from baton.engine.sampling_params import Progress, ending
from baton.engine.tokenizer import AnswerText, Tokenizer
from baton.engine.trace import RequestTrace
from baton.protocol.outcomes import Cause
from baton.session import prompt_digest

HANDED = "handed"
ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class ModelContext:
    """What the answers of a model depend on."""

    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    vocab_size: int
    hidden_size: int
    context_max: int


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
    is_handing_over: bool = False
    """The ranks know of its hand-over, and some have not released it."""
    num_releases: int = 0
    is_closed: bool = False
    """The caller gets no more chunks: the request failed or was aborted."""
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
        is_handed = self.request.handoff is not None and self.trace.settled_s and begun_s
        return self.trace.settled_s - begun_s if is_handed and not self.is_closed else None

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
        self.sink(OutputChunk(answer.index, (sampled,), text, answer.finish))
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

    def fail(self, text: str, cause: Cause) -> None:
        """Reports the failure to the caller, once."""
        if not self.is_closed:
            self.is_closed = True
            self.sink(RequestError(cause, text))

    def finish(self, now_s: float) -> None:
        """Reports the trace: nothing of the request is left here."""
        self.trace.ended_s = now_s
        self.sink(RequestFinished(self.trace))
