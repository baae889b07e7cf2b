"""Servers that speak vLLM's wire form and compute nothing, behind a router.

The next token is a function of all ids before it, wherever the prompt ends: a continuation is right only if
it was given the right ids. Decode answers a handed-over prompt only when prefill was given the same one under
the same transfer id.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from tests.serving.router_world import Streamed, read_stream, until, without_model

from baton.serving.http import Credentials
from baton.serving.router import Router, RouterConfig, RouterLimits
from baton.serving.vllm import parse_instance
from baton.session.registry import Role

MODEL = "tiny"
CONTEXT = 64


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def next_tokens(prompt: list[int], num_tokens: int) -> list[int]:
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(zlib.crc32(json.dumps(ids).encode()) % 1000)
    return ids[len(prompt) :]


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def expected(prompt: str, num_tokens: int) -> str:
    return text_of(next_tokens(ids_of(prompt), num_tokens))


@dataclass
class Fault:
    """What goes wrong with one request."""

    status: int = 0
    """The whole response."""
    is_late: bool = False
    """Only once prefill has the request too."""
    after: int = 0
    """Events that come before the end."""
    is_error: bool = False
    """The stream ends with vLLM's error event, else it is cut."""
    is_held: bool = False
    """Nothing comes until the client has gone, or the peer's gate opens."""
    is_silent: bool = False
    """The headers of a stream come, and nothing else before the gate opens; after as many events, if any."""


@dataclass
class Seen:
    body: dict[str, Any]
    headers: dict[str, str]
    path: str
    is_gone: bool = False
    """Whether the client left before the end."""


class VllmPeer:
    """One server."""

    def __init__(self, transfers: dict[str, tuple[str, list[int]]], source: str = "", key: str = "") -> None:
        self.source = source
        self.key = key
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.gate = asyncio.Event()
        self.health = 200
        self.hides_ids = False
        """As vLLM does for a client that does not want to see reasoning."""
        self._transfers = transfers
        """By id: where prefill sends from, and the prompt."""
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._ask),
                web.post("/v1/chat/completions", self._ask),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        self._check_key(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "max_model_len": CONTEXT}]})

    def _check_key(self, request: web.Request) -> None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": "Unauthorized"}))

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        body = await request.json()
        seen = Seen(body, dict(request.headers), request.path)
        self.seen.append(seen)
        try:
            return await self._answer(request, body)
        except (asyncio.CancelledError, ConnectionError):
            seen.is_gone = True
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        is_chat, is_stream = request.path.endswith("chat/completions"), bool(body.get("stream"))
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and fault.is_held:
            await self.gate.wait()
            fault = None
        if fault is not None and fault.status:
            if fault.is_late:
                await until(lambda: body["kv_transfer_params"]["transfer_id"] in self._transfers)
            return _error(fault.status)
        if body.get("stream_options") and not is_stream:
            return _error(400)
        prompts = [body["messages"][-1]["content"]] if is_chat else body["prompt"]
        if isinstance(prompts, str) or (isinstance(prompts, list) and isinstance(prompts[0], int)):
            prompts = [prompts]
        ids = [ids_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            self._transfers[params["transfer_id"]] = self.source, ids[0]
        if params.get("do_remote_prefill"):
            await until(lambda: params["transfer_id"] in self._transfers)
            if self._transfers.pop(params["transfer_id"]) != (params["source"], ids[0]):
                return _error(500)
        most = body.get("max_completion_tokens") or body.get("max_tokens")
        num_max = most or (CONTEXT - len(ids[0]) if is_chat else 16)
        if body.get("min_tokens", 0) > num_max:
            return _error(400)
        choices = [(prompt, next_tokens(prompt, num_max)) for prompt in ids for _ in range(body.get("n", 1))]
        maker = _Maker(body, is_chat, hides_ids=self.hides_ids)
        usage = _usage(len(ids[0]), sum(len(tokens) for _, tokens in choices))
        if not is_stream:
            return web.json_response(maker.whole([tokens for _, tokens in choices], usage))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        events = list(maker.events(choices, usage))
        for place, event in enumerate(events[: fault.after if fault and not fault.is_silent else None]):
            if fault is not None and fault.is_silent and place == fault.after:
                await self.gate.wait()
            await response.write(b"data: %s\n\n" % event)
            await asyncio.sleep(0)
        if fault is not None and not fault.is_error and not fault.is_silent:
            assert request.transport is not None
            request.transport.close()
            return response
        if fault is not None and fault.is_error:
            failed = {"message": "Internal server error", "type": "x", "param": None, "code": 500}
            await response.write(b"data: %s\n\n" % json.dumps({"error": failed}).encode())
        await response.write(b"data: [DONE]\n\n")
        return response


def _error(status: int) -> web.Response:
    error = {"message": "it failed", "type": "InternalServerError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def _usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
    }


@dataclass
class _Maker:
    """Responses in vLLM's form."""

    body: dict[str, Any]
    is_chat: bool
    hides_ids: bool
    head: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        kind, name = ("chat.completion", "chatcmpl") if self.is_chat else ("text_completion", "cmpl")
        kind += ".chunk" if self.is_chat and self.body.get("stream") else ""
        identity = f"{name}-{self.body.get('request_id', 'none')}"
        self.head = {"id": identity, "object": kind, "created": 1 + len(self.body), "model": MODEL}

    def whole(self, answers: list[list[int]], usage: dict[str, int]) -> dict[str, Any]:
        choices = [
            {"index": index, "text": text_of(tokens), "finish_reason": "length"}
            for index, tokens in enumerate(answers)
        ]
        return self.head | {"choices": choices, "usage": usage, "kv_transfer_params": None}

    def events(self, answers: list[tuple[list[int], list[int]]], usage: dict[str, int]) -> Any:
        has_ids = self.body.get("return_token_ids") and not self.hides_ids
        for index, (prompt, tokens) in enumerate(answers):
            shown = {"prompt_token_ids": prompt if has_ids else None}
            if self.is_chat:
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
                yield self._event([choice], **shown)
            for place, token in enumerate(tokens):
                text = text_of([token])
                choice = {"index": index, "finish_reason": "length" if place + 1 == len(tokens) else None}
                choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
                choice |= {"token_ids": [token] if has_ids else None}
                choice |= shown if place == 0 and not self.is_chat else {}
                yield self._event([choice])
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield self._event([], usage=usage)

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return json.dumps(self.head | {"choices": choices} | more).encode()


class VllmWorld:
    """A router before such servers, and a client's session."""

    def __init__(self, router: Router, prefills: list[VllmPeer], decodes: list[VllmPeer]) -> None:
        self.router, self.prefills, self.decodes = router, prefills, decodes
        self.session = aiohttp.ClientSession()

    async def post(self, body: dict[str, Any], path: str = "/v1/completions") -> tuple[int, Any]:
        async with self.session.post(self.router.url + path, json={"model": MODEL, **body}) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> Streamed:
        body = {"model": MODEL, "stream": True, **body}
        async with self.session.post(self.router.url + path, json=body) as response:
            assert response.status == 200, await response.read()
            return read_stream(await response.read())

    async def metric(self, line: str) -> float:
        async with self.session.get(f"{self.router.url}/metrics") as response:
            lines = [without_model(each) for each in (await response.text()).splitlines()]
        return sum(float(each.split()[-1]) for each in lines if each.startswith(line))


@asynccontextmanager
async def vllm_world(
    num_prefill: int = 1, num_decode: int = 1, *, dp: int = 1, key: str = "", **more: Any
) -> AsyncIterator[VllmWorld]:
    transfers: dict[str, tuple[str, list[int]]] = {}
    prefills = [VllmPeer(transfers, f"10.9.9.9:{7000 + place}", key) for place in range(num_prefill)]
    decodes = [VllmPeer(transfers, key=key) for _ in range(num_decode)]
    for peer in (*prefills, *decodes):
        await peer.start()
    texts = [(Role.PREFILL, f"{peer.url},source={peer.source},dp={dp}") for peer in prefills]
    texts += [(Role.DECODE, peer.url) for peer in decodes]
    rosters = tuple(roster for role, text in texts for roster in parse_instance(role, text))
    config = RouterConfig(
        None,
        "vllm",
        rosters,
        **{
            "instance_key": key,
            "poll_s": 0.1,
            "limits": RouterLimits(),
            "decode_policy": "round_robin",
            **more,
        },
    )
    router = Router(config, None, Credentials())
    await router.start("127.0.0.1", 0)
    world = VllmWorld(router, prefills, decodes)
    try:
        await until(lambda: all(instance.is_able for instance in router.fleet.instances.values()))
        yield world
    finally:
        await world.session.close()
        await router.close()
        for peer in (*prefills, *decodes):
            await peer.stop()
