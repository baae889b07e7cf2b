"""A request on its way: its jobs at the instance, and what its choices have grown by."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Protocol

from baton.engine.commands import SampledToken
from baton.engine.instance import Instance
from baton.engine.requests import OutputChunk, RequestError, RequestEvent, RequestFinished
from baton.engine.trace import RequestTrace
from baton.errors import ConfigError, EngineError, FullError
from baton.protocol.outcomes import Cause, Stage, Why
from baton.server.bodies.answered import CachedTokens, Usage
from baton.server.bridge import Bridge
from baton.server.inquiries import Inquiry
from baton.server.model import TOO_LONG
from baton.web.problems import Problem, failure

TOLD_S_MAX = 0.2
"""How long an answer waits for the count of cached tokens, which comes when its pages are back."""


@dataclass(slots=True)
class Growth:
    """What a choice has grown by since it was last looked at."""

    index: int
    is_first: bool
    """Nothing of it was told before, here or elsewhere."""
    text: str = ""
    tokens: list[SampledToken] = field(default_factory=list)
    finish: str | None = None


class Witness(Protocol):
    """Who keeps figures of what happens to requests."""

    def asked(self, inquiry: Inquiry) -> None:
        """A request was taken in."""

    def grew(self, inquiry: Inquiry, num_tokens: int, since_s: float, *, is_first: bool) -> None:
        """A choice has grown by some tokens, so long after it last did, or after the request came."""

    def told(self, inquiry: Inquiry, job: int, story: RequestTrace) -> None:
        """All that a job took is back."""

    def failed(self, inquiry: Inquiry, code: str) -> None:
        """A request failed, for a reason of this name."""

    def ended(self, inquiry: Inquiry, usage: Usage, since_s: float) -> None:
        """A request was answered, so long after it came."""


class Answering:
    """One inquiry at an instance; everything here runs on the loop."""

    def __init__(self, inquiry: Inquiry, witness: Witness, on_close: Callable[[], None]) -> None:
        self.inquiry = inquiry
        self._witness = witness
        self._on_close = on_close
        self._asked_s = monotonic()
        self._woken = asyncio.Event()
        self._growing: dict[int, Growth] = {}
        self._open = set(inquiry.choices())
        self._seen_s: dict[int, float] = {}
        """By choice: when it last grew."""
        self._stories: dict[int, RequestTrace] = {}
        self._numbers: dict[int, int] = {}
        """By job that is not through: its number at the instance."""
        self._problem: Problem | None = None
        self.num_tokens: dict[int, int] = {**inquiry.private.done}
        """By choice: how many tokens it has, those of former attempts among them."""

    def start(self, instance: Instance, bridge: Bridge) -> None:
        """Hands every job to the instance; all of them, or none and a Problem."""
        self.num_tokens |= {index: len(tokens) for index, tokens in self.inquiry.resumed.items()}
        try:
            for place, job in enumerate(self.inquiry.jobs):
                sink = bridge.sink(partial(self._received, place))
                self._numbers[place] = instance.submit(job.request, sink)
        except (ConfigError, EngineError) as error:
            self._problem = _refusal(error)
            self.close(instance)
            if not self._numbers:
                self._on_close()
            raise self._problem from None
        self._witness.asked(self.inquiry)

    def close(self, instance: Instance) -> None:
        """Gives up what is still under way."""
        if self._open or self._problem or self.inquiry.is_leg:
            for number in self._numbers.values():
                instance.abort(number)

    async def growths(self) -> AsyncIterator[list[Growth]]:
        """What has grown, at each wake-up, until every choice has ended; a failure raises its Problem."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._problem is not None:
                raise self._problem
            grown, self._growing = list(self._growing.values()), {}
            if grown:
                yield grown
            if not self._open and not self._growing:
                return

    async def settled(self) -> None:
        """Until all that was taken for the request is back, and every hand-over has its verdict."""
        while self._numbers and self._problem is None:
            self._woken.clear()
            await self._woken.wait()
        if self._problem is not None:
            raise self._problem

    async def usage(self) -> Usage:
        """How many tokens it was; waits a moment for what is known last."""
        try:
            async with asyncio.timeout(TOLD_S_MAX):
                await self.settled()
        except (TimeoutError, Problem):
            pass  # the answer is there, whatever becomes of its pages
        return self.counted()

    def counted(self) -> Usage:
        """How many tokens it was, as far as it is known."""
        num_prompt = sum(len(prompt) for prompt in self.inquiry.prompts)
        num_answer = sum(self.num_tokens.values())
        num_cached = min(num_prompt, sum(story.num_cached for story in self._stories.values()))
        return Usage(num_prompt, num_answer, num_prompt + num_answer, CachedTokens(num_cached))

    def end(self) -> None:
        """The answer was written whole."""
        self._witness.ended(self.inquiry, self.counted(), monotonic() - self._asked_s)

    def _received(self, place: int, event: RequestEvent) -> None:
        match event:
            case OutputChunk():
                self._grow(self.inquiry.jobs[place].prompt_index * self.inquiry.n + event.index, event)
            case RequestError(cause, text):
                code = cause.why.name if cause is not None else "ENGINE"
                self._problem = self._problem or failure(code, text)
                self._witness.failed(self.inquiry, code)
                self._through(place)
            case RequestFinished(story):
                self._stories[place] = story
                self._witness.told(self.inquiry, place, story)
                self._through(place)
        self._woken.set()

    def _through(self, place: int) -> None:
        if self._numbers.pop(place, None) is not None and not self._numbers:
            self._on_close()

    def lost(self, text: str) -> None:
        """The instance has ended and will say no more; those who heard of it already are not told again."""
        for place in list(self._numbers):
            cause = Cause(Why.PEER_LOST, Stage.COPY, text=text)
            self._received(place, RequestError(cause, text))

    def _grow(self, index: int, piece: OutputChunk) -> None:
        growth, now_s = self._growing.get(index), monotonic()
        if growth is None:
            has_begun = index in self._seen_s or bool(self.inquiry.resumed.get(index))
            growth = self._growing[index] = Growth(index, not has_begun)
        growth.text += piece.text
        growth.tokens.extend(piece.tokens)
        growth.finish = piece.finish
        if piece.tokens:
            self.num_tokens[index] = self.num_tokens.get(index, 0) + len(piece.tokens)
            since_s = now_s - self._seen_s.get(index, self._asked_s)
            is_first = index not in self._seen_s
            self._witness.grew(self.inquiry, len(piece.tokens), since_s, is_first=is_first)
            self._seen_s[index] = now_s
        if piece.finish is not None:
            self._open.discard(index)


def _refusal(error: ConfigError | EngineError) -> Problem:
    match error:
        case FullError(retry_after_s=wait_s):
            return Problem(429, str(error), code="QUEUE_FULL", retry_after_s=wait_s)
        case ConfigError():
            return Problem(400, str(error), code=TOO_LONG)
        case _:
            return failure("LOADING", str(error))
