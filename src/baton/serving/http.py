"""HTTP, as `baton serve` and `baton route` share it: aiohttp behind keys, limits and one error form.

A request passes the middleware, which checks the key before it reads anything, then reads the body whole
within a time and a size limit. Handlers get it from memory by `await request.read()`. Every failure becomes
an ApiError response. A failed request is one line in the log, without the request's text. For a refusal the
line has only the code and the field, because the message may quote the client.

aiohttp closes idle connections, but it has no limit for a request head that never ends. HeadTimer stands
between the socket and aiohttp's protocol and closes such a connection. It forwards the calls of
asyncio.Protocol; the middleware calls it when a head is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import signal
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, cast

import msgspec
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta

from baton import __version__
from baton.errors import BatonError, for_clients
from baton.settings import BACKLOG, is_loopback, take_listener

HOST = "127.0.0.1"
ID_HEADER = "X-Request-Id"
EVENT_STREAM = "text/event-stream"
DRAIN_S = 30.0
"""How long a server or router that drains waits for open requests, where nothing else is set."""

VALUE_CHARACTERS_MAX = 80
RETRY_S = 1.0
NO_STORE = {"Cache-Control": "no-store", "Server": "baton"}
JSON_HEADERS = {"Content-Type": "application/json", **NO_STORE}
DONE = b"data: [DONE]\n\n"
PROMPT_TOKENS_HEADER = "X-Prompt-Tokens"
"""How an instance reports the length of the prompt, whatever the form of its response."""
EVENT_BYTES_MAX = 16 << 20
_NOTE = b": baton "
_CHAT_APIS = ("/v1/responses", "/v1/messages")
"""Newer APIs of other makers, in place of which chats are served."""
_CLIENT_ID = re.compile(r"[!-~]{1,128}")
_DATA = b"data:"

UNKNOWN = "unknown"
"""In place of the pattern of a path that is not served."""
_SHUTDOWN_S = 2.0
_LINGER_S = 2.0
_CHECK_S = 1.0
_FREE_BYTES = 32 << 10
"""A connection with less unsent data than this takes more without waiting."""
_ROUTER_KEY_LABEL = b"baton router key 1"
_FORWARDED_HEADERS = ("Forwarded", "X-Forwarded-For", "X-Real-IP", "Origin")
"""Headers that mark a request which a proxy or a browser on this machine forwards for somebody else."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger("baton.serving.http")


# ---- errors, in the form that OpenAI clients read

_PEER_CODES = (
    "PEER_LOST", "COPY_FAILED", "CORRUPTED", "ABORTED", "ENDED", "REFUSED_LAYOUT", "REFUSED_VERSION",
    "REFUSED_AUTHENTICATION", "REFUSED_PROMPT", "REFUSED_LIVE_ID",
)  # fmt: skip
_UNREADY_CODES = ("OUT_OF_PAGES", "DRAINING", "LOADING", "NO_INSTANCE", "QUEUE_TIMEOUT")
STATUSES = {
    **dict.fromkeys(_PEER_CODES, 502),
    **dict.fromkeys(_UNREADY_CODES, 503),
    "DEADLINE": 504,
    "QUEUE_FULL": 429,
}
"""HTTP status by code: the causes of a failed hand-over (baton.protocol.outcomes.Why), and a server's own."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The error: a text, OpenAI's error type, the field at fault and a code for programs."""

    message: str
    type: str = "server_error"
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success."""

    error: ErrorDetail


class _SentErrorDetail(msgspec.Struct, frozen=True):
    message: str
    param: str | None = None
    code: str | int | None = None
    """vLLM repeats the status here."""


class _SentErrorBody(msgspec.Struct, frozen=True):
    error: _SentErrorDetail


class ApiError(Exception):
    """A refused or failed request with its HTTP status; the middleware turns it into the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or ("invalid_value" if status == 400 else None)
        self.retry_after_s = retry_after_s
        self.allow = allow
        """The allowed methods, with status 405."""

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> bytes:
        """The JSON of a response, or of the last event of a stream."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self) -> web.Response:
        headers = dict(JSON_HEADERS)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow:
            headers["Allow"] = self.allow
        return web.Response(body=self.body(), status=self.status, headers=headers)


def failure(code: str, message: str) -> ApiError:
    """The error for a code of STATUSES; 500 for any other code."""
    status = STATUSES.get(code, 500)
    return ApiError(status, message, code=code, retry_after_s=RETRY_S if status in (429, 503) else None)


def bad_field(param: str, value: object, remedy: str, code: str | None = None) -> ApiError:
    """Bad input: the field, its value (cut where it is long) and what to do."""
    text = ascii(value)
    shown = text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}..."
    return ApiError(400, f"{param} is {shown}: {remedy}", param=param, code=code)


def read_error(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """The error in another server's response; a body of another form is quoted, cut short."""
    after_s = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    try:
        detail = msgspec.json.decode(body, type=_SentErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:VALUE_CHARACTERS_MAX].decode("ascii", "replace")
        return ApiError(status, f"a response with status {status}: {text!r}", retry_after_s=after_s)
    code = detail.code if isinstance(detail.code, str) else None
    return ApiError(status, detail.message, param=detail.param, code=code, retry_after_s=after_s)


# ---- which callers are trusted


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request's key and address prove about its sender."""

    is_router: bool = False
    is_loopback: bool = False

    @property
    def is_trusted(self) -> bool:
        """Whether it may name bootstrap rooms and drain an instance."""
        return self.is_router or self.is_loopback


REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""Of the response, an error too; in the log also where the client has a name of its own for it."""
ROUTE: web.RequestKey[str] = web.RequestKey("route", str)
"""At a router: the instances of the last attempt, for the log."""
FAILURE: web.RequestKey[str] = web.RequestKey("failure", str)
"""Why a stream that had begun ended early, or an instance refused the request; for the log."""
CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
"""Where the middleware puts the caller of a request."""


def router_key(secret: bytes) -> str:
    """The API key that a router sends to instances, derived from the control-plane secret."""
    return hmac.new(secret, _ROUTER_KEY_LABEL, hashlib.sha256).hexdigest()


class Credentials:
    """The keys that a server accepts; without API keys any client may send requests."""

    def __init__(self, api_keys: Sequence[str] = (), secret: bytes | None = None) -> None:
        self._keys = tuple(_digest(key) for key in api_keys)
        self._router = None if secret is None else _digest(router_key(secret))

    @property
    def has_api_key(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    def caller(self, headers: Mapping[str, str], address: str | None) -> Caller:
        """The caller; an ApiError with status 401 where a key is needed and missing or wrong."""
        is_near = is_loopback(address)
        for name in _FORWARDED_HEADERS:
            if name in headers:
                is_near = False
        authorization = headers.get("Authorization", "")
        if not authorization and not self._keys:
            return Caller(is_loopback=is_near)
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip() if scheme.lower() == "bearer" else "")
        is_router = self._router is not None and hmac.compare_digest(digest, self._router)
        # Every key is compared, so that the time does not tell which one was nearly right.
        matches = [hmac.compare_digest(digest, known) for known in self._keys]
        if self._keys and not is_router and not any(matches):
            state = "is not a known API key" if key else "is missing"
            raise ApiError(
                401,
                f"the key in the Authorization header {state}; send 'Authorization: Bearer KEY'",
                param="Authorization",
                code="invalid_api_key",
            )
        return Caller(is_router, is_near)


def _digest(key: str) -> bytes:
    # Digests have one length, so that comparing them does not tell the length of a key.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


# ---- the server


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on the size and duration of requests."""

    body_bytes_max: int = 16 << 20
    body_s_max: float = 30.0
    head_s_max: float = 10.0
    """From the first byte of a request to the end of its headers."""
    idle_s_max: float = 75.0
    """Between requests, and before the first one."""
    open_paths: frozenset[str] = frozenset({"/health"})
    """Answered without a key."""


class HttpServer:
    """An aiohttp application that listens in the running loop; add routes to `app` before `start`."""

    def __init__(
        self,
        credentials: Credentials,
        limits: HttpLimits | None = None,
        *,
        ssl_context: ssl.SSLContext | None = None,
        on_response: Callable[[web.Request, int], None] = lambda request, status: None,
    ) -> None:
        self.limits = limits or HttpLimits()
        self.app = web.Application(client_max_size=self.limits.body_bytes_max, middlewares=[self._middleware])
        self.app.router.add_get("/version", _get_version)
        self.app.on_response_prepare.append(self._keep_id)
        self._credentials = credentials
        self._ssl = ssl_context
        self._on_response = on_response
        """Called with the status of every response, for metrics."""
        self._heads: dict[asyncio.BaseTransport, HeadTimer] = {}
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._checking: asyncio.TimerHandle | None = None
        self._address = ("", 0)

    @property
    def port(self) -> int:
        return self._address[1]

    @property
    def url(self) -> str:
        host, port = self._address
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"{'http' if self._ssl is None else 'https'}://{name}"

    async def start(self, host: str, port: int) -> None:
        """Listens; port 0 takes a free one. Call `settings.check_binding` first."""
        limits = self.limits
        self._runner = web.AppRunner(
            self.app,
            access_log=None,
            auto_decompress=False,  # so that no small body becomes a large one
            handler_cancellation=True,  # a client that disconnects aborts its request at once
            keepalive_timeout=limits.idle_s_max,
            lingering_time=_LINGER_S,
            logger=_aiohttp_log,
            shutdown_timeout=_SHUTDOWN_S,
        )
        await self._runner.setup()
        make_protocol = self._runner.server
        assert make_protocol is not None
        listener = take_listener()
        where: dict[str, Any] = {"sock": listener} if listener else {"host": host, "port": port}
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: HeadTimer(make_protocol(), self._heads, limits),
                **where,
                backlog=BACKLOG,
                ssl=self._ssl,
                ssl_handshake_timeout=None if self._ssl is None else limits.head_s_max,
            )
        except (OSError, OverflowError) as error:
            await self.close()
            reason = getattr(error, "strerror", None) or str(error)
            raise BatonError(
                f"cannot listen on {host}:{port}: {reason}; name another port, or 0 for a free one"
            ) from None
        self._address = self._server.sockets[0].getsockname()[:2]
        self._check_heads()

    async def close(self) -> None:
        """Stops listening and ends what is still being answered."""
        if self._checking is not None:
            self._checking.cancel()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        for transport in list(self._heads):
            cast(asyncio.Transport, transport).abort()

    def _check_heads(self) -> None:
        # One timer for all connections: one per request would cost more than most requests.
        now_s = monotonic()
        for timer in list(self._heads.values()):
            timer.check(now_s)
        wait_s = min(_CHECK_S, self.limits.head_s_max / 2, self.limits.idle_s_max / 2)
        self._checking = asyncio.get_running_loop().call_later(wait_s, self._check_heads)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        timer = self._heads.get(transport) if transport is not None else None
        if timer is not None:
            timer.is_in_request = True
        begun_s, reason = monotonic(), ""
        try:
            await self._admit(request)
            if timer is not None:
                timer.has_data_ahead = False
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            self._on_response(request, 499)
            self._log_request(request, 499, monotonic() - begun_s, "the client disconnected")
            raise
        except Exception as error:
            response, reason = self._error_response(request, error)
        finally:
            if timer is not None:
                timer.end_request()
        _set_id(request, response)
        self._on_response(request, response.status)
        self._log_request(request, response.status, monotonic() - begun_s, reason)
        return response

    async def _keep_id(self, request: web.Request, response: web.StreamResponse) -> None:
        """A client that names its request finds that name in the response."""
        _set_id(request, response)
        response.headers[ID_HEADER] = client_id(request) or request[REQUEST_ID]

    def _log_request(self, request: web.Request, status: int, seconds: float, reason: str) -> None:
        """One line; what is only read, and polls, are for debugging unless they fail."""
        reason = reason or request.get(FAILURE, "")
        is_poll = request.path in self.limits.open_paths
        is_quiet = is_poll or (status < 400 and request.method in ("GET", "HEAD"))
        has_failed = status >= 500 or (status == 200 and FAILURE in request)
        level = logging.WARNING if has_failed else logging.INFO
        level = logging.DEBUG if is_quiet else level
        if not _log.isEnabledFor(level):
            return
        path = route_pattern(request)
        if path == UNKNOWN:
            path = ascii(request.path[:VALUE_CHARACTERS_MAX])[1:-1]
        fields: dict[str, Any] = {"method": request.method, "path": path, "status": status}
        fields |= {"seconds": round(seconds, 6)}
        names = {
            "request": request.get(REQUEST_ID, ""),
            "client_id": client_id(request),
            "route": request.get(ROUTE, ""),
            "reason": reason,
        }
        fields |= {name: value for name, value in names.items() if value}
        text = "".join(f", {name} {value}" for name, value in names.items() if value)
        _log.log(
            level,
            "%s %s: %d in %.3f s%s",
            request.method,
            path,
            status,
            seconds,
            text,
            extra={"fields": {"event": "request", **fields}},
        )

    async def _admit(self, request: web.Request) -> None:
        """Checks the key, then reads the body within its limits."""
        limits, headers = self.limits, request.headers
        if request.path not in limits.open_paths:
            request[CALLER] = self._credentials.caller(headers, request.remote)
        else:
            request[CALLER] = Caller()
            if not request.can_read_body:
                return
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            text = "the body is compressed; send it as it is"
            raise ApiError(415, text, param="Content-Encoding", code="compressed")
        if (request.content_length or 0) > limits.body_bytes_max:
            raise self._too_large()
        try:
            if request.content.is_eof():
                await request.read()  # all of it came with the head: nothing to wait for
                return
            async with asyncio.timeout(limits.body_s_max):
                await request.read()
        except TimeoutError:
            text = f"the body did not arrive within {limits.body_s_max:g} s; send it at once"
            raise ApiError(408, text, code="too_slow") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except ClientPayloadError as error:
            raise ApiError(400, f"the body cannot be read ({error}); send what the headers say") from None

    def _too_large(self) -> ApiError:
        text = f"the body is longer than {self.limits.body_bytes_max} bytes; send less"
        return ApiError(413, text, code="too_large")

    def _error_response(self, request: web.Request, error: Exception) -> tuple[web.Response, str]:
        """The response, and the reason for the log."""
        match error:
            case ApiError():
                api_error = error
            case web.HTTPException():
                api_error = _unknown_path(request, error)
            case BatonError():
                api_error = ApiError(500, for_clients(str(error)), code="ENGINE")
            case _:
                _log.error("%s %s failed", request.method, route_pattern(request), exc_info=error)
                internal = ApiError(500, "internal error; the traceback is in the server's log")
                return internal.response(), "internal error"
        status = api_error.status
        response = api_error.response()
        if status in (408, 413, 415):
            response.force_close()
        return response, log_reason(api_error)


def _set_id(request: web.Request, response: web.StreamResponse) -> None:
    """Before the client's own id may replace it in the header; a response without one is given one."""
    if not request.get(REQUEST_ID):
        request[REQUEST_ID] = response.headers.get(ID_HEADER) or _new_id()


def _new_id() -> str:
    return f"req-{secrets.token_hex(16)}"


def log_reason(error: ApiError) -> str:
    """Of a refusal only code and field, since the message may quote what a client sent."""
    detail = error.message if error.status >= 500 else error.param
    return " ".join(word for word in (error.code, detail) if word)


def client_id(request: web.Request) -> str:
    """What the client calls its request; empty where that is nothing, or cannot be repeated."""
    given = request.headers.get(ID_HEADER, "")
    return given if _CLIENT_ID.fullmatch(given) else ""


def _unknown_path(request: web.Request, error: web.HTTPException) -> ApiError:
    where = f"{request.method} {request.path!a}"
    if error.status == 404:
        remedy = "see GET /openapi.json"
        if request.path.startswith(_CHAT_APIS):
            remedy = "use POST /v1/chat/completions"
        return ApiError(404, f"{where} is not served here; {remedy}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return ApiError(405, f"{where}: use {allowed}", code="method_not_allowed", allow=allowed)
    return ApiError(error.status, f"{where}: {error.reason}")


def route_pattern(request: web.Request) -> str:
    """The path as it was registered: what a client put into it stays out of logs and metrics."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else UNKNOWN


class _NoTrace(logging.Filter):
    """aiohttp's parser errors quote the input, keys and all: log only that they happened.

    What is not HTTP/1.1 is the client's mistake, and sglang-router asks for HTTP/2 first: only for debugging.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        record.exc_info = None
        if not isinstance(error, HttpProcessingError):
            return True
        record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return _aiohttp_log.isEnabledFor(logging.DEBUG)


_aiohttp_log = logging.getLogger("baton.serving.aiohttp")
_aiohttp_log.addFilter(_NoTrace())


class HeadTimer(asyncio.Protocol):
    """One connection: passes everything to aiohttp, and closes it when a request head takes too long."""

    def __init__(
        self, inner: asyncio.Protocol, heads: dict[asyncio.BaseTransport, HeadTimer], limits: HttpLimits
    ) -> None:
        self.is_in_request = False
        """Set by the middleware while a request is answered."""
        self.has_data_ahead = False
        """Whether data came since the body of this request was complete: the head of the next one."""
        self._inner = inner
        self._heads = heads
        self._limits = limits
        self._transport: asyncio.Transport
        self._deadline_s = monotonic() + limits.idle_s_max
        self._is_in_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._heads[transport] = self
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.is_in_request:
            self.has_data_ahead = True
        elif not self._is_in_head:
            self._begin_head()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._heads.pop(self._transport, None)
        self._inner.connection_lost(error)

    def end_request(self) -> None:
        """The handler is done; aiohttp's keep-alive timer covers the time until the next head begins."""
        self.is_in_request = False
        if self.has_data_ahead:
            self._begin_head()
        else:
            self._is_in_head = False
            self._deadline_s = monotonic() + 2 * self._limits.idle_s_max

    def check(self, now_s: float) -> None:
        if self.is_in_request or now_s <= self._deadline_s:
            return
        if self._transport.is_closing():
            self._transport.abort()  # its client does not read the last response
            return
        if self._is_in_head:
            text = f"the headers did not arrive within {self._limits.head_s_max:g} s; send them at once"
            body = ApiError(408, text, code="too_slow").body()
            head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            head += f"{ID_HEADER}: {_new_id()}\r\n"
            self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._deadline_s = now_s + self._limits.idle_s_max
        self._transport.close()

    def _begin_head(self) -> None:
        self._is_in_head = True
        self.has_data_ahead = False
        self._deadline_s = monotonic() + self._limits.head_s_max


class OpenRequests(Generic[T]):
    """The requests of a server that are not over, the oldest first; it may drain."""

    def __init__(self) -> None:
        self.is_draining = False
        self._requests: dict[T, None] = {}
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[T]:
        return iter(self._requests)

    def add(self, request: T) -> None:
        self._requests[request] = None
        self._emptied.clear()

    def discard(self, request: T) -> None:
        self._requests.pop(request, None)
        if not self._requests:
            self._emptied.set()

    async def drain(self, wait_s: float) -> None:
        """New requests are refused from now on; waits for open ones up to this time."""
        self.is_draining = True
        try:
            async with asyncio.timeout(wait_s):
                await self._emptied.wait()
        except TimeoutError:
            _log.warning("%d requests were still running after %g s of draining", len(self), wait_s)


class Program(Protocol):
    """A server or a router that has a process to itself."""

    @property
    def url(self) -> str: ...

    async def wait(self) -> None:
        """Until it fails, which raises BatonError."""

    async def drain(self, wait_s: float) -> None:
        """Takes no new requests, and waits for open ones up to this time."""

    async def close(self) -> None:
        """Ends everything."""


async def run_until_signal(
    program: Program, start: Awaitable[None], drain_s: float, on_start: Callable[[str], None]
) -> bool:
    """The first SIGTERM drains, a second signal or SIGINT ends it at once; whether it was SIGINT alone.

    `on_start` is called with the URL.
    """
    interrupted, terminated, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def terminate() -> None:
        (interrupted if terminated.is_set() else terminated).set()

    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    ends: list[asyncio.Task[Any]] = [
        asyncio.create_task(interrupted.wait()),
        asyncio.create_task(program.wait()),
    ]
    try:
        await start
        on_start(program.url)
        await _first(*ends, asyncio.create_task(terminated.wait()))
        if terminated.is_set():
            await _first(*ends, asyncio.create_task(program.drain(drain_s)))
    finally:
        for task in ends:
            task.cancel()
        await program.close()
    return interrupted.is_set() and not terminated.is_set()


async def _first(*tasks: asyncio.Task[Any]) -> None:
    """Waits until one of these is done, and raises its exception; the last one is not needed any more."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[-1].cancel()
    for task in done:
        task.result()


# ---- responses, and what router and instances exchange in them
#
# Beside OpenAI's API there are the request field `baton` and notes in streams. A client of OpenAI's API skips
# lines that begin with a colon. So the tokens of each event, which a router needs to resume a stream on
# another instance, are in such a line before the event, in the same block; the router forwards the rest
# without decoding it.


def json_response(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers=JSON_HEADERS)


async def _get_version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


class _EventResponse(web.StreamResponse):
    _send_headers_immediately = False
    """As in web.Response: the headers go out with the first events, not in a packet of their own."""


class EventStream:
    """A response of server-sent events; its headers go out with the first write."""

    def __init__(self, request: web.Request, identity: str, write_s_max: float) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request
        self._identity = identity
        self._write_s_max = write_s_max

    async def write(self, data: bytes) -> None:
        """Sends whole events; drops a client that does not read for `write_s_max`."""
        await self._send(data, is_last=False)

    async def end(self, data: bytes) -> web.StreamResponse:
        """Sends the last events together with the end of the response."""
        return await self._send(data, is_last=True)

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """Ends a stream that has begun with the error as its last event, without [DONE]."""
        self._request[FAILURE] = log_reason(error)
        return await self.end(data_event(error.body()))

    async def _send(self, data: bytes, *, is_last: bool) -> web.StreamResponse:
        transport, response = self._request.transport, self.response
        if response is None:
            headers = {"Content-Type": EVENT_STREAM, ID_HEADER: self._identity, **NO_STORE}
            response = self.response = _EventResponse(headers=headers)
            await response.prepare(self._request)
        send = response.write_eof if is_last else response.write
        if transport is not None and transport.get_write_buffer_size() + len(data) < _FREE_BYTES:
            await send(data)
            return response
        try:
            async with asyncio.timeout(self._write_s_max):
                await send(data)
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError(f"a client did not read for {self._write_s_max:g} s") from None
        return response


class ResumedChoice(msgspec.Struct, frozen=True):
    """A choice that is resumed: its index, and the tokens that were streamed already."""

    index: Annotated[int, Meta(ge=0)]
    tokens: tuple[int, ...]


class RouterHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """The field `baton` of a request body; honoured from trusted callers, ignored from others."""

    id: Annotated[str, Meta(pattern=r"^[\w.:-]{0,128}$")] = ""
    """Of the response, the same on every attempt."""
    created: Annotated[int, Meta(ge=0, le=2**53)] = 0
    tokens: bool = False
    """Whether a TokenNote goes before each data event."""
    resume: tuple[ResumedChoice, ...] = ()
    """One job each; all other choices are finished."""
    done: dict[Annotated[int, Meta(ge=0, le=2**31)], Annotated[int, Meta(ge=0, le=2**31)]] = {}
    """By choice that was finished in an earlier attempt: its number of tokens, for the usage."""
    first_token: Literal["", "prefill", "decode"] = ""
    """Which side's first token is streamed; empty: the instance's own setting."""


class TokenNote(msgspec.Struct, frozen=True):
    """Tokens that an event adds to a choice, and the finish reason if it ended."""

    index: int
    tokens: tuple[int, ...] = ()
    finish: str | None = None


class SentEvent(msgspec.Struct, frozen=True):
    """One block of a stream: its bytes without notes, and its note."""

    raw: bytes
    note: TokenNote | None

    @property
    def data(self) -> bytes | None:
        """The content of its data lines; None where it has none."""
        lines = [line[len(_DATA) :].lstrip(b" ") for line in self.raw.split(b"\n") if line.startswith(_DATA)]
        return b"\n".join(lines) if lines else None

    @property
    def is_done(self) -> bool:
        """Whether it is the proper end of the stream."""
        return self.data == b"[DONE]"


def data_event(payload: bytes) -> bytes:
    """One event; encoded JSON has no line feeds, so the data is one line."""
    return b"data: " + payload + b"\n\n"


def note_line(note: TokenNote) -> bytes:
    """The comment line that goes right before the event of the note."""
    return _NOTE + msgspec.json.encode(note) + b"\n"


class EventSplitter:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[SentEvent]:
        """The events that these bytes complete; a block of comments alone is an event without data."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise ApiError(502, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this Baton?")
        for block in blocks:
            if block.strip():
                yield _read(block)


def _read(block: bytes) -> SentEvent:
    stop = block.find(b"\n")
    if block.startswith(_NOTE) and block.startswith(_DATA, stop + 1) and block.find(b"\n", stop + 1) < 0:
        # The usual block: a note and one line of data.
        return SentEvent(block[stop + 1 :] + b"\n\n", _read_note(block[:stop]))
    kept, note = [], None
    for line in block.split(b"\n"):
        if line.startswith(_NOTE):
            note = _read_note(line)
        else:
            kept.append(line)
    return SentEvent(b"\n".join(kept) + b"\n\n" if kept else b"", note)


def _read_note(line: bytes) -> TokenNote:
    try:
        return _notes.decode(line[len(_NOTE) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(502, f"a token note cannot be read ({error}); is this Baton?") from None


_notes = msgspec.json.Decoder(TokenNote)
