"""One connection of a client: who reads the request that comes next, and how long it may take to come.

Plain requests (baton.web.plain) are answered here; everything else, and every connection of a site that has
no lane, goes to aiohttp's protocol, byte for byte. A connection comes back from there only where no byte can
be left behind: after a GET that came alone, in one piece.

Times are looked at by the site, for all its connections at once: a timer for each request would cost more
than most requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import cast

from aiohttp import web

from baton.web.lane import Lane
from baton.web.plain import HEAD_BYTES_MAX, HEAD_END, Head, Reply, is_likely, read_head, whole
from baton.web.problems import Problem
from baton.web.writing import PlainOutlet

LATER_BYTES_MAX = 64 << 10
"""What a client may send ahead while a request of its is answered."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a client may take."""

    head_s_max: float = 10.0
    """From the first byte of a request to the end of its headers."""
    idle_s_max: float = 75.0
    """Between requests."""


@dataclass(slots=True)
class House:
    """What the connections of a site share."""

    make: Callable[[], web.RequestHandler]
    lane: Lane | None
    patience: Patience
    entries: set[Entry] = field(default_factory=set)
    is_closing: bool = False


class Entry(asyncio.Protocol):
    """One connection; requests on it are answered one after the other."""

    def __init__(self, house: House) -> None:
        self.task: asyncio.Task[None] | None = None
        """Answers a plain request."""
        self._house = house
        self._transport: asyncio.Transport
        self._outlet: PlainOutlet
        self._since_s = monotonic()
        """Of the request that has begun to come, or of the silence."""
        self._rest = b""
        self._coming: _Coming | None = None
        self._behind: _Behind | None = None

    @property
    def is_plain(self) -> bool:
        """Whether aiohttp has no part in it."""
        return self._behind is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outlet = PlainOutlet(self._transport)
        self._house.entries.add(self)
        if self._house.lane is None:
            self._behind = _Behind(self._house.make(), self._transport)

    def data_received(self, data: bytes) -> None:
        if self.task is not None:
            self._keep(data)
        elif self._coming is not None:
            self._grow(self._coming, data)
        elif self._behind is not None and not self._behind.can_return:
            self._since_s = monotonic()
            self._behind.feed(data)
        else:
            self._take(self._rest + data if self._rest else data)

    def connection_lost(self, error: Exception | None) -> None:
        self._house.entries.discard(self)
        self._outlet.lost()
        if self.task is not None:
            self.task.cancel()  # a client that leaves is noticed at once
        if self._behind is not None:
            self._behind.inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self.task is None and self._behind is not None:
            self._behind.pause_writing()
        else:
            self._outlet.pause()

    def resume_writing(self) -> None:
        if self._behind is not None and self._behind.is_paused:
            self._behind.resume_writing()
        else:
            self._outlet.resume()

    def close(self) -> None:
        """Ends it, but what was written is still sent."""
        self._transport.close()

    def abort(self) -> None:
        """Ends it at once."""
        self._transport.abort()

    def look(self, now_s: float) -> None:
        """Ends it if its client has taken too long."""
        patience, waited_s = self._house.patience, now_s - self._since_s
        behind = self._behind
        if self.task is not None:
            return
        if self._transport.is_closing():
            if waited_s > patience.idle_s_max:
                self._transport.abort()  # its client does not read the last words
        elif self._coming is not None:
            assert self._house.lane is not None
            if waited_s > self._house.lane.config.body_s_max:
                self._refuse(self._house.lane.config.too_slow())
        elif self._rest or (behind is not None and behind.half_s):
            began_s = behind.half_s if behind is not None and behind.half_s else self._since_s
            if now_s - began_s > patience.head_s_max:
                text = f"the headers did not come within {patience.head_s_max:g} s; send them at once"
                self._refuse(Problem(408, text, code="too_slow"))
        elif behind is not None and not behind.is_parked:
            self._since_s = now_s  # it is being answered
        elif waited_s > patience.idle_s_max:
            self._transport.close()

    def _take(self, data: bytes) -> None:
        """What begins a request, or goes on with its head."""
        lane = self._house.lane
        if not self._rest:
            self._since_s = monotonic()
        self._rest = b""
        if lane is not None and HEAD_END not in data:
            if len(data) < HEAD_BYTES_MAX and is_likely(data, lane.paths):
                self._rest = data
                return
        elif lane is not None:
            head = read_head(data)
            if head is not None and lane.admits(head):
                self._begin(head, data)
                return
        if self._behind is None:
            self._behind = _Behind(self._house.make(), self._transport)
        self._behind.feed(data)

    def _begin(self, head: Head, data: bytes) -> None:
        stop = head.num_bytes + head.num_body_bytes
        if len(data) < stop:
            self._coming = _Coming(head, bytearray(data[head.num_bytes :]))
            return
        self._rest = data[stop:]
        self.task = asyncio.get_running_loop().create_task(self._answer(head, data[head.num_bytes : stop]))

    def _grow(self, coming: _Coming, data: bytes) -> None:
        coming.body += data
        size = coming.head.num_body_bytes
        if len(coming.body) >= size:
            self._coming = None
            body, self._rest = bytes(coming.body[:size]), bytes(coming.body[size:])
            self.task = asyncio.get_running_loop().create_task(self._answer(coming.head, body))

    def _keep(self, data: bytes) -> None:
        """Something that comes while a request is answered."""
        self._rest += data
        if len(self._rest) > LATER_BYTES_MAX and self._transport.is_reading():
            self._transport.pause_reading()

    async def _answer(self, head: Head, body: bytes) -> None:
        lane = self._house.lane
        assert lane is not None
        try:
            await lane.answer(head.path, body, self._outlet)
        except ConnectionError:
            self._transport.abort()
        finally:
            self.task = None
            self._since_s = monotonic()
        self._next()

    def _next(self) -> None:
        self._outlet.reset()
        if self._house.is_closing:
            self._transport.close()
        if self._transport.is_closing():
            return
        if not self._transport.is_reading():
            self._transport.resume_reading()
        if self._rest:
            data, self._rest = self._rest, b""
            self.data_received(data)

    def _refuse(self, problem: Problem) -> None:
        reply = problem.reply()
        closing = Reply(reply.status, reply.body, headers=(*reply.headers, ("Connection", "close")))
        self._transport.write(whole(closing))
        self._transport.close()


@dataclass(slots=True)
class _Coming:
    """A plain request whose body is not all there."""

    head: Head
    body: bytearray


class _Behind:
    """aiohttp's protocol on the same connection, and what can be known of where it is."""

    def __init__(self, inner: web.RequestHandler, transport: asyncio.Transport) -> None:
        self.inner = inner
        self.half_s = 0.0
        """Since when it has a part of a request's head, and nothing else to do."""
        self.is_paused = False
        self._is_fresh = True
        self._is_clean = True
        inner.connection_made(transport)

    @property
    def is_parked(self) -> bool:
        """Whether it waits for a request, of which it has at most a part of the head."""
        waiter = self.inner._waiter
        return waiter is not None and not waiter.done()

    @property
    def can_return(self) -> bool:
        """Whether what comes next begins a request for certain."""
        return self._is_clean and self.is_parked

    def feed(self, data: bytes) -> None:
        """Bytes for it."""
        could_begin = self._is_fresh or self.is_parked
        is_alone = data.startswith(b"GET ") and data.find(HEAD_END) == len(data) - len(HEAD_END)
        self._is_clean = self._is_clean and could_begin and is_alone
        self.inner.data_received(data)
        is_half = could_begin and not self.inner._messages and (self._is_fresh or self.is_parked)
        self._is_fresh = self._is_fresh and is_half
        self.half_s = (self.half_s or monotonic()) if is_half else 0.0

    def pause_writing(self) -> None:
        """The client does not read what it wrote."""
        self.is_paused = True
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """It does again."""
        self.is_paused = False
        self.inner.resume_writing()
