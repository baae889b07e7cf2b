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
    on_answer: Callable[[str, int], None] = lambda route, status: None
    """Told the route's pattern and the status of every answer, for metrics."""

    def too_slow(self) -> Problem:
        """What a client is told whose body does not come."""
        text = f"the body did not come within {self.body_s_max:g} s; send it at once"
        return Problem(408, text, code="too_slow")


def application(credentials: Credentials, config: EdgeConfig | None = None) -> web.Application:
    """An application without routes behind an edge."""
    return Edge(credentials, config or EdgeConfig()).application()


def caller_of(request: web.Request) -> Caller:
    """Who the edge found to be calling."""
    return request[CALLER]


class Edge:
    """What every request passes."""

    def __init__(self, credentials: Credentials, config: EdgeConfig) -> None:
        self.credentials = credentials
        self.config = config

    def application(self) -> web.Application:
        """An application without routes behind this edge."""
        return web.Application(client_max_size=self.config.body_bytes_max, middlewares=[self.guard])

    @web.middleware
    async def guard(self, request: web.Request, handler: Answer) -> web.StreamResponse:
        """The middleware."""
        try:
            await self._admit(request)
            response = await handler(request)
        except (ConnectionError, asyncio.CancelledError):
            self.config.on_answer(_route(request), 499)
            raise
        except web.HTTPException as error:
            response = self._refusal(request, _unknown(request, error))
        except Exception as error:
            response = self._refusal(request, error)
        self.config.on_answer(_route(request), response.status)
        return response

    def problem_of(self, error: Exception, where: str, *, is_quiet: bool = False) -> Problem:
        """What a client is told of a failure; one line of it is logged, or the trace of a bug."""
        if isinstance(error, Problem):
            problem = error
        elif isinstance(error, BatonError):
            problem = of_error(error)
        else:
            _log.error("%s failed", where, exc_info=error)
            return Problem(500, "an internal error; its trace is in the log")
        if not is_quiet:
            level = logging.WARNING if problem.status >= 500 else logging.INFO
            why = problem.message if problem.status >= 500 else problem.param
            _log.log(level, "%s: %d %s %s", where, problem.status, problem.code, why)
        return problem

    async def _admit(self, request: web.Request) -> None:
        request[CALLER] = Caller()
        if request.path not in self.config.open_paths:
            request[CALLER] = self.credentials.caller(request.headers, request.remote)
        elif not request.can_read_body:
            return
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Problem(415, "a compressed body; send it as it is", param="Content-Encoding")
        if (request.content_length or 0) > self.config.body_bytes_max:
            raise self._too_large()
        try:
            if request.content.is_eof():
                await request.read()  # all of it came with the head: there is nothing to wait for
                return
            async with asyncio.timeout(self.config.body_s_max):
                await request.read()
        except TimeoutError:
            raise self.config.too_slow() from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except ClientPayloadError as error:
            raise Problem(400, f"the body cannot be read ({error}); send what the headers say") from None

    def _too_large(self) -> Problem:
        text = f"the body is longer than {self.config.body_bytes_max} bytes; send less"
        return Problem(413, text, code="too_large")

    def _refusal(self, request: web.Request, error: Exception) -> web.Response:
        # What is asked every second is not logged: the answer is no failure of the request.
        is_quiet = request.path in self.config.open_paths
        problem = self.problem_of(error, f"{request.method} {_route(request)}", is_quiet=is_quiet)
        response = problem.response()
        if problem.status in (408, 413, 415):
            response.force_close()
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
    return resource.canonical if resource is not None else "unknown"
