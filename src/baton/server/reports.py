"""The endpoints that tell how a server is: for clients, routers, Prometheus and people."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from aiohttp import web

from baton import __version__
from baton.engine.load import EngineLoad
from baton.server.bodies.answered import Drained, Health, ModelCard, ModelList
from baton.server.endpoints import Endpoints
from baton.server.keeper import Keeper, draining
from baton.server.metrics import CONTENT_TYPE_LATEST, Gauges
from baton.server.observing import Observer
from baton.server.openapi import description
from baton.web.edge import caller_of
from baton.web.problems import NO_STORE, Problem, failure, refused

FORMATS = ("json", "perfetto")


class Reports:
    """Answers without work for the instance."""

    def __init__(self, keeper: Keeper, endpoints: Endpoints, observer: Observer, name: str) -> None:
        self._keeper = keeper
        self._endpoints = endpoints
        self._observer = observer
        self._name = name
        self._created = int(time.time())
        self.url = ""

    def routes(self) -> list[web.RouteDef]:
        """Where they are."""
        return [
            web.get("/health", self._health),
            web.get("/health_generate", self._health),
            web.get("/v1/models", self._models),
            web.get("/v1/models/{id:.+}", self._model),
            web.get("/server_info", self._server),
            web.get("/get_server_info", self._server),
            web.get("/model_info", self._served),
            web.get("/get_model_info", self._served),
            web.get("/metrics", self._metrics),
            web.get("/v1/timelines", self._timelines),
            web.get("/v1/timelines/{id}", self._timeline),
            web.get("/openapi.json", self._openapi),
            web.post("/drain", self._drain),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        del request
        if self._endpoints.is_draining:
            raise draining(self._keeper.config.name)
        if not self._keeper.is_ready:
            raise failure("LOADING", f"{self._keeper.config.name} is not ready: {self._keeper.stage}")
        return answer(Health("ok", self._keeper.stage))

    async def _models(self, request: web.Request) -> web.Response:
        del request
        return answer(ModelList([self._card()]))

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in (self._name, self._name.lstrip("/")):
            text = f"the model {request.match_info['id'][:80]!a} is not served here; use {self._name!a}"
            raise Problem(404, text, param="model", code="model_not_found")
        return answer(self._card())

    def _card(self) -> ModelCard:
        latest = self._keeper.latest
        context_max = None if latest is None else latest.sizes.context_max
        return ModelCard(self._name, self._created, root=self._name, max_model_len=context_max)

    async def _served(self, request: web.Request) -> web.Response:
        del request
        config, latest = self._keeper.config, self._keeper.latest
        return answer(
            {
                "model_path": config.model,
                "tokenizer_path": config.model,
                "served_model_name": self._name,
                "is_generation": True,
                "preferred_sampling_params": None,
                "has_tokenizer": latest is not None and latest.tokenizer is not None,
                "max_model_len": None if latest is None else latest.sizes.context_max,
            }
        )

    async def _server(self, request: web.Request) -> web.Response:
        del request
        config, latest = self._keeper.config, self._keeper.latest
        load = self._load()
        return answer(
            {
                "name": config.name,
                "role": config.role,
                "layout": config.layout,
                "model": self._name,
                "model_path": config.model,
                "served_model_name": self._name,
                "disaggregation_mode": "null" if config.role == "both" else config.role,
                "epoch": 0 if latest is None else latest.epoch,
                "coordinator": "" if latest is None else latest.address,
                "url": self.url,
                "transport": config.transport,
                "page_tokens": config.page_tokens,
                "chunk_tokens": config.chunk_tokens,
                "context_max": None if latest is None else latest.sizes.context_max,
                "is_ready": self._keeper.is_ready and not self._endpoints.is_draining,
                "is_draining": self._endpoints.is_draining,
                "stage": self._keeper.stage,
                "version": __version__,
                "load": {
                    "num_running": load.num_running,
                    "num_waiting": load.num_waiting,
                    "num_tokens": load.num_tokens,
                    "num_queue_max": config.queue_max,
                    "num_open": self._endpoints.num_open,
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

    def _load(self) -> EngineLoad:
        latest = self._keeper.latest
        return EngineLoad() if latest is None else latest.load()

    async def _metrics(self, request: web.Request) -> web.Response:
        del request

        def look(gauges: Gauges) -> None:
            gauges.look(self._load(), self._keeper.is_ready, self._keeper.num_starts)
            latest = self._keeper.latest
            gauges.count({} if latest is None else latest.counts())

        headers = {"Content-Type": CONTENT_TYPE_LATEST, **NO_STORE}
        return web.Response(body=self._observer.metrics.text(look), headers=headers)

    async def _timelines(self, request: web.Request) -> web.Response:
        del request
        return answer(self._observer.timelines.all())

    async def _timeline(self, request: web.Request) -> web.Response:
        name, form = request.match_info["id"], request.query.get("format", "json")
        if form not in FORMATS:
            raise refused("format", form, f"use {' or '.join(FORMATS)}")
        timelines = self._observer.timelines
        found = timelines.trace(name) if form == "perfetto" else timelines.find(name)
        if found is None:
            text = f"no request {name[:80]!a} is remembered; /v1/timelines lists the latest"
            raise Problem(404, text, param="id", code="unknown_request")
        return answer(found)

    async def _openapi(self, request: web.Request) -> web.Response:
        del request
        return answer(description())

    async def _drain(self, request: web.Request) -> web.Response:
        if not caller_of(request).is_trusted:
            raise Problem(403, "only a router, or a caller on this machine, may drain", code="not_allowed")
        self._endpoints.drain()
        return answer(Drained(True, self._endpoints.num_open))


def answer(found: Any) -> web.Response:
    """Something as JSON."""
    headers = {"Content-Type": "application/json", **NO_STORE}
    return web.Response(body=msgspec.json.encode(found), headers=headers)
