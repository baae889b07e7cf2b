"""An OpenAI endpoint that does as it is told, on a port of its own, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

START_S_MAX = 60.0


@dataclass
class Script:
    """What becomes of requests; `odd` holds what becomes of single ones, by their number."""

    first_s: float = 0.0
    gap_s: float = 0.0
    odd: dict[int, str] = field(default_factory=dict)
    """`http 429` and the like, `cut` (in the middle), `error` (an event), `silent` (no [DONE])."""
    tth_s: float | None = None
    vocabulary: int = 1000
    """0: no token ids at all."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_at_once: int = 0
    num_at_once_max: int = 0
    num_together: int = 0
    """So many requests have to be under way at once before the first of them is answered."""
    num_sent: int = 0
    """Parts of answers."""


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """The URL of a server that runs until the block ends."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        runner = web.AppRunner(_app(script), access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        found.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        ready.set()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(START_S_MAX)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S_MAX)


def _app(script: Script) -> web.Application:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def timeline(request: web.Request) -> web.Response:
        if script.tth_s is None:
            raise web.HTTPNotFound
        source = {"role": "prefill", "jobs": [{"job": 0, "figures": {"compute_s": 9.0}}]}
        target = {"role": "decode", "jobs": [{"job": 0, "figures": {"tth_s": script.tth_s}}]}
        return web.json_response({"id": request.match_info["id"], "instances": [source, target]})

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body.get("prompt", "")
        if not isinstance(prompt, str) and (not script.vocabulary or max(prompt) >= script.vocabulary):
            return web.json_response({"error": {"message": "no such token"}}, status=400)
        number = len(script.bodies)
        script.bodies.append(body)
        script.keys.append(request.headers.get("Authorization", ""))
        script.num_at_once += 1
        script.num_at_once_max = max(script.num_at_once_max, script.num_at_once)
        try:
            return await _answer(script, request, body, script.odd.get(number, ""))
        finally:
            script.num_at_once -= 1

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/timelines/{id}", timeline)
    app.router.add_post("/v1/completions", answer)
    app.router.add_post("/v1/chat/completions", answer)
    return app


async def _answer(script: Script, request: web.Request, body: Any, odd: str) -> web.StreamResponse:
    if odd.startswith("http "):
        return web.json_response({"error": {"message": "no"}}, status=int(odd[5:]))
    is_chat = "messages" in body
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)

    async def event(value: Any) -> None:
        await response.write(f": baton {{}}\ndata: {json.dumps(value)}\n\n".encode())

    def chunk(text: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if is_chat else {"text": text}
        return {"id": f"cmpl-{len(script.bodies)}", "choices": [choice]}

    if is_chat:
        await event({"id": "chat", "choices": [{"delta": {"role": "assistant", "content": ""}}]})
    while script.num_at_once_max < script.num_together:
        await asyncio.sleep(0.005)
    await asyncio.sleep(script.first_s)
    num = body["max_tokens"]
    for number in range(num):
        if number:
            await asyncio.sleep(script.gap_s)
        if number == num // 2 and odd == "cut":
            assert request.transport is not None
            request.transport.close()
            return response
        if number == num // 2 and odd == "error":
            await event({"error": {"message": "a peer was lost", "code": "PEER_LOST"}})
        await event(chunk(" word"))
        script.num_sent += 1
    details = {"cached_tokens": 3}
    usage = {"prompt_tokens": 7, "completion_tokens": num, "prompt_tokens_details": details}
    await event({"id": "x", "choices": [], "usage": usage})
    if odd != "silent":
        await response.write(b"data: [DONE]\n\n")
    return response
