"""Why a request is not answered, in the form that clients of OpenAI's API read."""

from __future__ import annotations

import msgspec
from aiohttp import web

from baton.errors import BatonError
from baton.web.plain import Reply

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
"""By code: the names of a hand-over's causes (baton.protocol.outcomes.Why), and a server's own."""

RETRIABLE = frozenset(STATUSES) - {"REFUSED_LAYOUT", "REFUSED_VERSION", "REFUSED_AUTHENTICATION"}
"""Codes after which the same request may succeed on another pair of instances."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class Detail(msgspec.Struct, frozen=True):
    """What was wrong: in words, of which kind, with which field, under which name."""

    message: str
    type: str = "server_error"
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: Detail


class Problem(Exception):  # noqa: N818  (it is what a client is told, whoever is to blame)
    """A refusal or a failure with its HTTP status; the edge makes it the answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.allow = ""
        """The methods that there are, where another one was used."""
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's word for this kind of problem."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return _KINDS.get(self.status, fallback)

    @property
    def is_retriable(self) -> bool:
        """Whether the same request may succeed elsewhere or later."""
        return self.code in RETRIABLE

    def body(self) -> bytes:
        """The JSON of an answer, or of a stream's last event."""
        return msgspec.json.encode(ErrorBody(Detail(self.message, self.type, self.param, self.code)))

    def reply(self) -> Reply:
        """The whole answer."""
        headers = []
        if self.retry_after_s is not None:
            headers.append(("Retry-After", str(max(1, round(self.retry_after_s)))))
        if self.status == 401:
            headers.append(("WWW-Authenticate", "Bearer"))
        if self.allow:
            headers.append(("Allow", self.allow))
        return Reply(self.status, self.body(), headers=tuple(headers))

    def response(self) -> web.Response:
        """The whole answer, for aiohttp."""
        reply = self.reply()
        headers = {"Content-Type": reply.content_type, **NO_STORE, **dict(reply.headers)}
        return web.Response(body=reply.body, status=reply.status, headers=headers)


def failure(code: str, message: str) -> Problem:
    """The problem that a failure's cause becomes; see STATUSES."""
    status = STATUSES.get(code, 500)
    return Problem(status, message, code=code, retry_after_s=RETRY_S if status in (429, 503) else None)


def refused(param: str, value: object, remedy: str, code: str | None = None) -> Problem:
    """Bad input: the field, what it was and what to do."""
    return Problem(400, f"{param} is {shown(value)}: {remedy}", param=param, code=code)


def shown(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= VALUE_CHARACTERS_MAX else f"{text[:VALUE_CHARACTERS_MAX]}..."


def read_problem(status: int, body: bytes, retry_after: str | None = None) -> Problem:
    """What another server's answer says; one that is not of this form is told as it is, cut short."""
    after_s = float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None
    try:
        found = msgspec.json.decode(body, type=ErrorBody).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = body[:VALUE_CHARACTERS_MAX].decode("ascii", "replace")
        return Problem(status, f"an answer with status {status}: {text!r}", retry_after_s=after_s)
    return Problem(status, found.message, param=found.param, code=found.code, retry_after_s=after_s)


def of_error(error: BatonError) -> Problem:
    """An error that Baton raised on purpose and nobody dealt with."""
    return Problem(500, str(error), code="ENGINE")
