"""The plain way to some of an application's paths: no request object, no middlewares, the same edge."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from baton.web.edge import Edge
from baton.web.plain import Head, Outlet
from baton.web.problems import Problem

PlainAnswer = Callable[[str, bytes, Outlet], Awaitable[int]]
"""Given path, body and where the answer goes; returns its status."""


class Lane:
    """POSTs that are answered without aiohttp."""

    def __init__(self, edge: Edge, posts: Mapping[str, PlainAnswer]) -> None:
        self.paths = frozenset(path.encode("ascii") for path in posts)
        self.config = edge.config
        self._edge = edge
        self._posts = posts

    def admits(self, head: Head) -> bool:
        """Whether it is answered here; a refusal is for the server behind to word."""
        if head.path not in self._posts or head.num_body_bytes > self.config.body_bytes_max:
            return False
        try:
            self._edge.credentials.check(head.authorization)
        except Problem:
            return False
        return True

    async def answer(self, path: str, body: bytes, outlet: Outlet) -> None:
        """Answers, whatever happens; raises ConnectionError where the client cannot be told."""
        on_answer = self.config.on_answer
        try:
            status = await self._posts[path](path, body, outlet)
        except (ConnectionError, asyncio.CancelledError):
            on_answer(path, 499)
            raise
        except Exception as error:
            problem = self._edge.problem_of(error, f"POST {path}")
            on_answer(path, problem.status)
            if outlet.has_begun:
                raise ConnectionAbortedError("a stream broke off") from error
            await outlet.send(problem.reply())
        else:
            on_answer(path, status)
