"""Those who watch a registry: each has a short queue, and who lets it fill up is dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from aiohttp import web

from baton.session.registry.events import BEAT
from baton.session.registry.messages import Refusal, RegistryError

NUM_WATCHERS_MAX = 1024


class Watcher:
    """One open watch: events wait here until its connection takes them."""

    def __init__(self, num_waiting_max: int) -> None:
        self._waiting: deque[bytes] = deque()
        self._num_waiting_max = num_waiting_max
        self._woken = asyncio.Event()
        self.is_over = False

    def put(self, event: bytes) -> bool:
        """Queues an event; false where the reader is too slow for it."""
        if len(self._waiting) >= self._num_waiting_max:
            return False
        self._waiting.append(event)
        self._woken.set()
        return True

    def end(self) -> None:
        """Nothing more is coming."""
        self.is_over = True
        self._woken.set()

    async def take(self, beat_s: float) -> bytes:
        """All that is waiting, or after a while a sign of life."""
        try:
            async with asyncio.timeout(beat_s):
                await self._woken.wait()
        except TimeoutError:
            return BEAT
        self._woken.clear()
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class Watchers:
    """All open watches of a registry."""

    def __init__(self, num_waiting_max: int, beat_s: float) -> None:
        self._num_waiting_max = num_waiting_max
        self._beat_s = beat_s
        self._open: dict[Watcher, web.Request] = {}

    def __len__(self) -> int:
        return len(self._open)

    def publish(self, events: Iterable[bytes]) -> None:
        """Queues events for everybody."""
        for event in events:
            slow = [watcher for watcher in self._open if not watcher.put(event)]
            for watcher in slow:
                self._drop(watcher)

    def end(self) -> None:
        """Ends all watches."""
        for watcher in self._open:
            watcher.end()

    async def serve(self, request: web.Request, response: web.StreamResponse, first: bytes) -> None:
        """Writes the first event, then all that are published after this call, while somebody reads them."""
        if len(self._open) >= NUM_WATCHERS_MAX:
            raise RegistryError(
                Refusal.FULL, f"{NUM_WATCHERS_MAX} watches are open, the most there can be; close one"
            )
        watcher = Watcher(self._num_waiting_max)
        watcher.put(first)
        self._open[watcher] = request
        try:
            await response.prepare(request)
            while not watcher.is_over:
                await response.write(await watcher.take(self._beat_s))
        except ConnectionError:
            pass  # the reader left, or was dropped
        finally:
            self._open.pop(watcher, None)

    def _drop(self, watcher: Watcher) -> None:
        request = self._open.pop(watcher)
        watcher.end()
        if request.transport is not None:
            request.transport.abort()
