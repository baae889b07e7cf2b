"""One request at the instance: its jobs, the deltas of its choices, and the response they are written to.

The response headers go out with the first token, so that a failure before it has a status of its own. After
that each wake-up is one write, whatever has come by then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from time import monotonic

import msgspec
from aiohttp import web

from baton.engine.instance import Instance
from baton.engine.requests import OutputChunk, RequestError, RequestEvent, RequestFinished
from baton.engine.trace import RequestTrace
from baton.errors import ConfigError, EngineError, FullError
from baton.protocol.outcomes import Cause, Stage, Why
from baton.serving.http import (
    DONE,
    EVENT_STREAM,
    ID_HEADER,
    NO_STORE,
    PROMPT_TOKENS_HEADER,
    ApiError,
    EventStream,
    TokenNote,
    data_event,
    failure,
    note_line,
)
from baton.serving.observing import RequestObserver
from baton.serving.parsing import TOO_LONG, ParsedRequest
from baton.serving.rendering import ChoiceDelta, ResponseFormat
from baton.serving.schema import CachedTokens, Usage

USAGE_S_MAX = 0.2
"""How long a response waits for the number of cached tokens, which is known when its pages are freed."""
WRITE_S_MAX = 30.0

_encoder = msgspec.json.Encoder()

OnEvent = Callable[[RequestEvent], None]


class EventBridge:
    """Takes engine events from the instance's thread to the event loop, one call per wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[OnEvent, RequestEvent]] = deque()
        self._is_woken = False

    def sink(self, on_event: OnEvent) -> OnEvent:
        """A callback for the instance; `on_event` gets its events on the loop, in order."""
        return lambda event: self._put(on_event, event)

    def _put(self, on_event: OnEvent, event: RequestEvent) -> None:
        # Append before the check: a delivery that has begun clears the flag before it takes anything.
        self._waiting.append((on_event, event))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._waiting:
            on_event, event = self._waiting.popleft()
            on_event(event)


class Generation:
    """One parsed request at an instance; everything here runs on the event loop."""

    def __init__(
        self, parsed: ParsedRequest, observer: RequestObserver, on_close: Callable[[Generation], None]
    ) -> None:
        self.parsed = parsed
        self._observer = observer
        self._on_close = on_close
        """Called when the instance holds nothing of the request any more."""
        self._arrived_s = monotonic()
        self._woken = asyncio.Event()
        self._deltas: dict[int, ChoiceDelta] = {}
        self._open_choices = set(parsed.choices())
        self._last_token_s: dict[int, float] = {}
        self._traces: dict[int, RequestTrace] = {}
        self._numbers: dict[int, int] = {}
        """By job that is not finished: its number at the instance."""
        self._error: ApiError | None = None
        self._num_tokens: dict[int, int] = {**parsed.hints.done}
        """By choice: its number of tokens, including those of earlier attempts."""

    def start(self, instance: Instance, bridge: EventBridge) -> None:
        """Submits every job to the instance; all of them, or none and an ApiError."""
        self._num_tokens |= {index: len(tokens) for index, tokens in self.parsed.resumed.items()}
        try:
            for job_index, job in enumerate(self.parsed.jobs):
                sink = bridge.sink(partial(self._on_event, job_index))
                self._numbers[job_index] = instance.submit(job.request, sink)
        except (ConfigError, EngineError) as error:
            self._error = _refusal(error)
            self.close(instance)
            if not self._numbers:
                self._on_close(self)
            raise self._error from None
        self._observer.started(self.parsed)

    def close(self, instance: Instance) -> None:
        """Aborts what is still running."""
        if self._open_choices or self._error or self.parsed.is_prefill:
            for number in self._numbers.values():
                instance.abort(number)

    def lost(self, text: str) -> None:
        """The instance has ended; fails the jobs that it did not inform."""
        for job_index in list(self._numbers):
            cause = Cause(Why.PEER_LOST, Stage.COPY, text=text)
            self._on_event(job_index, RequestError(cause, text))

    async def respond(self, request: web.Request, form: ResponseFormat) -> web.StreamResponse:
        if self.parsed.is_prefill or not self.parsed.is_stream:
            return await self._respond_whole(form)
        stream = EventStream(request, self.parsed.id, WRITE_S_MAX)
        try:
            await self._stream(stream, form)
        except ApiError as error:
            if stream.response is None:
                raise
            # The status is out: report the error in the stream, which then ends without [DONE].
            await stream.write(data_event(error.body()))
        return await stream.end()

    async def _stream(self, stream: EventStream, form: ResponseFormat) -> None:
        held: dict[int, ChoiceDelta] = {}
        async for deltas in self._all_deltas():
            blocks = []
            for delta in deltas:
                earlier = held.pop(delta.index, None)
                if earlier is not None:
                    delta.tokens[:0] = earlier.tokens
                # Tokens without text, as parts of a character, wait for the next ones.
                if form.is_silent(delta):
                    held[delta.index] = delta
                else:
                    blocks.append(self._event_block(delta, form))
            if blocks:
                await stream.write(b"".join(blocks))
        end = DONE
        if self.parsed.has_usage:
            event = form.usage_event(await self._usage())
            end = (data_event(_encoder.encode(event)) if event is not None else b"") + DONE
        await stream.write(end)
        self._finish()

    async def _respond_whole(self, form: ResponseFormat) -> web.Response:
        parsed = self.parsed
        choices: dict[int, ChoiceDelta] = {}
        async for deltas in self._all_deltas():
            for delta in deltas:
                known = choices.setdefault(delta.index, delta)
                if known is not delta:
                    known.text += delta.text
                    known.tokens += delta.tokens
                    known.finish = delta.finish
        if parsed.is_prefill:
            await self._settled()
        usage = await self._usage()
        self._finish()
        ordered = [choices[index] for index in sorted(choices)]
        headers = {ID_HEADER: parsed.id, PROMPT_TOKENS_HEADER: str(usage.prompt_tokens), **NO_STORE}
        if not parsed.is_stream:
            headers["Content-Type"] = "application/json"
            return web.Response(body=_encoder.encode(form.whole(ordered, usage)), headers=headers)
        headers["Content-Type"] = EVENT_STREAM
        blocks = [self._event_block(delta, form) for delta in ordered]
        return web.Response(body=b"".join(blocks) + DONE, headers=headers)

    def _event_block(self, delta: ChoiceDelta, form: ResponseFormat) -> bytes:
        event = data_event(_encoder.encode(form.event(delta)))
        if not self.parsed.hints.tokens:
            return event
        return note_line(TokenNote(delta.index, tuple(delta.ids), delta.finish)) + event

    async def _all_deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """The deltas at each wake-up, until every choice has ended; raises the ApiError of a failure."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._error is not None:
                raise self._error
            deltas, self._deltas = list(self._deltas.values()), {}
            if deltas:
                yield deltas
            if not self._open_choices and not self._deltas:
                return

    async def _settled(self) -> None:
        """Until the instance has freed everything and each hand-off has its verdict."""
        while self._numbers and self._error is None:
            self._woken.clear()
            await self._woken.wait()
        if self._error is not None:
            raise self._error

    async def _usage(self) -> Usage:
        with suppress(TimeoutError, ApiError):  # the response is complete, whatever becomes of its pages
            async with asyncio.timeout(USAGE_S_MAX):
                await self._settled()
        return self._counted()

    def _counted(self) -> Usage:
        num_prompt = sum(len(prompt) for prompt in self.parsed.prompts)
        num_completion = sum(self._num_tokens.values())
        num_cached = min(num_prompt, sum(trace.num_cached for trace in self._traces.values()))
        return Usage(num_prompt, num_completion, num_prompt + num_completion, CachedTokens(num_cached))

    def _finish(self) -> None:
        self._observer.finished(self._counted(), monotonic() - self._arrived_s)

    def _on_event(self, job_index: int, event: RequestEvent) -> None:
        match event:
            case OutputChunk():
                prompt_index = self.parsed.jobs[job_index].prompt_index
                self._add(prompt_index * self.parsed.n + event.index, event)
            case RequestError(cause, text):
                code = cause.why.name if cause is not None else "ENGINE"
                self._error = self._error or failure(code, text)
                self._observer.failed(self.parsed, code)
                self._job_over(job_index)
            case RequestFinished(story):
                self._traces[job_index] = story
                self._observer.traced(self.parsed, job_index, story)
                self._job_over(job_index)
        self._woken.set()

    def _job_over(self, job_index: int) -> None:
        if self._numbers.pop(job_index, None) is not None and not self._numbers:
            self._on_close(self)

    def _add(self, index: int, chunk: OutputChunk) -> None:
        delta, now_s = self._deltas.get(index), monotonic()
        if delta is None:
            has_begun = index in self._last_token_s or bool(self.parsed.resumed.get(index))
            delta = self._deltas[index] = ChoiceDelta(index, not has_begun)
        delta.text += chunk.text
        delta.tokens.extend(chunk.tokens)
        delta.finish = chunk.finish
        if chunk.tokens:
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(chunk.tokens)
            since_s = now_s - self._last_token_s.get(index, self._arrived_s)
            self._observer.sampled(len(chunk.tokens), since_s, is_first=index not in self._last_token_s)
            self._last_token_s[index] = now_s
        if chunk.finish is not None:
            self._open_choices.discard(index)


def _refusal(error: ConfigError | EngineError) -> ApiError:
    match error:
        case FullError(retry_after_s=wait_s):
            return ApiError(429, str(error), code="QUEUE_FULL", retry_after_s=wait_s)
        case ConfigError():
            return ApiError(400, str(error), code=TOO_LONG)
        case _:
            return failure("LOADING", str(error))
