"""From an instance's thread to the loop that serves its clients: one call per wake-up, however much came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from baton.engine.requests import RequestEvent

Receive = Callable[[RequestEvent], None]


class Bridge:
    """Where sinks leave their events; each is received on the loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Receive, RequestEvent]] = deque()
        self._is_woken = False

    def sink(self, receive: Receive) -> Callable[[RequestEvent], None]:
        """What an instance is given to tell a request's events to."""
        return lambda event: self._put(receive, event)

    def _put(self, receive: Receive, event: RequestEvent) -> None:
        # First the event, then the look: a delivery that has begun clears the mark before it takes anything.
        self._waiting.append((receive, event))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._waiting:
            receive, event = self._waiting.popleft()
            receive(event)
