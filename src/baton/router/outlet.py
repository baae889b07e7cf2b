"""Writing to a client that may not read."""

from __future__ import annotations

import asyncio

from aiohttp import web

WRITE_S_MAX = 25.0
"""Below what an instance grants the router: who stands in the way is the client, and it is dropped first."""
_FREE_BYTES = 32 << 10
"""A connection that holds less than this takes more without waiting."""


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Writes, and waits where the client is slow; one that does not read at all is dropped."""
    transport = request.transport
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
