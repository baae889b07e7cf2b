"""A router before peers, a registry between them, all in one loop; and a client that checks what it reads."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import aiohttp
import pytest
from tests.serving.peers import Peer, Rooms
from tests.session.registry_world import SECRET, registry

from baton.serving import fleet
from baton.serving import router as routing
from baton.serving.fleet import FleetInstance
from baton.serving.http import Credentials
from baton.serving.router import LocalMode, Router, RouterConfig, RouterLimits
from baton.session.registry import RegistryClient, RegistryServer, Role

LIMIT_S = 300.0


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's coroutine with a limit, so that what hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body()

    asyncio.run(limited())


def without_model(line: str) -> str:
    """A line of /metrics without the label `model_name`."""
    return re.sub(r'(?<=[{,])model_name="[^"]*",?', "", line).replace(",}", "}").replace("{}", "")


class Clock:
    """The router's clock: a test that waits for a deadline of minutes puts it forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead_s = 0.0
        for module in (routing, fleet):
            monkeypatch.setattr(module, "monotonic", lambda: monotonic() + self._ahead_s)

    def advance(self, duration_s: float) -> None:
        self._ahead_s += duration_s


async def until(holds: Callable[[], Any]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


@dataclass
class Streamed:
    """What a client made of a stream."""

    texts: dict[int, str] = field(default_factory=dict)
    roles: Counter[int] = field(default_factory=Counter)
    ids: set[str] = field(default_factory=set)
    finishes: dict[int, str] = field(default_factory=dict)
    usage: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0
    raw: bytes = b""


def read_stream(raw: bytes) -> Streamed:
    found = Streamed(raw=raw)
    assert b": baton" not in raw, "a note reached the client"
    assert raw.endswith(b"\n\n"), "the last event is not whole"
    for block in raw.decode().split("\n\n")[:-1]:
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        assert found.num_done == 0, "something came after the end"
        if data == "[DONE]":
            found.num_done += 1
            continue
        _take(found, json.loads(data))
    return found


def _take(found: Streamed, event: dict[str, Any]) -> None:
    if "error" in event:
        found.errors.append(event["error"])
        return
    found.ids.add(event["id"])
    if event.get("usage"):
        found.usage.append(event["usage"])
    for choice in event["choices"]:
        index = choice["index"]
        assert index not in found.finishes, "a choice went on after its end"
        delta = choice.get("delta", {})
        found.roles[index] += "role" in delta
        found.texts[index] = found.texts.get(index, "") + choice.get("text", delta.get("content", ""))
        if choice.get("finish_reason"):
            found.finishes[index] = choice["finish_reason"]


class World:
    """The parts, and a client's session."""

    def __init__(self, router: Router, server: RegistryServer) -> None:
        self.router, self.registry = router, server
        self._clients: dict[str, RegistryClient] = {}
        self.peers: dict[str, Peer] = {}
        self.rooms = Rooms()
        self.session = aiohttp.ClientSession()

    def __getattr__(self, name: str) -> Peer:
        try:
            return self.__dict__["peers"][name]
        except KeyError:
            raise AttributeError(name) from None

    async def join(self, name: str, role: Role, model: str = "tiny", **more: Any) -> Peer:
        peer = Peer(name, role, self.rooms, model)
        await peer.start()
        self.peers[name] = peer
        client = RegistryClient(self.registry.url, SECRET)
        self._clients[name] = client
        await client.register(peer.member(**more)).wait()
        await until(lambda: self.is_able(name))
        return peer

    async def leave(self, name: str) -> None:
        """It says goodbye to the registry, and goes on serving what it has."""
        await self._clients.pop(name).close()

    @property
    def instances(self) -> list[FleetInstance]:
        return list(self.router.fleet.instances.values())

    def is_able(self, name: str) -> bool:
        instance = self.router.fleet.instances.get(name)
        return instance is not None and instance.is_able

    async def post(self, body: Any, path: str = "/v1/completions", **more: Any) -> tuple[int, bytes, Any]:
        data = body if isinstance(body, bytes) else json.dumps({"model": "tiny", **body}).encode()
        async with self.session.post(self.router.url + path, data=data, **more) as response:
            return response.status, await response.read(), response.headers

    async def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> Streamed:
        status, raw, headers = await self.post({"stream": True, **body}, path)
        assert status == 200, raw
        assert headers["Content-Type"].startswith("text/event-stream")
        return read_stream(raw)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.router.url + path) as response:
            raw = await response.read()
            is_json = "json" in response.headers["Content-Type"]
            return response.status, json.loads(raw) if is_json else raw.decode()

    async def metric(self, line: str) -> float:
        """The sum of the samples that begin so, but for the label `model_name`; 0 where there are none."""
        _, text = await self.get("/metrics")
        lines = [without_model(each) for each in text.splitlines()]
        return sum(float(each.split()[-1]) for each in lines if each.startswith(line))

    async def close(self) -> None:
        await self.session.close()
        await self.router.close()
        for client in self._clients.values():
            await client.close()
        for peer in self.peers.values():
            await peer.stop()


@asynccontextmanager
async def world(
    num_prefill: int = 1,
    num_decode: int = 1,
    limits: RouterLimits | None = None,
    *,
    registry_port: int = 0,
    **more: Any,
) -> AsyncIterator[World]:
    """A world of peers p0, p1, ..., d0, d1, ...; without local prefills unless it is asked for."""
    async with registry(port=registry_port) as server:
        config = RouterConfig(server.url, poll_s=0.1, local=LocalMode.NEVER, limits=limits or RouterLimits())
        config = replace(config, **{"prefill_policy": "round_robin", "decode_policy": "round_robin", **more})
        router = Router(config, SECRET, Credentials((), SECRET))
        await router.start("127.0.0.1", 0)
        found = World(router, server)
        try:
            for index in range(num_prefill):
                await found.join(f"p{index}", Role.PREFILL)
            for index in range(num_decode):
                await found.join(f"d{index}", Role.DECODE)
            yield found
        finally:
            await found.close()
