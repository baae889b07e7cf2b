"""`baton route`: the router's HTTP endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import quote

import msgspec
from aiohttp import web

from baton.errors import BatonError
from baton.observe import Interval, Timeline, Track, trace
from baton.serving.fleet import Fleet, FleetInstance, FleetWatcher
from baton.serving.http import (
    CALLER,
    ApiError,
    Credentials,
    HttpLimits,
    HttpServer,
    failure,
    json_response,
    router_key,
)
from baton.serving.proxy import AttemptRecord, ProxiedRequest, RouterContext
from baton.serving.routable import CHAT_PATH, read_routable
from baton.serving.router_config import RouterConfig
from baton.serving.router_metrics import CONTENT_TYPE, RouterMetrics
from baton.serving.routing import RouteChooser, RouteQueue
from baton.serving.upstream import UpstreamClient, UpstreamError
from baton.session.registry import RegistryClient, Role

FETCH_S_MAX = 5.0
BODY_BYTES_MAX = 15 << 20
"""A mebibyte below the limit of instances: the router adds rooms, and the tokens of a resumed stream."""
US_PER_S = 1e6

_log = logging.getLogger("baton.serving.router")


class Router:
    """A router in the running loop: `await start(...)`, `url`, `await close()`."""

    def __init__(self, config: RouterConfig, secret: bytes, credentials: Credentials) -> None:
        fleet = Fleet()
        dialling = None if config.tls is None else config.tls.dialling()
        client = UpstreamClient(router_key(secret), config.limits.connect_s_max, dialling)
        chooser = RouteChooser(fleet, config)
        queue = RouteQueue(chooser, config.limits)
        self.context = RouterContext(config, client, fleet, chooser, queue, RouterMetrics(fleet))
        self._watcher = FleetWatcher(fleet, client, config, self._on_watcher_failure)
        self._registry = RegistryClient(config.registry, secret, ssl_context=dialling)
        self._http = HttpServer(
            credentials,
            HttpLimits(BODY_BYTES_MAX),
            ssl_context=None if config.tls is None else config.tls.serving(),
            on_response=self.context.metrics.add_response,
        )
        self._http.app.add_routes(self._routes())
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_draining = False
        self._num_open = 0
        self._emptied = asyncio.Event()
        self._emptied.set()
        fleet.on_join = self._watcher.join
        fleet.on_leave = self._on_leave
        fleet.on_restart = lambda instance: chooser.prefixes.drop(instance.name)
        fleet.on_change = queue.wake

    @property
    def url(self) -> str:
        return self._http.url

    async def wait(self) -> None:
        """Until the router fails, which raises BatonError."""
        await asyncio.shield(self._failure)

    async def start(self, host: str, port: int) -> None:
        """Listens, and watches the registry from now on."""
        await self._http.start(host, port)
        self._watcher.start(self._registry)

    async def drain(self, wait_s: float) -> None:
        """Takes no new requests, and waits for open ones up to this time."""
        self._is_draining = True
        try:
            async with asyncio.timeout(wait_s):
                await self._emptied.wait()
        except TimeoutError:
            _log.warning("%d requests were left after %g s", self._num_open, wait_s)

    async def close(self) -> None:
        """Ends every request and every connection."""
        await self._http.close()
        await self._watcher.close()
        await self._registry.close()
        tasks = list(self.context.prefill_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.context.client.close()

    def _on_watcher_failure(self, error: BaseException) -> None:
        if not self._failure.done():
            text = f"the router no longer sees its instances: {error!r}; see the log, and start it again"
            self._failure.set_exception(BatonError(text))

    def _on_leave(self, instance: FleetInstance) -> None:
        self.context.chooser.prefixes.drop(instance.name)
        self._watcher.leave(instance)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._proxy),
            web.post(CHAT_PATH, self._proxy),
            web.get("/health", self._get_health),
            web.get("/v1/models", self._get_models),
            web.get("/v1/models/{id:.+}", self._get_model),
            web.get("/metrics", self._get_metrics),
            web.get("/server_info", self._get_server_info),
            web.get("/v1/timelines/{id}", self._get_timeline),
            web.get("/openapi.json", self._get_openapi),
            web.post("/drain", self._post_drain),
        ]

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            raise failure("DRAINING", "this router is draining; ask another one, or try again")
        routable = read_routable(request.path, await request.read())
        if not self._num_open:
            self._emptied.clear()
        self._num_open += 1
        try:
            return await ProxiedRequest(self.context, request, routable).respond()
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._emptied.set()

    async def _get_health(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            raise failure("DRAINING", "this router is draining")
        missing = self.context.fleet.missing()
        if missing:
            raise failure("NO_INSTANCE", missing)
        return json_response({"status": "ok"})

    async def _get_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.context.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_models(self, request: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": list((await self._model_cards()).values())})

    async def _get_model(self, request: web.Request) -> web.StreamResponse:
        cards, name = await self._model_cards(), request.match_info["id"]
        for card in cards.values():
            if name in (card["id"], card["id"].lstrip("/")):
                return json_response(card)
        text = f"model {name[:80]!a} is not served here; use one of {', '.join(cards)}"
        raise ApiError(404, text, param="model", code="model_not_found")

    async def _model_cards(self) -> dict[str, Any]:
        """What one instance of each model says of it."""
        chosen = {instance.model: instance for instance in self.context.fleet.able(*Role)}
        answers = await asyncio.gather(*(self._fetch(instance, "/v1/models") for instance in chosen.values()))
        cards: dict[str, Any] = {}
        for status, body in answers:
            for card in msgspec.json.decode(body)["data"] if status == 200 else ():
                cards.setdefault(card["id"], card)
        return cards

    async def _get_server_info(self, request: web.Request) -> web.StreamResponse:
        context, config = self.context, self.context.config
        return json_response(
            {
                "role": "router",
                "registry": config.registry,
                "policies": {"prefill": config.prefill_policy, "decode": config.decode_policy},
                "local": config.local.value,
                "is_ready": not context.fleet.missing(),
                "num_waiting": context.queue.num_waiting,
                "bytes_per_token": round(context.chooser.token_size.bytes_per_token, 2),
                "instances": [_instance_info(known) for known in context.fleet.instances.values()],
            }
        )

    async def _get_timeline(self, request: web.Request) -> web.StreamResponse:
        identity = request.match_info["id"]
        attempts = self.context.log.attempts(identity)
        form = request.query.get("format", "")
        if form not in ("", "perfetto"):
            raise ApiError(400, f"format is {form!a}; use perfetto, or leave it out", param="format")
        if not attempts:
            text = f"no request {identity!a} is remembered; timelines are kept for recent requests"
            raise ApiError(404, text, param="id", code="unknown_timeline")
        path = f"/v1/timelines/{quote(identity, safe='')}"
        timelines, traces = [], []
        names = dict.fromkeys(name for attempt in attempts for name in reversed(attempt.names))
        for name in names:
            instance = self.context.fleet.instances.get(name)
            if instance is None:
                continue
            paths = [path, f"{path}?format={form}"] if form else [path]
            answers = [await self._fetch(instance, wanted) for wanted in paths]
            if all(status == 200 for status, _ in answers):
                timelines.append(msgspec.json.decode(answers[0][1]))
                traces += [msgspec.json.decode(body) for _, body in answers[1:]]
        if form:
            return json_response(_merged_trace(attempts, timelines, traces))
        records = [_attempt_info(attempt) for attempt in attempts]
        return json_response({"id": identity, "attempts": records, "instances": timelines})

    async def _get_openapi(self, request: web.Request) -> web.StreamResponse:
        for instance in self.context.fleet.able(*Role):
            status, body = await self._fetch(instance, "/openapi.json")
            if status == 200:
                return web.Response(body=body, headers={"Content-Type": "application/json"})
        raise failure("NO_INSTANCE", self.context.fleet.missing() or "no instance has a description")

    async def _post_drain(self, request: web.Request) -> web.StreamResponse:
        if not request[CALLER].is_trusted:
            text = "draining needs the router's key, or a caller on this machine"
            raise ApiError(403, text, code="drain_not_allowed")
        name = request.query.get("instance", "")
        instance = self.context.fleet.instances.get(name)
        if instance is None:
            listed = ", ".join(sorted(self.context.fleet.instances)) or "none"
            raise ApiError(404, f"instance {name!a} is not known; there are: {listed}", param="instance")
        status, body = await self._fetch(instance, "/drain", b"{}")
        instance.wake()
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})

    async def _fetch(
        self, instance: FleetInstance, path: str, body: bytes | None = None
    ) -> tuple[int, bytes]:
        try:
            return await self.context.client.fetch(instance.base + path, FETCH_S_MAX, body)
        except UpstreamError as error:
            instance.wake()
            return 502, failure("PEER_LOST", f"instance {instance.name}: {error.text}").body()


def _instance_info(instance: FleetInstance) -> dict[str, Any]:
    roster, health = instance.roster, instance.health
    return {
        "name": instance.name,
        "role": instance.role.value,
        "layout": roster.layout,
        "model": instance.model,
        "fingerprint": instance.fingerprint,
        "epoch": max(roster.epoch, health.info.epoch),
        "url": roster.url,
        "coordinator": instance.coordinator,
        "state": instance.state,
        "trouble": health.trouble,
        "num_in_flight": instance.num_in_flight,
        "num_tokens": instance.load_tokens,
    }


# ---- timelines
#
# Instances report times of their own monotonic clock, and what that clock and the calendar said at the time
# of the answer; so their timelines can be aligned, as well as their calendars agree.


def _attempt_info(attempt: AttemptRecord) -> dict[str, Any]:
    fields = asdict(attempt)
    return {"names": fields.pop("names"), "why_local": fields.pop("local_reason"), **fields}


def _merged_trace(
    attempts: Sequence[AttemptRecord], timelines: Sequence[Any], traces: Sequence[Any]
) -> dict[str, Any]:
    """All traces as one, from the first attempt on; the router's own comes first."""
    zero_s = min(attempt.began_s for attempt in attempts)
    own = trace([Timeline("router", tuple(_attempt_intervals(attempts, zero_s)))])
    events, num_processes = list(own["traceEvents"]), _last_process(own)
    for timeline, instance_trace in zip(timelines, traces, strict=True):
        shift_us = (_arrived_s(timeline, zero_s) - zero_s) * US_PER_S
        for event in instance_trace.get("traceEvents", ()):
            moved = {"ts": event["ts"] + shift_us} if event.get("ph") == "X" else {}
            events.append({**event, "pid": event["pid"] + num_processes, **moved})
        num_processes += _last_process(instance_trace)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _attempt_intervals(attempts: Sequence[AttemptRecord], zero_s: float) -> Iterator[Interval]:
    for number, attempt in enumerate(attempts, 1):
        details = {
            "instances": " <- ".join(attempt.names),
            "failure": attempt.failure,
            "local": attempt.local_reason,
        }
        start_s = attempt.began_s - zero_s
        stop_s = max(start_s, (attempt.ended_s or time.time()) - zero_s)
        yield Interval(Track("router", "attempts"), f"attempt {number}", start_s, stop_s, details)
        if attempt.answered_s:
            answered_s = min(max(start_s, attempt.answered_s - zero_s), stop_s)
            yield Interval(Track("router", "until the answer begins"), "first token", start_s, answered_s)


def _arrived_s(timeline: Any, fallback_s: float) -> float:
    """When the request came to an instance, by the calendar."""
    clock = timeline.get("clock") or {}
    stories = [job.get("story") or {} for job in timeline.get("jobs", ())]
    arrivals = [story["arrived_s"] for story in stories if story.get("arrived_s")]
    if not arrivals or "monotonic_s" not in clock:
        return fallback_s
    return float(clock["unix_s"] - (clock["monotonic_s"] - min(arrivals)))


def _last_process(instance_trace: Any) -> int:
    return max((int(event.get("pid", 0)) for event in instance_trace.get("traceEvents", ())), default=0)
