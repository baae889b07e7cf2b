"""The router: its HTTP surface, and everything behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from baton.errors import BatonError
from baton.router.asked import CHAT_PATH, read_asked
from baton.router.choosing import Choosing
from baton.router.config import RouterConfig
from baton.router.conversation import Conversation
from baton.router.fleet import Fleet
from baton.router.instances import Instance
from baton.router.metrics import CONTENT_TYPE, Metrics
from baton.router.parts import Parts, Served
from baton.router.timelines import Tried, perfetto, story
from baton.router.waiting import Waiting
from baton.router.watching import Watching
from baton.router.wire.leg import Lost
from baton.router.wire.pool import Call, Pool
from baton.session.registry import RegistryClient, Role
from baton.web import (
    Credentials,
    Edge,
    EdgeConfig,
    Lane,
    Outlet,
    Problem,
    Site,
    WebOutlet,
    caller_of,
    failure,
    router_key,
)

ASK_S_MAX = 5.0
_log = logging.getLogger("baton.router")
BODY_BYTES_MAX = 15 << 20
"""A mebibyte below what instances take: rooms, and the tokens of a stream that goes on, are added to it."""
_PATHS = ("/v1/completions", CHAT_PATH)


class Router:
    """A router that listens: `await start(...)`, `url`, `await close()`."""

    def __init__(self, config: RouterConfig, secret: bytes, credentials: Credentials) -> None:
        fleet = Fleet()
        pool = Pool(router_key(secret), config.limits.connect_s_max)
        choosing = Choosing(fleet, config)
        waiting = Waiting(choosing, config.limits)
        self.parts = Parts(config, pool, fleet, choosing, waiting, Metrics(fleet), Served())
        self._watching = Watching(fleet, pool, config)
        self._client = RegistryClient(config.registry, secret)
        edge = Edge(credentials, EdgeConfig(BODY_BYTES_MAX, on_answer=self._count))
        lane = Lane(edge, dict.fromkeys(_PATHS, self._converse))
        self._site = Site(self._application(edge), lane=lane)
        self._watching.on_failure = self._failed
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_draining = False
        self._num_open = 0
        self._emptied = asyncio.Event()
        self._emptied.set()
        fleet.on_join = self._watching.join
        fleet.on_leave = self._left
        fleet.on_anew = lambda instance: choosing.prefixes.drop(instance.name)
        fleet.on_change = waiting.wake

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self._site.url

    async def wait(self) -> None:
        """Until it fails, which raises BatonError."""
        await asyncio.shield(self._failure)

    async def start(self, host: str, port: int) -> None:
        """Listens, and looks for instances from now on."""
        await self._site.start(host, port)
        self._watching.start(self._client)

    async def drain(self, wait_s: float) -> None:
        """Takes no new requests, and returns once those under way are answered or the time is over."""
        self._is_draining = True
        try:
            async with asyncio.timeout(wait_s):
                await self._emptied.wait()
        except TimeoutError:
            _log.warning("%d requests were left after %g s", self._num_open, wait_s)

    async def close(self) -> None:
        """Ends every request and every connection."""
        await self._site.close()
        await self._watching.close()
        await self._client.close()
        self.parts.pool.close()

    def _failed(self, error: BaseException) -> None:
        if not self._failure.done():
            text = f"the router no longer sees its instances: {error!r}; see the log, and start it again"
            self._failure.set_exception(BatonError(text))

    def _left(self, instance: Instance) -> None:
        self.parts.choosing.prefixes.drop(instance.name)
        self._watching.leave(instance)

    def _application(self, edge: Edge) -> web.Application:
        app = edge.application()
        for path in _PATHS:
            app.router.add_post(path, self._post)
        gets: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            "/health": self._health,
            "/v1/models": self._models,
            "/v1/models/{id:.+}": self._model,
            "/metrics": self._metrics,
            "/server_info": self._server_info,
            "/v1/timelines/{id}": self._timeline,
            "/openapi.json": self._openapi,
        }
        for path, answer in gets.items():
            app.router.add_get(path, answer)
        app.router.add_post("/drain", self._drain)
        return app

    def _count(self, path: str, status: int) -> None:
        self.parts.metrics.answered(path, status)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        outlet = WebOutlet(request)
        await self._converse(request.path, await request.read(), outlet)
        assert outlet.response is not None
        return outlet.response

    async def _converse(self, path: str, body: bytes, outlet: Outlet) -> int:
        if self._is_draining:
            raise failure("DRAINING", "this router drains; ask another one, or try again")
        asked = read_asked(path, body)
        if not self._num_open:
            self._emptied.clear()
        self._num_open += 1
        try:
            return await Conversation(self.parts, outlet, asked).answer()
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._emptied.set()

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            raise failure("DRAINING", "this router drains")
        missing = self.parts.fleet.missing()
        if missing:
            raise failure("NO_INSTANCE", missing)
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.parts.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": list((await self._cards()).values())})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        cards, name = await self._cards(), request.match_info["id"]
        for card in cards.values():
            if name in (card["id"], card["id"].lstrip("/")):
                return _json(card)
        text = f"model {name[:80]!a} is not served here; use one of {', '.join(cards)}"
        raise Problem(404, text, param="model", code="model_not_found")

    async def _cards(self) -> dict[str, Any]:
        """What one instance of each model says of it."""
        chosen = {each.model: each for each in self.parts.fleet.able(*Role)}
        answers = await asyncio.gather(*(self._ask(each, "/v1/models") for each in chosen.values()))
        found: dict[str, Any] = {}
        for status, body in answers:
            for model in msgspec.json.decode(body)["data"] if status == 200 else ():
                found.setdefault(model["id"], model)
        return found

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        parts, config = self.parts, self.parts.config
        return _json(
            {
                "role": "router",
                "registry": config.registry,
                "policies": {"prefill": config.prefill_policy, "decode": config.decode_policy},
                "local": config.local.value,
                "is_ready": not parts.fleet.missing(),
                "num_waiting": parts.waiting.num_waiting,
                "bytes_per_token": round(parts.choosing.sizes.bytes_per_token, 2),
                "instances": [_shown(each) for each in parts.fleet.instances.values()],
            }
        )

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        identity = request.match_info["id"]
        attempts = self.parts.served.attempts(identity)
        form = request.query.get("format", "")
        if form not in ("", "perfetto"):
            raise Problem(400, f"format is {form!a}; use perfetto, or leave it out", param="format")
        if not attempts:
            text = f"no request {identity!a} is remembered; timelines are kept for recent requests"
            raise Problem(404, text, param="id", code="unknown_timeline")
        path = f"/v1/timelines/{quote(identity, safe='')}"
        found = [await self._stories(name, path, form) for name in _names(attempts)]
        told = [one for each in found for one in each[:1]]
        traces = [one for each in found for one in each[1:]]
        return _json(perfetto(attempts, told, traces) if form else story(identity, attempts, told))

    async def _stories(self, name: str, path: str, form: str) -> list[Any]:
        """What an instance remembers, then its trace if one is wanted; nothing where it does not."""
        instance = self.parts.fleet.instances.get(name)
        if instance is None:
            return []
        paths = [path, f"{path}?format={form}"] if form else [path]
        answers = [await self._ask(instance, each) for each in paths]
        is_known = all(status == 200 for status, _ in answers)
        return [msgspec.json.decode(body) for _, body in answers] if is_known else []

    async def _openapi(self, request: web.Request) -> web.StreamResponse:
        for instance in self.parts.fleet.able(*Role):
            status, body = await self._ask(instance, "/openapi.json")
            if status == 200:
                return web.Response(body=body, headers={"Content-Type": "application/json"})
        raise failure("NO_INSTANCE", self.parts.fleet.missing() or "no instance has a description")

    async def _drain(self, request: web.Request) -> web.StreamResponse:
        if not caller_of(request).is_trusted:
            text = "draining needs the router's key, or a caller on this machine"
            raise Problem(403, text, code="drain_not_allowed")
        name = request.query.get("instance", "")
        instance = self.parts.fleet.instances.get(name)
        if instance is None:
            listed = ", ".join(sorted(self.parts.fleet.instances)) or "none"
            raise Problem(404, f"instance {name!a} is not known; there are: {listed}", param="instance")
        status, body = await self._ask(instance, "/drain", b"{}")
        instance.wake()
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})

    async def _ask(self, instance: Instance, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        try:
            return await self.parts.pool.fetch(instance.origin, Call(path, body), ASK_S_MAX)
        except Lost as lost:
            instance.wake()
            return 502, failure("PEER_LOST", f"instance {instance.name}: {lost.text}").body()


def _names(attempts: list[Tried]) -> list[str]:
    """Who took part, in order."""
    return list(dict.fromkeys(name for tried in attempts for name in reversed(tried.names)))


def _shown(instance: Instance) -> dict[str, Any]:
    card, vitals = instance.card, instance.vitals
    return {
        "name": card.name,
        "role": card.role.value,
        "layout": card.layout,
        "model": instance.model,
        "fingerprint": card.fingerprint,
        "epoch": max(card.epoch, vitals.told.epoch),
        "url": card.url,
        "coordinator": instance.coordinator,
        "state": instance.state,
        "trouble": vitals.trouble,
        "num_in_flight": instance.num_in_flight,
        "num_tokens": instance.load_tokens,
    }


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), headers={"Content-Type": "application/json"})
