"""Writing to a client that may not read."""

from __future__ import annotations

import asyncio

from aiohttp import web

from baton.web.plain import LAST_CHUNK, Reply, chunk, stream_head, whole

WRITE_S_MAX = 25.0
"""Below what an instance grants the router: who stands in the way is the client, and it is dropped first."""
ID_HEADER = "X-Request-Id"
EVENTS = "text/event-stream; charset=utf-8"
_FREE_BYTES = 32 << 10
"""A connection that holds less than this takes more without waiting."""


class PlainOutlet:
    """Answers on a connection of its own, one at a time; each write is one packet where it fits in one."""

    __slots__ = ("_drained", "_is_paused", "_transport", "has_begun")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.has_begun = False
        self._transport = transport
        self._is_paused = False
        self._drained: asyncio.Future[None] | None = None

    async def send(self, reply: Reply) -> None:
        """All of an answer."""
        data = whole(reply)
        self.has_begun = True
        self._put(data)
        if self._is_paused:
            await self._drain()

    async def write(self, data: bytes, identity: str, *, is_last: bool = False) -> None:
        """More of a stream."""
        data = chunk(data) if data else b""
        if not self.has_begun:
            self.has_begun = True
            data = stream_head(EVENTS, ((ID_HEADER, identity),)) + data
        self._put(data + LAST_CHUNK if is_last else data)
        if self._is_paused:
            await self._drain()

    def reset(self) -> None:
        """For the next answer."""
        self.has_begun = False

    def pause(self) -> None:
        """The client does not read."""
        self._is_paused = True

    def resume(self) -> None:
        """It does again."""
        self._is_paused = False
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def lost(self) -> None:
        """The connection is no more."""
        self.resume()

    def _put(self, data: bytes) -> None:
        if self._transport.is_closing():
            raise ConnectionResetError("the client has left")
        self._transport.write(data)

    async def _drain(self) -> None:
        self._drained = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                await self._drained
        except TimeoutError:
            self._transport.abort()
            raise ConnectionResetError(f"a client did not read for {WRITE_S_MAX:g} s") from None
        finally:
            self._drained = None


class WebOutlet:
    """Answers a request of aiohttp's; `response` is what its handler returns."""

    def __init__(self, request: web.Request) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self.response is not None

    async def send(self, reply: Reply) -> None:
        """All of an answer."""
        headers = {"Cache-Control": "no-store", "Server": "baton", "Content-Type": reply.content_type}
        self.response = web.Response(
            body=reply.body, status=reply.status, headers={**headers, **dict(reply.headers)}
        )

    async def write(self, data: bytes, identity: str, *, is_last: bool = False) -> None:
        """More of a stream."""
        if self.response is None:
            headers = {"Cache-Control": "no-store", "Server": "baton", "Content-Type": EVENTS}
            self.response = web.StreamResponse(headers={**headers, ID_HEADER: identity})
            await self.response.prepare(self._request)
        if data:
            await self._write(self.response, data)
        if is_last:
            await self.response.write_eof()

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(data) < _FREE_BYTES:
            await response.write(data)
            return
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                await response.write(data)
        except TimeoutError:
            if transport is not None:
                transport.abort()
            raise ConnectionResetError(f"a client did not read for {WRITE_S_MAX:g} s") from None
