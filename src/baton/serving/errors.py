"""API errors in the form that OpenAI clients read."""

from __future__ import annotations

import msgspec
from aiohttp import web

VALUE_CHARACTERS_MAX = 80
RETRY_S = 1.0
NO_STORE = {"Cache-Control": "no-store", "Server": "baton"}

STATUSES = {
    "PEER_LOST": 502,
    "COPY_FAILED": 502,
    "CORRUPTED": 502,
    "ABORTED": 502,
    "REFUSED_LAYOUT": 502,
    "REFUSED_VERSION": 502,
    "REFUSED_AUTHENTICATION": 502,
    "REFUSED_PROMPT": 502,
    "REFUSED_LIVE_ID": 502,
    "OUT_OF_PAGES": 503,
    "DRAINING": 503,
    "LOADING": 503,
    "NO_INSTANCE": 503,
    "ENDED": 502,
    "DEADLINE": 504,
    "QUEUE_FULL": 429,
}
"""HTTP status by code: the causes of a failed hand-off (baton.protocol.outcomes.Why), and a server's own."""

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
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow
        """The allowed methods, with status 405."""

    @property
    def type(self) -> str:
        """OpenAI's error type."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return _TYPES.get(self.status, fallback)

    def body(self) -> bytes:
        """The JSON of a response, or of the last event of a stream."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self) -> web.Response:
        headers = {"Content-Type": "application/json", **NO_STORE}
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
        detail = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:VALUE_CHARACTERS_MAX].decode("ascii", "replace")
        return ApiError(status, f"a response with status {status}: {text!r}", retry_after_s=after_s)
    return ApiError(status, detail.message, param=detail.param, code=detail.code, retry_after_s=after_s)
