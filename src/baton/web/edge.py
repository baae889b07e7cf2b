"""The edge of an HTTP server: who calls is settled before anything is read, and every failure is a Problem.

A request body is read here, whole, within a time and a size; what is behind the edge gets it from memory by
`await request.read()`. A failed request is one line in the log: never its text, and no more of a refusal than
the code and the field, since its message may quote what a client sent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import ClientPayloadError, web

from baton.errors import BatonError
from baton.web.credentials import Caller, Credentials
from baton.web.problems import Problem, of_error

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

CALLER: web.RequestKey[Caller] = web.RequestKey("caller", Caller)
_log = logging.getLogger("baton.web")


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """What is seldom changed."""

    body_bytes_max: int = 16 << 20
    body_s_max: float = 30.0
    open_paths: frozenset[str] = frozenset({"/health"})
    """Answered without a key."""
    on_answer: Callable[[web.Request, int], None] = lambda request, status: None
    """Told of every answer's status, for metrics."""


def application(credentials: Credentials, config: EdgeConfig | None = None) -> web.Application:
    """An application without routes behind an edge."""
    config = config or EdgeConfig()
    edge = Edge(credentials, config)
    return web.Application(client_max_size=config.body_bytes_max, middlewares=[edge.guard])


def caller_of(request: web.Request) -> Caller:
    """Who the edge found to be calling."""
    return request[CALLER]


class Edge:
    """What every request passes."""

    def __init__(self, credentials: Credentials, config: EdgeConfig) -> None:
        self._credentials = credentials
        self._config = config

    @web.middleware
    async def guard(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        """The middleware."""
        try:
            await self._admit(request)
            response = await handler(request)
        except Problem as problem:
            response = self._refusal(request, problem)
        except web.HTTPException as error:
            response = self._refusal(request, _unknown(request, error))
        except (ConnectionError, asyncio.CancelledError):
            self._config.on_answer(request, 499)
            raise
        except BatonError as error:
            response = self._refusal(request, of_error(error))
        except Exception:
            _log.exception("%s %s failed", request.method, _route(request))
            response = Problem(500, "an internal error; its trace is in the log").response()
        self._config.on_answer(request, response.status)
        return response

    async def _admit(self, request: web.Request) -> None:
        request[CALLER] = Caller()
        if request.path not in self._config.open_paths:
            request[CALLER] = self._credentials.caller(request.headers, request.remote)
        elif not request.can_read_body:
            return
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Problem(415, "a compressed body; send it as it is", param="Content-Encoding")
        if (request.content_length or 0) > self._config.body_bytes_max:
            raise self._too_large()
        try:
            if request.content.is_eof():
                await request.read()  # all of it came with the head: there is nothing to wait for
                return
            async with asyncio.timeout(self._config.body_s_max):
                await request.read()
        except TimeoutError:
            text = f"the body did not come within {self._config.body_s_max:g} s; send it at once"
            raise Problem(408, text, code="too_slow") from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except ClientPayloadError as error:
            raise Problem(400, f"the body cannot be read ({error}); send what the headers say") from None

    def _too_large(self) -> Problem:
        text = f"the body is longer than {self._config.body_bytes_max} bytes; send less"
        return Problem(413, text, code="too_large")

    def _refusal(self, request: web.Request, problem: Problem) -> web.Response:
        response = problem.response()
        if problem.status in (408, 413, 415):
            response.force_close()
        if request.path in self._config.open_paths:
            return response  # asked every second, and the answer is no failure of the request
        level = logging.WARNING if problem.status >= 500 else logging.INFO
        why = problem.message if problem.status >= 500 else problem.param
        _log.log(level, "%s %s: %d %s %s", request.method, _route(request), problem.status, problem.code, why)
        return response


def _unknown(request: web.Request, error: web.HTTPException) -> Problem:
    where = f"{request.method} {request.path!a}"
    if error.status == 404:
        return Problem(404, f"{where} is not served here; docs/http.md lists what is", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = Problem(405, f"{where}: use {allowed}", code="method_not_allowed")
        problem.allow = allowed
        return problem
    return Problem(error.status, f"{where}: {error.reason}")


def _route(request: web.Request) -> str:
    """The route's pattern: what a client put into the path stays out of logs."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "an unknown path"
