"""Requests that wait until an instance has room, in the order in which they came, and not too many."""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic

from baton.router.asked import Asked
from baton.router.choosing import Absent, Choosing, Full, Wish
from baton.router.config import Limits
from baton.router.routes import Route
from baton.web import Problem, failure

RETRY_S = 1.0


class Waiting:
    """A line for each model; only the first of a line looks for an instance."""

    def __init__(self, choosing: Choosing, limits: Limits) -> None:
        self.num_waiting = 0
        self._choosing = choosing
        self._limits = limits
        self._lines: dict[str | None, deque[asyncio.Event]] = {}

    async def route(self, asked: Asked, wish: Wish) -> Route:
        """A route, taken; a Problem with status 429 or 503 where there is none in time."""
        line = self._lines.get(asked.model)
        if not line:
            try:
                return self._taken(asked, wish)
            except (Absent, Full) as why:
                self._refuse_at_once(wish, why)
        return await self._wait(asked, wish)

    def wake(self) -> None:
        """An instance has room, or has changed."""
        for line in self._lines.values():
            if line:
                line[0].set()

    def _taken(self, asked: Asked, wish: Wish) -> Route:
        route = self._choosing.choose(asked, wish)
        route.take()
        return route

    def _refuse_at_once(self, wish: Wish, why: Absent | Full) -> None:
        if isinstance(why, Full) and wish.is_strict:
            raise _full("every instance has as many requests as it takes")

    async def _wait(self, asked: Asked, wish: Wish) -> Route:
        if self.num_waiting >= self._limits.num_waiting_max:
            raise _full(f"{self.num_waiting} requests wait already")
        line = self._lines.setdefault(asked.model, deque())
        turn = asyncio.Event()
        line.append(turn)
        self.num_waiting += 1
        try:
            return await self._first_in_line(asked, wish, turn)
        finally:
            self.num_waiting -= 1
            line.remove(turn)
            if line:
                line[0].set()
            else:
                self._lines.pop(asked.model, None)

    async def _first_in_line(self, asked: Asked, wish: Wish, turn: asyncio.Event) -> Route:
        began_s = monotonic()
        why: Absent | Full = Full()
        while True:
            is_first = self._lines[asked.model][0] is turn
            try:
                if is_first:
                    return self._taken(asked, wish)
            except (Absent, Full) as found:
                why = found
                self._refuse_at_once(wish, why)
            limits = self._limits
            wait_s = limits.recover_s_max if isinstance(why, Absent) else limits.wait_s_max
            left_s = began_s + wait_s - monotonic()
            if left_s <= 0:
                raise _given_up(why, wait_s)
            turn.clear()
            # An instance that said it was full is asked again after a while, without anybody's waking.
            await _set_within(turn, min(left_s, RETRY_S / 4 if is_first else left_s))


async def _set_within(turn: asyncio.Event, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await turn.wait()
    except TimeoutError:
        pass


def _given_up(why: Absent | Full, wait_s: float) -> Problem:
    if isinstance(why, Absent):
        return failure("NO_INSTANCE", f"{why}; try again")
    return _full(f"no instance had room for {wait_s:g} s")


def _full(text: str) -> Problem:
    return Problem(429, f"{text}; try again later", code="QUEUE_FULL", retry_after_s=RETRY_S)
