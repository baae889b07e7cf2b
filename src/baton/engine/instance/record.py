"""A request on its way through an instance: its answers, its sink and its story."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from baton.engine.books.sequence import Asked, Role, Sequence
from baton.engine.commands import SampledToken
from baton.engine.requests import Generate, Inbound, Outbound, Piece, Sink, Story, Told, Trouble
from baton.engine.sampling.ending import Progress, ending
from baton.engine.text.answer import AnswerText
from baton.engine.text.tokenizer import Tokenizer
from baton.protocol.outcomes import Aux, Cause
from baton.session import prompt_digest

HANDED = "handed"
ABORTED = "abort"


@dataclass(frozen=True, slots=True)
class Facts:
    """What every answer of an instance ends by."""

    tokenizer: Tokenizer | None
    eos_ids: frozenset[int]
    context_max: int
    has_prefix_cache: bool = True


@dataclass(slots=True)
class Answering:
    """One of a request's answers."""

    index: int
    text: AnswerText | None
    num_generated: int = 0
    """Those that were answered elsewhere included."""
    finish: str | None = None
    told_s: float = 0.0
    """When its latest token was told; 0: none was, here."""


@dataclass(slots=True)
class Record:
    """One request; the instance's thread alone touches it."""

    number: int
    request: Generate
    sink: Sink
    story: Story
    facts: Facts
    dp: int = 0
    answers: dict[int, Answering] = field(default_factory=dict)
    """By the number of the sequence that grows it; the request's own number is the first one's."""
    is_handing: bool = False
    """Ranks were told of its hand-over, and some have not released it."""
    num_releases: int = 0
    is_over: bool = False
    """Nothing more will be said of its answers."""
    early_s: float = 0.0
    """When a source's first tokens were here, ahead of the cache; 0 before that."""

    @property
    def is_source(self) -> bool:
        """Whether its prompt leaves."""
        return isinstance(self.request.hand, Outbound)

    @property
    def is_target(self) -> bool:
        """Whether its prompt comes from elsewhere."""
        return isinstance(self.request.hand, Inbound)

    @property
    def is_early(self) -> bool:
        """Whether its first tokens are told before its cache is here."""
        return isinstance(self.request.hand, Inbound) and self.request.hand.is_early

    @property
    def handoff_s(self) -> float | None:
        """What its hand-over took beyond compute, as far as this side knows; None: it was none, or failed."""
        begun_s = self.story.prompt_s if self.is_source else self.early_s
        is_through = self.request.hand is not None and self.story.settled_s and begun_s and not self.is_over
        return self.story.settled_s - begun_s if is_through else None

    @property
    def is_open(self) -> bool:
        """Whether an answer goes on."""
        return not self.is_over and any(each.finish is None for each in self.answers.values())

    @property
    def digest(self) -> bytes:
        """What both sides of a hand-over have to agree on."""
        found = self.request
        return prompt_digest(found.known, salt=found.salt, embeddings=found.embeddings or b"").value

    def sequence(self) -> Sequence:
        """The request's first answer, for the books, to whom tokens answered elsewhere are prompt."""
        request = self.request
        num_left = request.params.max_tokens - len(request.generated)
        role = Role.SOURCE if self.is_source else Role.TARGET if self.is_target else Role.LOCAL
        return Sequence(
            Asked(
                number=self.number,
                prompt=request.known,
                params=msgspec.structs.replace(request.params, max_tokens=num_left),
                role=role,
                arrival_s=self.story.arrived_s,
                dp=self.dp,
                # A salt of its own shares its prefix with nobody.
                salt=request.salt if self.facts.has_prefix_cache else f"request {self.number}",
                embeddings=request.embeddings,
            )
        )

    def begin(self, sequence: int, index: int) -> None:
        """An answer that a sequence will grow; one whose first token was told goes on from there."""
        if index and (known := self.answers.pop(-index, None)) is not None:
            self.answers[sequence] = known
            return
        found, request, text = self.facts, self.request, None
        if found.tokenizer is not None:
            text = AnswerText(found.tokenizer, request.params, found.eos_ids, request.tokens)
            for token in request.generated:
                text.push(token)  # its text was told where it was answered
        self.answers[sequence] = Answering(request.index + index, text, len(request.generated))

    def begin_all(self, num_answers: int) -> list[int]:
        """All answers, also those that have no sequence of their own: under which numbers."""
        numbers = [self.number, *(-index for index in range(1, num_answers))]
        for index, number in enumerate(numbers):
            if number not in self.answers:
                self.begin(number, index)
        return numbers

    def has_begun(self, sequence: int) -> bool:
        """Whether an answer's first token was told."""
        return self.answers[sequence].told_s > 0.0

    def has_ended(self, sequence: int) -> bool:
        """Whether an answer is complete."""
        return self.answers[sequence].finish is not None

    def grow(self, sequence: int, sampled: SampledToken, now_s: float, *, is_last: bool = False) -> bool:
        """Tells the caller of a token; True: the answer ends with it."""
        answer, params = self.answers[sequence], self.request.params
        if self.is_over or answer.finish is not None:
            return True
        answer.num_generated += 1
        answer.told_s = now_s
        piece = answer.text.push(sampled.token) if answer.text else ""
        progress = Progress(
            last_token=sampled.token,
            num_generated=answer.num_generated,
            num_tokens=len(self.request.tokens) + answer.num_generated,
            context_max=self.facts.context_max,
            has_stop_string=bool(answer.text and answer.text.has_stop_string),
        )
        answer.finish = ending(progress, params, self.facts.eos_ids)
        if answer.finish is None and is_last:
            answer.finish = HANDED
        elif answer.finish is not None and answer.text:
            piece += answer.text.finish()
        self.story.token_s = self.story.token_s or now_s
        self.sink(Piece(answer.index, (sampled,), piece, answer.finish))
        return answer.finish is not None

    def give_up(self, text: str, cause: Cause | None = None) -> None:
        """The request fails; said once."""
        if not self.is_over:
            self.is_over = True
            self.sink(Trouble(cause, text))

    def cut_off(self) -> None:
        """What is open ends here, for want of room: a source that ended it had less than this instance."""
        for answer in self.answers.values():
            if answer.finish is None and not self.is_over:
                answer.finish = "length"
                text = answer.text.finish() if answer.text else ""
                self.sink(Piece(answer.index, (), text, answer.finish))

    def abort(self) -> None:
        """The caller wants no more of it."""
        if self.is_over:
            return
        for answer in self.answers.values():
            if answer.finish is None:
                answer.finish = ABORTED
                self.sink(Piece(answer.index, (), "", ABORTED))
        self.is_over = True

    def tell_story(self, now_s: float) -> None:
        """Everything is over and back."""
        self.story.ended_s = now_s
        self.sink(Told(self.story))


def sampled_of(aux: Aux) -> list[SampledToken]:
    """The first tokens that a source sampled, with what it told of them."""
    if len(aux.logprobs) != len(aux.tokens):
        return [SampledToken(token) for token in aux.tokens]
    return [
        SampledToken(token, told.get(token, 0.0), dict(told))
        for token, told in zip(aux.tokens, aux.logprobs, strict=True)
    ]
