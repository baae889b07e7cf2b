"""Two instances as one: prompts are prefilled on one and decoded on the other."""

from __future__ import annotations

import queue
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic

from baton.engine.instance.instance import Instance
from baton.engine.requests import Event, Generate, Inbound, Outbound, Piece, Story, Told, Trouble
from baton.errors import BatonError, ConfigError, EngineError

FIRST_TOKEN = ("prefill", "decode")
ANSWER_S_MAX = 600.0


@dataclass(frozen=True, slots=True)
class Ask:
    """How one request goes through a pair."""

    request: Generate
    is_pipelined: bool = True
    policy: str | None = None
    """Where its layers are cut; None: as the prefill instance does."""
    first_token: str = "prefill"
    """Whose first token the caller is given: as soon as prefill has it, or once decode may go on."""

    def __post_init__(self) -> None:
        if self.first_token not in FIRST_TOKEN:
            raise ConfigError(
                f"first token {self.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
            )


class Answer:
    """Pieces as they come, and the two sides' stories once all pages are back."""

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.first_s = 0.0
        """When the caller had the first token."""
        self.events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        self.stories: dict[str, Story] = {}
        """By role: prefill, and decode where it was asked."""

    def put(self, role: str, event: Event) -> None:
        """For an instance: something happened."""
        self.events.put((role, event))


class Pair:
    """A prefill and a decode instance that know each other's secret."""

    def __init__(self, prefill: Instance, decode: Instance) -> None:
        if prefill.secret != decode.secret:
            raise ConfigError("the two instances have different secrets; give both the same one")
        self.prefill = prefill
        self.decode = decode

    def ask(self, ask: Ask) -> tuple[Answer, Iterator[Piece]]:
        """The answer's pieces as they come; a failure of either side raises EngineError with its cause."""
        answer = Answer(monotonic())
        request = ask.request
        if request.params.max_tokens == len(request.generated) + 1:
            # It ends with the next token, so there is nothing to hand over.
            alone = self.prefill.submit(
                replace(request, hand=None), lambda event: answer.put("prefill", event)
            )
            return answer, _watched(self._alone(answer), {self.prefill: alone})
        transfer = secrets.token_hex(16)
        inbound = Inbound(transfer, self.prefill.address, is_early=ask.first_token == "prefill")
        outbound = Outbound(transfer, ask.is_pipelined, ask.policy)
        numbers: dict[Instance, int] = {}
        try:
            for role, instance, hand in (
                ("decode", self.decode, inbound),
                ("prefill", self.prefill, outbound),
            ):
                numbers[instance] = instance.submit(replace(request, hand=hand), partial(answer.put, role))
        except BatonError:
            _abort(numbers)
            raise
        return answer, _watched(self._pieces(answer), numbers)

    def tokens(self, ask: Ask) -> list[list[int]]:
        """The whole answers, as token ids by index."""
        _, pieces = self.ask(ask)
        return collect(pieces, ask.request)

    def _alone(self, answer: Answer) -> Iterator[Piece]:
        while not answer.stories:
            _, event = _next(answer)
            if isinstance(event, Piece):
                answer.first_s = answer.first_s or monotonic()
                yield event

    def _pieces(self, answer: Answer) -> Iterator[Piece]:
        """What decode tells, until both sides are through: it hears of the first token from prefill."""
        while len(answer.stories) < 2:
            role, event = _next(answer)
            if role == "decode" and isinstance(event, Piece):
                answer.first_s = answer.first_s or monotonic()
                yield event


def _watched(pieces: Iterator[Piece], numbers: Mapping[Instance, int]) -> Iterator[Piece]:
    """Whatever ends the pieces, a failure or a caller that has enough, ends the request on every side."""
    try:
        yield from pieces
    finally:
        _abort(numbers)


def _abort(numbers: Mapping[Instance, int]) -> None:
    for instance, number in numbers.items():
        instance.abort(number)


def collect(pieces: Iterator[Piece], request: Generate) -> list[list[int]]:
    """Token ids by answer."""
    found: list[list[int]] = [[] for _ in range(request.params.n)]
    for piece in pieces:
        found[piece.index - request.index].extend(sampled.token for sampled in piece.tokens)
    return found


def _next(answer: Answer) -> tuple[str, Event]:
    try:
        role, event = answer.events.get(timeout=ANSWER_S_MAX)
    except queue.Empty:
        raise EngineError(f"no answer for {ANSWER_S_MAX:.0f} s") from None
    if isinstance(event, Trouble):
        raise EngineError(f"{role}: {event.text}")
    if isinstance(event, Told):
        answer.stories[role] = event.story
    return role, event
