"""Watches: server-sent events, as the registry queues them and as a client reads them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator

import msgspec
from aiohttp import web

from baton.session.registry.messages import Change, Refusal, RegistryError, Topology

BEAT = b": beat\n\n"
EVENT_BYTES_MAX = 16 << 20
NUM_WATCHERS_MAX = 1024

_TYPES: dict[str, type[Topology | Change]] = {"topology": Topology, "change": Change}


def encode(event: Topology | Change) -> bytes:
    """One event; JSON has no line feeds of its own, so the data is one line."""
    name = "topology" if isinstance(event, Topology) else "change"
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (
        event.id.encode(),
        name.encode(),
        msgspec.json.encode(event),
    )


class EventReader:
    """Events from bytes as they come; comments, and events of names not known here, are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Topology | Change]:
        """The events that these bytes complete."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise RegistryError(
                Refusal.UNREACHABLE, f"an event is longer than {EVENT_BYTES_MAX} bytes; is this a registry?"
            )
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
            kind = _TYPES.get(fields.get(b"event", b"").decode("utf-8", "replace"))
            if kind is not None:
                yield _decode(kind, fields.get(b"data", b""))


def _decode(kind: type[Topology | Change], data: bytes) -> Topology | Change:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(
            Refusal.UNREACHABLE, f"an event cannot be read ({error}); is this a registry?"
        ) from None


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
        """Writes the first event, then all that are published after this call, until the reader leaves."""
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
