"""A small site behind the real edge, on a free port of loopback, and raw connections to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import ClientSession, web

from baton.errors import LAST_WORDS, EngineError
from baton.serving.http import CALLER, ApiError, Credentials, HttpLimits, HttpServer, failure

API_KEY = "sk-a-key-of-a-client"
SECRET = b"a secret of all the instances"


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def _caller(request: web.Request) -> web.Response:
    caller = request[CALLER]
    return web.json_response({"is_router": caller.is_router, "is_loopback": caller.is_loopback})


async def _fail(request: web.Request) -> web.Response:
    match request.match_info["how"]:
        case "bug":
            raise RuntimeError("a bug with sk-a-key-of-a-client in it")
        case "engine":
            raise EngineError(f"a rank ended{LAST_WORDS}OSError: /srv/private")
        case "lost":
            raise failure("PEER_LOST", "prefill-0 has ended")
        case "loading":
            raise failure("LOADING", "it is not ready; ask again soon")
        case _:
            raise ApiError(429, "full; ask again", code="QUEUE_FULL", retry_after_s=3)


@asynccontextmanager
async def site(limits: HttpLimits | None = None, *, has_key: bool = True) -> AsyncIterator[HttpServer]:
    """The site while it runs."""
    server = HttpServer(Credentials([API_KEY] if has_key else [], SECRET), limits)
    server.app.add_routes(
        [
            web.post("/echo", _echo),
            web.get("/caller", _caller),
            web.get("/fail/{how}", _fail),
            web.get("/health", _caller),
        ]
    )
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def client(found: HttpServer, key: str | None = API_KEY) -> AsyncIterator[ClientSession]:
    """A client of it, by default with a good key."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with ClientSession(found.url, headers=headers) as session:
        yield session


async def raw(found: HttpServer, data: bytes, timeout_s: float = 60.0) -> bytes:
    """What comes back for bytes, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", found.port)
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    finally:
        writer.close()
