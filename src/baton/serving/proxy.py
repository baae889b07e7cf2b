"""One client's request through the router, from its arrival to the last byte of its response.

An attempt is one request to the instance that answers and, where the KV cache is handed off, one to the
instance that prefills; both are sent at the same time. If prefill fails before decode has the cache, the
other request is ended with that failure.

Before anything was streamed, a failed attempt is made again from the start, on another pair if there is one,
in new bootstrap rooms. Once events have gone to the client, each further attempt is given the tokens that the
client has and streams what comes after them. Events are forwarded whole or not at all, and their tokens are
recorded before they are written: what a new attempt is given is what the client has, or is about to get.
"""

from __future__ import annotations

import asyncio
import random
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from time import monotonic

import aiohttp
import msgspec
from aiohttp import web

from baton.errors import BatonError
from baton.serving.fleet import Fleet, FleetInstance
from baton.serving.http import (
    DONE,
    EVENT_STREAM,
    ID_HEADER,
    NO_STORE,
    PROMPT_TOKENS_HEADER,
    STATUSES,
    ApiError,
    EventReader,
    EventStream,
    ResumedChoice,
    RouterHints,
    TokenNote,
    data_event,
    failure,
    read_error,
)
from baton.serving.routable import CHAT_PATH, RoutableRequest
from baton.serving.router_config import RouterConfig, RouterLimits
from baton.serving.router_metrics import RouterMetrics
from baton.serving.routing import Route, RouteChooser, RouteConstraints, RouteQueue
from baton.serving.upstream import UpstreamClient, UpstreamError, UpstreamRequest

WRITE_S_MAX = 25.0
"""Below the limit that an instance has for the router: a client that does not read is dropped first."""
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
ENDED_CODES = frozenset({"PEER_LOST", "ENDED", "LOADING", "DRAINING"})
FULL_CODES = frozenset({"QUEUE_FULL", "OUT_OF_PAGES"})
FULL_S = 1.0
RETRY_S_FIRST = 0.005
RETRY_S_MAX = 0.5
ROOM_BITS = 63
KEPT_BYTES_MAX = 64 << 10
LINGER_S = 10.0
"""How long the prefill request may still take once decode has answered."""
STREAM_END_S = 1.0
"""How long to wait for the end of a stream after its last event, so that its connection can be reused."""
NUM_LOGGED_MAX = 4096
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_ERROR = b'{"error"'
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class AttemptRecord:
    """One attempt as the router saw it, in seconds since 1970; for timelines."""

    names: tuple[str, ...]
    """The instance that answers, then the one that prefills for it."""
    local_reason: str
    began_s: float = field(default_factory=time.time)
    answered_s: float = 0.0
    ended_s: float = 0.0
    failure: str = ""


class AttemptLog:
    """The attempts of recent requests, by the id of the response."""

    def __init__(self, num_max: int = NUM_LOGGED_MAX) -> None:
        self._attempts: OrderedDict[str, list[AttemptRecord]] = OrderedDict()
        self._num_max = num_max

    def add(self, identity: str, record: AttemptRecord) -> None:
        self._attempts.setdefault(identity, []).append(record)
        if len(self._attempts) > self._num_max:
            self._attempts.popitem(last=False)

    def attempts(self, identity: str) -> list[AttemptRecord]:
        """In order; none where the request is not remembered."""
        return self._attempts.get(identity, [])


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What the requests of a router share."""

    config: RouterConfig
    client: UpstreamClient
    fleet: Fleet
    chooser: RouteChooser
    queue: RouteQueue
    metrics: RouterMetrics
    log: AttemptLog = field(default_factory=AttemptLog)
    prefill_tasks: set[asyncio.Task[None]] = field(default_factory=set)


# ---- failures


class AttemptFailed(Exception):  # noqa: N818  (an outcome of an attempt)
    """What a client would be told, and which instances to avoid next."""

    def __init__(self, error: ApiError, blamed: frozenset[str], raw: bytes | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = blamed
        self.raw = raw
        """The response's body where an instance sent one; a client gets it as it is."""

    @property
    def cause(self) -> str:
        return cause_of(self.error)


def cause_of(error: ApiError) -> str:
    """A metric label from a bounded set."""
    code = error.code
    return code if code in STATUSES else f"HTTP_{error.status}"


def _lost(instance: FleetInstance, error: UpstreamError) -> AttemptFailed:
    """The request to this instance ended without a response."""
    code = error.code if error.code in STATUSES else "PEER_LOST"
    api_error = ApiError(STATUSES[code], f"instance {instance.name}: {error.text}", code=code)
    return AttemptFailed(api_error, frozenset({instance.name}))


def _refused(
    route: Route, instance: FleetInstance, response: aiohttp.ClientResponse, body: bytes
) -> AttemptFailed:
    """The instance answered with a status that is not a success."""
    error = read_error(response.status, body, response.headers.get("Retry-After"))
    if error.status in (401, 403):
        # The client's key was good: the instance does not accept the router's.
        text = f"instance {instance.name} refuses the router: {error.message}; give both the same secret"
        return AttemptFailed(failure("REFUSED_AUTHENTICATION", text), frozenset({instance.name}))
    if error.status == 429:
        instance.full_until_s = monotonic() + min(error.retry_after_s or FULL_S, FULL_S)
    return AttemptFailed(error, _blamed(route, instance, error), body)


def _failed_stream(route: Route, event: bytes) -> AttemptFailed:
    """The stream ended with an error event."""
    sent = read_error(502, event)
    status = STATUSES.get(sent.code or "", 500 if sent.code else 502)
    error = ApiError(status, sent.message, param=sent.param, code=sent.code)
    return AttemptFailed(error, _blamed(route, route.server, error), event)


def _blamed(route: Route, instance: FleetInstance, error: ApiError) -> frozenset[str]:
    """A hand-off has two ends: the one that lost its peer is not the one to avoid."""
    if error.status != 502 or error.code == "ENDED":
        return frozenset({instance.name})
    if error.code == "PEER_LOST":
        others = set(route.names) - {instance.name}
        return frozenset(others or {instance.name})
    return frozenset(route.names)


class RetryBudget:
    """How often one request was tried, and which instances it avoids."""

    def __init__(self, limits: RouterLimits) -> None:
        self.avoid: frozenset[str] = frozenset()
        self.last: AttemptFailed | None = None
        self._num_in_row = 0
        self._num_failures = 0
        self._limits = limits
        self._since_s = monotonic()

    def reset(self) -> None:
        """Tokens have come: earlier failures do not count any more."""
        self._num_in_row = 0
        self.avoid = frozenset()
        self._since_s = monotonic()

    def can_retry(self, failed: AttemptFailed) -> bool:
        """Records the failure; a request that is itself wrong stays wrong and is not retried."""
        self.last = failed
        self._num_in_row += 1
        self._num_failures += 1
        self.avoid |= failed.blamed
        limits = self._limits
        return (
            failed.error.status in RETRIED_STATUSES
            and self._num_in_row < limits.num_attempts_max
            and self._num_failures <= limits.num_resumes_max
            and monotonic() - self._since_s < limits.retry_s_max
        )

    def wait_s(self, *, is_resume: bool) -> float:
        """The pause before the next attempt: exponential, with jitter."""
        if is_resume and self.last is not None and self.last.error.code in FULL_CODES:
            return FULL_S * (1 + random.random()) / 2
        most_s = min(RETRY_S_MAX, RETRY_S_FIRST * float(4**self._num_in_row))
        return most_s * (1 + random.random()) / 2


# ---- streams


class StreamProgress:
    """The tokens of every choice that the client has been streamed, over all attempts."""

    def __init__(self, num_choices: int) -> None:
        self._tokens: dict[int, list[int]] = {index: [] for index in range(num_choices)}
        self._done: dict[int, int] = {}
        self.has_usage = False
        """Whether the client has the event after the last choice."""

    def add(self, note: TokenNote) -> None:
        """An event was read, whose tokens the client is about to get."""
        tokens = self._tokens.get(note.index)
        if tokens is None:
            return
        tokens.extend(note.tokens)
        if note.finish is not None:
            self._done[note.index] = len(tokens)

    def has_begun(self, index: int) -> bool:
        """Whether the client has a token of this choice."""
        return bool(self._tokens.get(index))

    @property
    def resume(self) -> tuple[ResumedChoice, ...]:
        """The choices that are not finished, with their tokens."""
        return tuple(
            ResumedChoice(index, tuple(tokens))
            for index, tokens in self._tokens.items()
            if index not in self._done
        )

    @property
    def done(self) -> dict[int, int]:
        """By finished choice: its number of tokens."""
        return dict(self._done)

    @property
    def is_finished(self) -> bool:
        return len(self._done) == len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Of all unfinished choices: what has to be computed again to resume."""
        return sum(len(tokens) for index, tokens in self._tokens.items() if index not in self._done)


class StreamFilter:
    """Takes the token notes out of one attempt's stream; only whole events go on to the client.

    Events before a choice's first token (its role) are held until that token: an attempt that resumes a
    choice without tokens begins it again, and a client has to see one beginning.
    """

    def __init__(self, progress: StreamProgress, n: int) -> None:
        self.error: bytes | None = None
        """The error event that ended the stream."""
        self.is_done = False
        """Whether the stream has come to its proper end."""
        self._progress = progress
        self._n = n
        self._reader = EventReader()
        self._num_tokens: dict[int, int] = {}
        self._admitted: set[int] = set()
        self._held: dict[int, bytes] = {}

    def feed(self, data: bytes) -> bytes:
        """What the client gets of these bytes."""
        out: list[bytes] = []
        for event in self._reader.feed(data):
            if event.note is not None:
                out.append(self._forward(event.note, event.raw))
            elif event.data is not None and event.data.startswith(_ERROR):
                self.error = event.data
                break
            else:
                out.append(event.raw)
                self._progress.has_usage |= event.data is not None and self._progress.is_finished
            if event.is_done:
                self.is_done = True
                break
        return b"".join(out)

    def are_admitted(self, num_jobs: int) -> bool:
        """Whether decode has the cache of every job: it is past the first token, which may come before."""
        return len(self._admitted) >= num_jobs

    def _forward(self, note: TokenNote, raw: bytes) -> bytes:
        """What the client gets now of this event and of those held before it."""
        held = self._held.pop(note.index, b"")
        if not note.tokens and note.finish is None and not self._progress.has_begun(note.index):
            self._held[note.index] = held + raw
            return b""
        self._record(note)
        return held + raw

    def _record(self, note: TokenNote) -> None:
        self._progress.add(note)
        num_tokens = self._num_tokens.get(note.index, 0) + len(note.tokens)
        self._num_tokens[note.index] = num_tokens
        if num_tokens > 1 or note.finish is not None:
            self._admitted.add(note.index // self._n)


# ---- one attempt


class _RoomFields(msgspec.Struct, frozen=True):
    bootstrap_host: str | list[str]
    bootstrap_port: int | list[int]
    bootstrap_room: int | list[int]


@lru_cache(maxsize=1024)
def _split_coordinator(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise BatonError(f"an instance has coordinator {coordinator!a}; it has to be host:port")
    return host.strip("[]"), int(port)


def _attempt_body(request: RoutableRequest, hints: RouterHints, route: Route, num_rooms: int) -> bytes:
    """The client's body with the router's hints and, for a hand-off, rooms that were never used before."""
    private = b'"baton":' + _encoder.encode(hints)
    if route.prefill is None or not num_rooms:
        return request.body_with(private)
    host, port = _split_coordinator(route.prefill.coordinator)
    rooms = [secrets.randbits(ROOM_BITS) for _ in range(num_rooms)]
    if request.is_list or num_rooms > 1:
        fields = _RoomFields([host] * num_rooms, [port] * num_rooms, rooms)
    else:
        fields = _RoomFields(host, port, rooms[0])
    return request.body_with(_encoder.encode(fields)[1:-1] + b"," + private)


class Attempt:
    """The requests of one attempt; each instance is charged until its own is over."""

    def __init__(self, context: RouterContext, route: Route, is_stream: bool, progress: StreamFilter) -> None:
        self.filter = progress
        self.prompt_tokens = 0
        """As the prefill instance counted them; 0 while it has not reported."""
        self._context = context
        self._route = route
        self._is_stream = is_stream
        self._num_rooms = 0
        self._server = UpstreamRequest(context.client)
        self._prefill: UpstreamRequest | None = None
        self._failure: AttemptFailed | None = None
        self._is_over = False
        self._is_local_released = False

    async def send(self, path: str, body: bytes, num_rooms: int) -> aiohttp.ClientResponse:
        """Sends both requests; returns the response's headers, or raises AttemptFailed."""
        route, server = self._route, self._server
        self._num_rooms = num_rooms
        if route.prefill is not None and num_rooms:
            self._prefill = UpstreamRequest(self._context.client)
            route.prefill.upstreams.add(self._prefill)
            task = asyncio.create_task(self._run_prefill(route.prefill, self._prefill, path, body))
            self._context.prefill_tasks.add(task)
            task.add_done_callback(self._context.prefill_tasks.discard)
        route.server.upstreams.add(server)
        try:
            response = await server.send(route.server.url(path), body)
            if response.status == 200:
                self._release_local()
                return response
            error_body = await server.read_all(KEPT_BYTES_MAX)
        except UpstreamError as error:
            raise self._failure or _lost(route.server, error) from None
        raise _refused(route, route.server, response, error_body)

    async def read(self) -> bytes:
        """The next part of the response, or nothing at its end; raises AttemptFailed where it broke off."""
        try:
            return await self._server.read()
        except UpstreamError as error:
            raise self._failure or _lost(self._route.server, error) from None

    async def read_all(self) -> bytes:
        try:
            body = await self._server.read_all()
        except UpstreamError as error:
            raise self._failure or _lost(self._route.server, error) from None
        self.prompt_tokens = self.prompt_tokens or _usage(body[-1024:])
        return body

    async def finish_stream(self) -> None:
        """Reads the end of a stream that is done."""
        if self._server.is_over:
            return
        try:
            async with asyncio.timeout(STREAM_END_S):
                while await self._server.read():
                    pass
        except (TimeoutError, UpstreamError):
            pass  # the client has everything

    def end(self, *, is_answered: bool) -> None:
        """Ends what is left; a prefill request whose cache has arrived may finish by itself."""
        self._is_over = True
        self._release_local()
        self._server.close()
        self._route.server.upstreams.discard(self._server)
        self._route.release_server()
        if self._prefill is None:
            self._route.release_prefill()
        elif is_answered:
            self._prefill.expires_s = monotonic() + LINGER_S
        else:
            self._prefill.close()

    def _release_local(self) -> None:
        if not self._is_local_released:
            self._is_local_released = True
            self._route.release_local()

    async def _run_prefill(
        self, instance: FleetInstance, upstream: UpstreamRequest, path: str, body: bytes
    ) -> None:
        failed = None
        try:
            response = await upstream.send(instance.url(path), body)
            kept = await upstream.read_all(KEPT_BYTES_MAX, drops_rest=True)
            if response.status == 200:
                self.prompt_tokens = _prompt_tokens(response, kept)
            else:
                failed = _refused(self._route, instance, response, kept)
        except UpstreamError as error:
            failed = _lost(instance, error)
        finally:
            upstream.close()
            instance.upstreams.discard(upstream)
            self._route.release_prefill()
            self._context.queue.wake()
        # Once decode has all that it needs, a failure of prefill changes nothing.
        if failed is not None and not self._is_over and not self._is_admitted():
            self._failure = failed
            self._server.fail(UpstreamError("prefill failed"))

    def _is_admitted(self) -> bool:
        if self._is_stream:
            return self.filter.are_admitted(self._num_rooms)
        return self._server.response is not None


def _prompt_tokens(response: aiohttp.ClientResponse, body: bytes) -> int:
    header = response.headers.get(PROMPT_TOKENS_HEADER, "")
    return int(header) if header.isascii() and header.isdigit() and len(header) < 10 else _usage(body)


def _usage(body: bytes) -> int:
    """The prompt tokens in a response's usage; in text quotes are escaped, so no text looks like it."""
    matches = _PROMPT_TOKENS.findall(body)
    return int(matches[-1]) if matches else 0


# ---- one request


class ProxiedRequest:
    """Attempts one after the other, until one has answered or another makes no sense."""

    def __init__(self, context: RouterContext, http_request: web.Request, request: RoutableRequest) -> None:
        self._context = context
        self._request = request
        prefix = "chatcmpl-" if request.path == CHAT_PATH else "cmpl-"
        self._id = prefix + secrets.token_hex(16)
        self._created = int(time.time())
        self._stream = EventStream(http_request, self._id, WRITE_S_MAX)
        self._progress = StreamProgress(request.num_choices)
        self._budget = RetryBudget(context.config.limits)
        self._began_s = monotonic()
        self._prompt_tokens = 0

    @property
    def _has_begun(self) -> bool:
        """Whether anything was streamed to the client."""
        return self._stream.response is not None

    async def respond(self) -> web.StreamResponse:
        """The response; raises an ApiError where nothing has gone to the client."""
        try:
            return await self._respond()
        except ApiError as error:
            if self._is_failure(error):
                self._context.metrics.given_up.labels(cause_of(error)).inc()
            if not self._has_begun:
                raise
            await self._stream.write(data_event(error.body()))
            return await self._stream.end()
        except (ConnectionError, asyncio.CancelledError):
            self._context.metrics.disconnects.inc()
            raise

    def _is_failure(self, error: ApiError) -> bool:
        """Whether the request failed; one that was refused, as wrong or for lack of room, did not."""
        return error.status >= 500 or self._has_begun

    async def _respond(self) -> web.StreamResponse:
        metrics = self._context.metrics
        while True:
            asked_s = monotonic()
            route = await self._context.queue.route(self._request, self._constraints())
            waited_s = monotonic() - asked_s
            metrics.waits.observe(waited_s)
            self._began_s += waited_s
            try:
                return await self._attempt(route)
            except AttemptFailed as failed:
                self._blame(failed)
                is_resume = self._has_begun
                if is_resume and self._progress.is_finished:
                    await self._stream.write(self._missing_end(failed))
                    return await self._stream.end()
                if not self._budget.can_retry(failed):
                    return self._give_up(failed)
            (metrics.resumes if is_resume else metrics.retries).inc()
            await asyncio.sleep(self._budget.wait_s(is_resume=is_resume))

    def _constraints(self) -> RouteConstraints:
        last = self._budget.last
        is_full = last is not None and last.error.status == 429
        # A request with a stream under way waits rather than lose it.
        is_strict = is_full and not self._has_begun
        return RouteConstraints(self._budget.avoid, is_strict, self._progress.num_tokens)

    def _blame(self, failed: AttemptFailed) -> None:
        self._context.metrics.failures.labels(failed.cause).inc()
        instances = self._context.fleet.instances
        for instance in [instances[name] for name in failed.blamed if name in instances]:
            if failed.error.code in ENDED_CODES:
                instance.doubt(failed.error.message)
            else:
                instance.wake()

    def _give_up(self, failed: AttemptFailed) -> web.Response:
        """The instance's own error response, or an ApiError in its place."""
        error = failed.error
        if failed.raw is None or self._has_begun or error.retry_after_s is not None:
            raise error
        if self._is_failure(error):
            self._context.metrics.given_up.labels(failed.cause).inc()
        headers = {"Content-Type": "application/json", **NO_STORE}
        return web.Response(body=failed.raw, status=error.status, headers=headers)

    async def _attempt(self, route: Route) -> web.StreamResponse:
        context, request = self._context, self._request
        hints = self._hints()
        stream_filter = StreamFilter(self._progress, 1 if hints.resume else request.n)
        attempt = Attempt(context, route, request.is_stream, stream_filter)
        record = AttemptRecord(route.names, route.local_reason)
        context.log.add(self._id, record)
        if route.prefill is not None:
            context.metrics.num_hand_offs += 1
        elif route.local_reason:
            context.metrics.local_prefills.labels(route.local_reason).inc()
        is_answered = False
        try:
            num_rooms = len(hints.resume) if self._has_begun else request.num_prompts
            body = _attempt_body(request, hints, route, num_rooms)
            added_s = monotonic() - self._began_s
            upstream = await attempt.send(request.path, body, num_rooms)
            record.answered_s = time.time()
            respond = self._respond_stream if request.is_stream else self._respond_whole
            response = await respond(attempt, upstream, route, added_s)
            is_answered = True
            if not request.prompt.is_ids:
                context.chooser.token_size.add(len(request.prompt.raw), attempt.prompt_tokens)
            return response
        except AttemptFailed as failed:
            record.failure = f"{failed.cause}: {failed.error.message}"
            raise
        finally:
            self._prompt_tokens = self._prompt_tokens or attempt.prompt_tokens
            record.ended_s = time.time()
            attempt.end(is_answered=is_answered)
            context.queue.wake()

    def _hints(self) -> RouterHints:
        is_resume = self._has_begun
        return RouterHints(
            id=self._id,
            created=self._created,
            tokens=self._request.is_stream,
            resume=self._progress.resume if is_resume else (),
            done=self._progress.done if is_resume else {},
            first_token=self._context.config.first_token,
        )

    async def _respond_whole(
        self, attempt: Attempt, upstream: aiohttp.ClientResponse, route: Route, added_s: float
    ) -> web.StreamResponse:
        answered_s = monotonic()
        body = await attempt.read_all()
        self._context.metrics.added.observe(added_s + monotonic() - answered_s)
        content_type = upstream.headers.get("Content-Type", "application/octet-stream")
        headers = {"Content-Type": content_type, ID_HEADER: self._id, **NO_STORE}
        return web.Response(body=body, headers=headers)

    async def _respond_stream(
        self, attempt: Attempt, upstream: aiohttp.ClientResponse, route: Route, added_s: float
    ) -> web.StreamResponse:
        answered_s, name = monotonic(), route.server.name
        content_type = upstream.headers.get("Content-Type", "")
        if not content_type.startswith(EVENT_STREAM):
            error = ApiError(502, f"instance {name} answered {content_type!a}, not a stream")
            raise AttemptFailed(error, frozenset({name}))
        stream, stream_filter = self._stream, attempt.filter
        while data := await attempt.read():
            events = stream_filter.feed(data)
            if events:
                is_first = not self._has_begun
                await stream.write(events)
                if is_first:
                    self._context.metrics.added.observe(added_s + monotonic() - answered_s)
                self._budget.reset()
            if stream_filter.error is not None:
                raise _failed_stream(route, stream_filter.error)
            if stream_filter.is_done:
                response = await stream.end()
                await attempt.finish_stream()
                return response
        error = ApiError(502, f"instance {name} ended its stream too early", code="ENDED")
        raise AttemptFailed(error, frozenset({name}))

    def _missing_end(self, failed: AttemptFailed) -> bytes:
        """What is missing of a stream whose choices are all finished."""
        if not self._request.wants_usage or self._progress.has_usage:
            return DONE
        if not self._prompt_tokens:
            raise failed.error
        num_completion = sum(self._progress.done.values())
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": num_completion,
            "total_tokens": self._prompt_tokens + num_completion,
        }
        kind = "chat.completion.chunk" if self._request.path == CHAT_PATH else "text_completion"
        event = {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}
        return data_event(msgspec.json.encode({**event, "choices": [], "usage": usage})) + DONE
