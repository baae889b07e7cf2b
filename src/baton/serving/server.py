"""`baton serve`: one instance behind HTTP. It listens at once, loads, serves, and drains before it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton import __version__
from baton.engine.config import EngineConfig
from baton.engine.instance import Instance
from baton.engine.load import EngineLoad
from baton.errors import ConfigError
from baton.serving.generation import EventBridge, Generation
from baton.serving.http import (
    CALLER,
    DRAIN_S,
    HOST,
    NO_STORE,
    ApiError,
    Credentials,
    Handler,
    HttpLimits,
    HttpServer,
    bad_field,
    check_binding,
    failure,
    json_response,
)
from baton.serving.observing import RequestObserver
from baton.serving.openapi import description
from baton.serving.parsing import ReceivingInstance, ServedModel, parse_request
from baton.serving.rendering import TokenNames, response_format
from baton.serving.schema import (
    ChatRequest,
    CompletionRequest,
    DrainBody,
    GenerateRequest,
    HealthBody,
    ModelCard,
    ModelList,
    RequestBody,
    reader_of,
)
from baton.serving.supervisor import InstanceSupervisor
from baton.settings import Tls

FIRST_TOKEN = ("prefill", "decode")
TIMELINE_FORMATS = ("json", "perfetto")
CLOSE_S = 10.0
LOST_S = 1.0
"""How long an instance that ended is given to report it to its requests itself."""

_log = logging.getLogger("baton.serving.server")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of `baton serve`."""

    instance: EngineConfig
    host: str = HOST
    port: int = 0
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    first_token: str = "prefill"
    drain_s: float = DRAIN_S
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: Tls | None = None
    """For HTTPS; the instance has its own for control links."""

    def __post_init__(self) -> None:
        if self.first_token not in FIRST_TOKEN:
            raise ConfigError(
                f"first token {self.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
            )
        if self.drain_s < 0:
            raise ConfigError(f"drain_s is {self.drain_s}; give a number of seconds from 0")
        check_binding(self.host, has_api_key=bool(self.api_keys), has_secret=bool(self.instance.secret))


class Server:
    """One instance behind HTTP, in the running loop."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        instance = config.instance
        self.supervisor = InstanceSupervisor(instance, self._on_supervisor_change)
        self.is_draining = False
        self.ended = asyncio.Event()
        """Set when the supervisor has given up."""
        self._loop = asyncio.get_running_loop()
        self._bridge = EventBridge(self._loop)
        self._observer = RequestObserver(instance.name, instance.role)
        self._model_name = instance.model
        self._created = int(time.time())
        self._model: tuple[Instance, ServedModel, TokenNames] | None = None
        self._open: dict[Generation, Instance] = {}
        """Requests that hold something of an instance."""
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._http = HttpServer(
            Credentials(config.api_keys, instance.secret or None),
            config.limits,
            ssl_context=None if config.tls is None else config.tls.serving(),
            on_response=self._observer.metrics.add_response,
        )
        self._http.app.add_routes(self._routes())

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def num_open(self) -> int:
        """Requests that hold something of the instance."""
        return len(self._open)

    async def start(self) -> None:
        """Listens, and begins to load."""
        await self._http.start(self.config.host, self.config.port)
        self.supervisor.config = replace(self.supervisor.config, url=self.url)
        self.supervisor.start()

    async def drain(self) -> None:
        """Takes no new requests, and waits for open ones up to `drain_s`."""
        self.is_draining = True
        try:
            async with asyncio.timeout(self.config.drain_s):
                await self._emptied.wait()
        except TimeoutError:
            _log.warning("%d requests were left after %g s", self.num_open, self.config.drain_s)

    async def close(self) -> None:
        """Ends the instance and every request that still waits for it."""
        await asyncio.to_thread(self.supervisor.close, CLOSE_S)
        await self._http.close()

    def _on_supervisor_change(self) -> None:
        """Called on the supervisor's thread, when its stage changes."""
        self._loop.call_soon_threadsafe(self._check_supervisor)

    def _check_supervisor(self) -> None:
        if self.supervisor.failure is not None:
            self.ended.set()
        self._loop.call_later(LOST_S, self._fail_lost)

    def _fail_lost(self) -> None:
        """Fails the requests of an instance that ended without reporting it to them."""
        for generation, instance in list(self._open.items()):
            if not instance.is_running:
                generation.lost(f"{instance.config.name} has ended: {instance.failure}")

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._generate_with(reader_of(CompletionRequest))),
            web.post("/v1/chat/completions", self._generate_with(reader_of(ChatRequest))),
            web.post("/generate", self._generate_with(reader_of(GenerateRequest))),
            web.get("/health", self._get_health),
            web.get("/health_generate", self._get_health),
            web.get("/v1/models", self._get_models),
            web.get("/v1/models/{id:.+}", self._get_model),
            web.get("/server_info", self._get_server_info),
            web.get("/get_server_info", self._get_server_info),
            web.get("/model_info", self._get_model_info),
            web.get("/get_model_info", self._get_model_info),
            web.get("/metrics", self._get_metrics),
            web.get("/v1/timelines", self._get_timelines),
            web.get("/v1/timelines/{id}", self._get_timeline),
            web.get("/openapi.json", self._get_openapi),
            web.post("/drain", self._post_drain),
        ]

    def _generate_with(self, read: Callable[[bytes], RequestBody]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._generate(request, read)

        return handle

    async def _generate(
        self, request: web.Request, read: Callable[[bytes], RequestBody]
    ) -> web.StreamResponse:
        if self.is_draining:
            raise self._draining()
        instance = self.supervisor.running()
        if self._model is None or self._model[0] is not instance:
            self._model = (instance, ServedModel.of(instance), TokenNames(instance.tokenizer))
        _, model, names = self._model
        receiver = ReceivingInstance(
            instance.config.role, instance.address, self.config.first_token, self._model_name
        )
        body = read(await request.read())
        parsed = await parse_request(body, request[CALLER], model, receiver)
        generation = Generation(parsed, self._observer, self._on_generation_closed)
        self._open[generation] = instance
        self._emptied.clear()
        generation.start(instance, self._bridge)
        try:
            return await generation.respond(request, response_format(parsed, self._model_name, names))
        finally:
            generation.close(instance)

    def _on_generation_closed(self, generation: Generation) -> None:
        self._open.pop(generation, None)
        if not self._open:
            self._emptied.set()

    def _draining(self) -> ApiError:
        name = self.config.instance.name
        return failure("DRAINING", f"{name} is draining and takes no new requests; ask another instance")

    async def _get_health(self, request: web.Request) -> web.Response:
        if self.is_draining:
            raise self._draining()
        supervisor = self.supervisor
        if not supervisor.is_ready:
            raise failure("LOADING", f"{supervisor.config.name} is not ready: {supervisor.stage}")
        return json_response(HealthBody("ok", supervisor.stage))

    async def _get_models(self, request: web.Request) -> web.Response:
        return json_response(ModelList([self._model_card()]))

    async def _get_model(self, request: web.Request) -> web.Response:
        name = self._model_name
        if request.match_info["id"] not in (name, name.lstrip("/")):
            text = f"the model {request.match_info['id'][:80]!a} is not served here; use {name!a}"
            raise ApiError(404, text, param="model", code="model_not_found")
        return json_response(self._model_card())

    def _model_card(self) -> ModelCard:
        name = self._model_name
        return ModelCard(name, self._created, root=name, max_model_len=self._context_max)

    @property
    def _context_max(self) -> int | None:
        instance = self.supervisor.instance
        return None if instance is None else instance.sizes.context_max

    async def _get_model_info(self, request: web.Request) -> web.Response:
        config, instance = self.supervisor.config, self.supervisor.instance
        return json_response(
            {
                "model_path": config.model,
                "tokenizer_path": config.model,
                "served_model_name": self._model_name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "has_tokenizer": instance is not None and instance.tokenizer is not None,
                "max_model_len": self._context_max,
            }
        )

    async def _get_server_info(self, request: web.Request) -> web.Response:
        supervisor = self.supervisor
        config, instance = supervisor.config, supervisor.instance
        load = EngineLoad() if instance is None else instance.load()
        return json_response(
            {
                "name": config.name,
                "role": config.role,
                "layout": config.layout,
                "model": self._model_name,
                "model_path": config.model,
                "served_model_name": self._model_name,
                "disaggregation_mode": "null" if config.role == "both" else config.role,
                "epoch": 0 if instance is None else instance.epoch,
                "coordinator": "" if instance is None else instance.address,
                "url": self.url,
                "transport": config.transport,
                "page_tokens": config.page_tokens,
                "chunk_tokens": config.chunk_tokens,
                "context_max": self._context_max,
                "is_ready": supervisor.is_ready and not self.is_draining,
                "is_draining": self.is_draining,
                "stage": supervisor.stage,
                "version": __version__,
                "load": {
                    "num_running": load.num_running,
                    "num_waiting": load.num_waiting,
                    "num_tokens": load.num_tokens,
                    "num_queue_max": config.queue_max,
                    "num_open": self.num_open,
                },
                "pages": msgspec.to_builtins(load.pages),
                "rates": {
                    "prefill_tokens_per_s": load.prefill_tokens_per_s,
                    "decode_tokens_per_s": load.decode_tokens_per_s,
                    "handoff_s": load.handoff_s,
                    "wait_s": load.wait_s,
                },
            }
        )

    async def _get_metrics(self, request: web.Request) -> web.Response:
        supervisor, metrics = self.supervisor, self._observer.metrics
        instance = supervisor.instance
        metrics.set_load(
            EngineLoad() if instance is None else instance.load(),
            {} if instance is None else instance.counts(),
            is_ready=supervisor.is_ready,
            num_starts=supervisor.num_starts,
        )
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST, **NO_STORE})

    async def _get_timelines(self, request: web.Request) -> web.Response:
        return json_response(self._observer.timelines.all())

    async def _get_timeline(self, request: web.Request) -> web.Response:
        name, form = request.match_info["id"], request.query.get("format", "json")
        if form not in TIMELINE_FORMATS:
            raise bad_field("format", form, f"use {' or '.join(TIMELINE_FORMATS)}")
        timelines = self._observer.timelines
        timeline = timelines.trace(name) if form == "perfetto" else timelines.find(name)
        if timeline is None:
            text = f"no request {name[:80]!a} is remembered; /v1/timelines lists the latest"
            raise ApiError(404, text, param="id", code="unknown_request")
        return json_response(timeline)

    async def _get_openapi(self, request: web.Request) -> web.Response:
        return json_response(description())

    async def _post_drain(self, request: web.Request) -> web.Response:
        if not request[CALLER].is_trusted:
            text = "only a router, or a caller on this machine, may drain"
            raise ApiError(403, text, code="not_allowed")
        self.is_draining = True
        return json_response(DrainBody(True, self.num_open))


async def serve(config: ServerConfig, say: Callable[[str], None]) -> None:
    """Serves until a signal: the first SIGTERM drains, a second signal or SIGINT ends it at once."""
    server, loop = Server(config), asyncio.get_running_loop()
    terminated, interrupted = asyncio.Event(), asyncio.Event()

    def terminate() -> None:
        (interrupted if terminated.is_set() else terminated).set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupted.set)
    ends = [asyncio.create_task(event.wait()) for event in (interrupted, server.ended)]
    try:
        await server.start()
        say(f"serving at {server.url}")
        await _first(*ends, asyncio.create_task(terminated.wait()))
        if terminated.is_set() and not any(task.done() for task in ends):
            await _first(*ends, asyncio.create_task(server.drain()))
    finally:
        for task in ends:
            task.cancel()
        await server.close()
    if server.supervisor.failure is not None:
        raise server.supervisor.failure
    if interrupted.is_set() and not terminated.is_set():
        raise KeyboardInterrupt


async def _first(*tasks: asyncio.Task[object]) -> None:
    """Waits for one of these tasks, and cancels the last one if it is not done."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    tasks[-1].cancel()
    with suppress(asyncio.CancelledError):
        await tasks[-1]
