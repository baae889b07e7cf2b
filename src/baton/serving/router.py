"""`baton route`: a client's request through the router, from its arrival to the last byte of its response.

`Router._proxy` is the handler. It reads what routing needs (`read` of the wire) and leaves the rest to a
`ProxiedRequest`, which makes attempts until one has answered. For each attempt the `RouteQueue` waits for
room and the `RouteChooser` picks the instances. An `Attempt` is one `UpstreamRequest` to the instance that
answers and, where the KV cache is handed over, one to the instance that prefills; both are sent at the same
time. If prefill fails before decode has the cache, the other request is ended with that failure.

Before anything was streamed, a failed attempt is made again from the start, on another pair if there is one,
in new rooms or under a new transfer id. Once events have gone to the client, each further attempt is given
the tokens that the client has and streams what comes after them. Events are forwarded whole or not at all,
and their tokens are recorded before they are written, so a new attempt resumes after the last token that the
client has, or is about to get.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from math import inf
from time import monotonic
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import msgspec
from aiohttp import web
from aiohttp.connector import Connection
from aiohttp.http import HttpProcessingError, RawResponseMessage

from baton.errors import BatonError
from baton.serving.fleet import (
    Fleet,
    FleetInstance,
    FleetWatcher,
    PostTarget,
    UpstreamClient,
    UpstreamError,
    fetch,
)
from baton.serving.http import (
    CALLER,
    DONE,
    EVENT_STREAM,
    FAILURE,
    ID_HEADER,
    JSON_HEADERS,
    NO_STORE,
    PROMPT_TOKENS_HEADER,
    REQUEST_ID,
    ROUTE,
    STATUSES,
    VALUE_CHARACTERS_MAX,
    ApiError,
    Credentials,
    EventStream,
    HttpLimits,
    HttpServer,
    OpenRequests,
    bad_field,
    client_id,
    data_event,
    failure,
    json_response,
    log_reason,
    read_error,
    route_pattern,
    router_key,
)
from baton.serving.metrics import CONTENT_TYPE, AttemptLog, AttemptRecord, RouterMetrics, merged_trace
from baton.serving.page import NUM_SHOWN_MAX, RouterPage
from baton.serving.policies import Policy, PrefixIndex, TokenSize, local_reason
from baton.serving.vllm import VllmWire
from baton.serving.wire import (
    CHAT_PATH,
    ID_PREFIXES,
    BatonWire,
    RoutableRequest,
    StreamFilter,
    UpstreamRequests,
    read_routable,
)
from baton.session.registry import RegistryClient, Role, Roster
from baton.settings import Tls

FETCH_S_MAX = 5.0
BODY_BYTES_MAX = 15 << 20
"""A mebibyte below the limit of instances: the router adds rooms, and the tokens of a resumed stream."""
RESPONSE_BYTES_MAX = 256 << 20
COMPLETION_TOKENS = 128
"""The expected length of a completion where the request does not bound it lower."""
QUEUE_RETRY_S = 0.25
"""An instance that reported it was full is tried again after this without a wake-up."""
WRITE_S_MAX = 25.0
"""Below the limit that an instance has for the router: a client that does not read is dropped first."""
RETRIED_STATUSES = frozenset({429, 502, 503, 504})
ENDED_CODES = frozenset({"PEER_LOST", "ENDED", "LOADING", "DRAINING"})
FULL_CODES = frozenset({"QUEUE_FULL", "OUT_OF_PAGES"})
FULL_S = 1.0
RETRY_S_FIRST = 0.005
RETRY_S_MAX = 0.5
KEPT_BYTES_MAX = 64 << 10
LINGER_S = 10.0
"""How long the prefill request may still take once decode has answered."""
STREAM_END_S = 1.0
"""How long to wait for the end of a stream after its last event, so that its connection can be reused."""

_PROMPT_TOKENS = re.compile(rb'"prompt_tokens":\s*(\d{1,9})')
_log = logging.getLogger("baton.serving.router")

MODEL: web.RequestKey[str] = web.RequestKey("model", str)
"""The model of a request as metrics name it: never by what a client wrote."""


class LocalMode(Enum):
    """Which prompts a decode instance prefills itself."""

    AUTO = "auto"
    """Those that finish sooner that way, by measured rates; and all while there is no prefill instance."""
    NEVER = "never"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """Every wait, retry and queue of the router has one of these bounds."""

    num_in_flight_max: int = 256
    """Requests that one instance is given at a time."""
    num_waiting_max: int = 1024
    """Requests that wait in the router until an instance has room, as long as their clients do."""
    queue_s_max: float | None = None
    """How long one waits there, and how long a first token takes in the queue of an instance that does not
    report what it computes; None: no limit."""
    recover_s_max: float = 1.0
    """How long requests wait for an instance to appear where none is able."""
    num_attempts_max: int = 4
    """In a row, without a token in between."""
    num_resumes_max: int = 16
    retry_s_max: float = 30.0
    """A failure later than this after the first one, or the first one since the last token, is not
    retried."""
    connect_s_max: float = 1.5
    silence_s_max: float = 10.0
    """An upstream request without progress is ended after this, if its instance answers no polls either."""
    first_s_max: float = 300.0
    """A response that has not begun after this is given up, if the instances of its attempt have computed
    nothing for so long either; else they have it in a queue that moves. Where instances do not report what
    they compute, a request waits for its first token as long as they are healthy."""
    stall_s_max: float = 60.0
    """A response that has begun and not grown for this long is resumed elsewhere."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The configuration of `baton route`."""

    registry: str | None
    """None: the instances are those of `instances`."""
    engine: Literal["baton", "vllm"] = "baton"
    instances: tuple[Roster, ...] = ()
    """Those that are known beforehand, beside the registry's."""
    instance_key: str | None = None
    """The API key that instances are sent; None: the one that is derived from the secret."""
    prefill_policy: str = "least_loaded"
    decode_policy: str = "least_loaded"
    local: LocalMode = LocalMode.AUTO
    local_prefill_max: int | None = None
    """With AUTO: the most prompt tokens that decode prefills itself; None: one of its chunks."""
    first_token: Literal["", "prefill", "decode"] = ""
    poll_s: float = 1.0
    limits: RouterLimits = field(default_factory=RouterLimits)
    tls: Tls | None = None
    """For HTTPS to clients, and towards instances and the registry."""


class Router:
    """A router in the running loop: `await start(...)`, `url`, `await close()`."""

    def __init__(self, config: RouterConfig, secret: bytes | None, credentials: Credentials) -> None:
        """Without a secret there is neither a registry nor a key derived from it."""
        dialling = None if config.tls is None else config.tls.dialling()
        self.config = config
        self.wire: BatonWire | VllmWire = (
            VllmWire() if config.engine == "vllm" else BatonWire(config.first_token)
        )
        key = config.instance_key
        if key is None and secret is not None:
            key = router_key(secret)
        self.client = UpstreamClient(key or "", config.limits.connect_s_max, dialling)
        self.fleet = Fleet(config.instances)
        self.chooser = RouteChooser(self.fleet, config)
        self.queue = RouteQueue(self.chooser, config.limits)
        self.metrics = RouterMetrics(self.fleet, config.local_prefill_max)
        self.log = AttemptLog()
        self.prefill_tasks: set[asyncio.Task[None]] = set()
        self.fleet.on_end = lambda instance: self.chooser.prefixes.drop(instance.name)
        self.fleet.on_change = self.queue.wake
        poll_s_max = config.limits.silence_s_max / 2
        self._watcher = FleetWatcher(
            self.fleet, self.wire, self.client.session, config.poll_s, poll_s_max, self._on_watcher_failure
        )
        self._registry: RegistryClient | None = None
        if config.registry is not None:
            assert secret is not None, "a registry is asked with the secret"
            self._registry = RegistryClient(config.registry, secret, ssl_context=dialling)
        self._http = HttpServer(
            credentials,
            HttpLimits(BODY_BYTES_MAX, open_paths=frozenset({"/health", "/"})),
            ssl_context=None if config.tls is None else config.tls.serving(),
            on_response=self._count_response,
        )
        # vLLM's servers keep no timelines.
        session = self.client.session if config.engine == "baton" else None
        self._page = RouterPage(self.fleet, self.log, self._page_state, session)
        self._http.app.add_routes(
            [
                *self._page.routes,
                *(web.post(path, self._proxy) for path in self.wire.paths),
                web.post("/tokenize", self._forward),
                web.post("/detokenize", self._forward),
                web.get("/health", self._get_health),
                web.get("/v1/models", self._get_models),
                web.get("/v1/models/{id:.+}", self._get_model),
                web.get("/metrics", self._get_metrics),
                web.get("/server_info", self._get_server_info),
                web.get("/v1/timelines/{id}", self._get_timeline),
                web.get("/openapi.json", self._get_openapi),
                web.post("/drain", self._post_drain),
            ]
        )
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open = OpenRequests[ProxiedRequest]()

    @property
    def url(self) -> str:
        return self._http.url

    async def start(self, host: str, port: int) -> None:
        """Listens, and watches the instances from now on."""
        await self._http.start(host, port)
        self._watcher.start(self._registry)

    async def wait(self) -> None:
        """Until the router fails, which raises BatonError."""
        await asyncio.shield(self._failure)

    def _on_watcher_failure(self, error: BaseException) -> None:
        if not self._failure.done():
            text = f"the router no longer sees its instances: {error!r}; see the log, and start it again"
            self._failure.set_exception(BatonError(text))

    async def drain(self, wait_s: float) -> None:
        """Takes no new requests, and waits for open ones up to this time."""
        await self._open.drain(wait_s)

    async def close(self) -> None:
        """Ends every request and every connection."""
        self._page.close()
        await self._http.close()
        await self._watcher.close()
        if self._registry is not None:
            await self._registry.close()
        tasks = list(self.prefill_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.client.close()

    def _count_response(self, request: web.Request, status: int) -> None:
        self.metrics.count("requests", request.get(MODEL, ""), route_pattern(request), str(status))

    async def _proxy(self, request: web.Request) -> web.StreamResponse:
        if self._open.is_draining:
            raise failure("DRAINING", "this router is draining; ask another one, or try again")
        routable = self.wire.read(request.path, await request.read())
        proxied = ProxiedRequest(self, request, routable)
        self._open.add(proxied)
        try:
            return await proxied.respond()
        finally:
            self._open.discard(proxied)

    def _page_state(self) -> dict[str, Any]:
        """For the page: the router itself, and the requests that have been running for longest."""
        return {
            **self._health_status(),
            "is_draining": self._open.is_draining,
            "num_running": len(self._open),
            "num_waiting": self.queue.num_waiting,
            "num_in_flight_max": self.config.limits.num_in_flight_max,
            "totals": self.metrics.totals(),
            "running": [request.summary() for request in islice(self._open, NUM_SHOWN_MAX)],
        }

    async def _get_health(self, request: web.Request) -> web.StreamResponse:
        if self._open.is_draining:
            raise failure("DRAINING", "this router is draining")
        health = self._health_status()
        if health["status"] == "down":
            raise failure("NO_INSTANCE", health["message"])
        return json_response({name: text for name, text in health.items() if text})

    def _health_status(self) -> dict[str, str]:
        """The status for new requests: "ok", "degraded" where one side answers alone, "down"; and why."""
        missing = self.fleet.missing()
        is_down = missing and (self.config.local is LocalMode.NEVER or not self.fleet.able())
        status = "down" if is_down else "degraded" if missing else "ok"
        return {"status": status, "message": missing or self.fleet.unpaired_text()}

    async def _get_metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

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
        """The model card of each model, from one of its instances; if names differ, decode's counts."""
        able = self.fleet.able()
        answering = {instance.fingerprint for instance in able if instance.role is not Role.PREFILL}
        chosen = {
            instance.model: instance
            for instance in able
            if instance.role is not Role.PREFILL or instance.fingerprint not in answering
        }
        answers = await asyncio.gather(*(self._fetch(instance, "/v1/models") for instance in chosen.values()))
        cards: dict[str, Any] = {}
        for status, body in answers:
            for card in msgspec.json.decode(body)["data"] if status == 200 else ():
                cards.setdefault(card["id"], card)
        return cards

    async def _get_server_info(self, request: web.Request) -> web.StreamResponse:
        config = self.config
        return json_response(
            {
                "role": "router",
                "registry": config.registry,
                "policies": {"prefill": config.prefill_policy, "decode": config.decode_policy},
                "local": config.local.value,
                "is_ready": not self.fleet.missing(),
                "num_waiting": self.queue.num_waiting,
                "bytes_per_token": round(self.chooser.token_size.bytes_per_token, 2),
                "instances": [instance.summary() for instance in self.fleet.instances.values()],
            }
        )

    async def _get_timeline(self, request: web.Request) -> web.StreamResponse:
        identity, form = request.match_info["id"], request.query.get("format", "")
        attempts = self.log.attempts(identity)
        if form not in ("", "perfetto"):
            raise ApiError(400, f"format is {form!a}; use perfetto, or leave it out", param="format")
        if not attempts:
            text = f"no request {identity!a} is remembered; timelines are kept for recent requests"
            raise ApiError(404, text, param="id", code="unknown_request")
        path = f"/v1/timelines/{quote(identity, safe='')}"
        paths = [path, f"{path}?format={form}"] if form else [path]
        timelines, traces = [], []
        names = dict.fromkeys(name for attempt in attempts for name in reversed(attempt.names))
        for instance in [self.fleet.instances[name] for name in names if name in self.fleet.instances]:
            answers = [await self._fetch(instance, wanted) for wanted in paths]
            if all(status == 200 for status, _ in answers):
                timelines.append(msgspec.json.decode(answers[0][1]))
                traces += [msgspec.json.decode(body) for _, body in answers[1:]]
        if form:
            return json_response(merged_trace(attempts, timelines, traces))
        records = [attempt.fields() for attempt in attempts]
        return json_response({"id": identity, "attempts": records, "instances": timelines})

    async def _get_openapi(self, request: web.Request) -> web.StreamResponse:
        for instance in self.fleet.able():
            status, body = await self._fetch(instance, "/openapi.json")
            if status == 200:
                return web.Response(body=body, headers={"Content-Type": "application/json"})
        raise failure("NO_INSTANCE", self.fleet.missing() or "no instance has a description")

    async def _post_drain(self, request: web.Request) -> web.StreamResponse:
        if not request[CALLER].is_trusted:
            text = "draining needs the router's key, or a caller on this machine"
            raise ApiError(403, text, code="not_allowed")
        name = request.query.get("instance", "")
        instance = self.fleet.instances.get(name)
        if instance is None:
            listed = ", ".join(sorted(self.fleet.instances)) or "none"
            raise ApiError(404, f"instance {name!a} is not known; there are: {listed}", param="instance")
        status, body = await self._fetch(instance, "/drain", b"{}")
        instance.wake()
        return web.Response(body=body, status=status, headers={"Content-Type": "application/json"})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """Any instance of the model answers."""
        raw = await request.read()
        model = read_routable(request.path, raw).model
        request[MODEL] = self.fleet.model_name(model)
        try:
            able = self.chooser.of_model(model)
        except NoInstance:
            able = []
        named = [instance for instance in able if model is None or instance.serves(model)]
        if not named:
            raise failure("NO_INSTANCE", self.fleet.missing() or "no instance of the model is able")
        status, body = await self._fetch(random.choice(named), request.path, raw)
        return web.Response(status=status, body=body, headers=JSON_HEADERS)

    async def _fetch(
        self, instance: FleetInstance, path: str, body: bytes | None = None
    ) -> tuple[int, bytes]:
        try:
            return await fetch(self.client.session, instance.base + path, FETCH_S_MAX, body)
        except UpstreamError as error:
            instance.wake()
            return 502, failure("PEER_LOST", f"instance {instance.name}: {error.text}").body()


# ---- one request


class AttemptFailed(Exception):  # noqa: N818  (an outcome of an attempt)
    """An attempt failed: the error for the client, and the instances to avoid next."""

    def __init__(self, error: ApiError, *blamed: str, raw: bytes | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.blamed = frozenset(blamed)
        self.raw = raw
        """The response's body where an instance sent one; a client gets it as it is."""


def _cause(error: ApiError) -> str:
    """A metric label from a bounded set."""
    return error.code if error.code in STATUSES else f"HTTP_{error.status}"


class ProxiedRequest:
    """Attempts one after the other, until one has answered or another makes no sense."""

    def __init__(self, router: Router, http_request: web.Request, request: RoutableRequest) -> None:
        self._router = router
        self._http_request = http_request
        self._request = request
        self._id = ID_PREFIXES.get(request.path, "cmpl-") + secrets.token_hex(16)
        http_request[REQUEST_ID] = self._id
        self._created = int(time.time())
        self._stream = EventStream(http_request, self._id, WRITE_S_MAX)
        self._progress = router.wire.progress(request, self._id, self._created)
        self._prompt_tokens = 0
        self._began_s = monotonic()
        """Later by the time that the request waited for room."""
        self._avoid: frozenset[str] = frozenset()
        """Instances that failed it since its last token."""
        self._full: frozenset[str] = frozenset()
        """Those of them that answered 429."""
        self._last_failure: AttemptFailed | None = None
        self._num_in_row = 0
        """Failures since its last token."""
        self._num_failures = 0
        self._failed_s = 0.0
        """When the first one in the row happened."""
        self._arrived_s = self._began_s
        self._record: AttemptRecord | None = None
        """Of the attempt that runs, or ran last."""

    def summary(self) -> dict[str, Any]:
        """For the router's page."""
        record = self._record
        is_routed = record is not None and not record.ended_s
        waits_for = ("first token" if record.is_streamed else "answer") if record and is_routed else "room"
        return {
            "id": self._id,
            "client_id": client_id(self._http_request),
            "model": (self._request.model or "")[:VALUE_CHARACTERS_MAX],
            "names": record.names if record is not None and is_routed else (),
            "age_s": round(monotonic() - self._arrived_s, 3),
            "waits_for": "" if self._progress.has_begun and is_routed else waits_for,
            "num_tokens": self._progress.num_tokens,
            "num_failures": self._num_failures,
        }

    async def respond(self) -> web.StreamResponse:
        """The response; raises an ApiError where nothing has gone to the client."""
        try:
            return await self._respond()
        except ApiError as error:
            self._count_failure(error)
            if self._last_failure is None and error.status in RETRIED_STATUSES:  # no instance was given it
                record = AttemptRecord((), "")
                record.fail(_cause(error), error.message)
                self._router.log.add_failure(self._id, record)
            if not self._progress.has_begun:
                raise
            return await self._stream.fail(error)
        except (ConnectionError, asyncio.CancelledError):
            self._router.metrics.count("disconnects", self._model)
            raise

    @property
    def _model(self) -> str:
        """As metrics name it; the fleet is searched for it only where no instance was chosen."""
        if MODEL not in self._http_request:
            self._http_request[MODEL] = self._router.fleet.model_name(self._request.model)
        return self._http_request[MODEL]

    def _count_failure(self, error: ApiError) -> None:
        model = self._model  # the response is counted by it, failure or not
        if self._is_failure(error):
            self._router.metrics.count("given_up", model, _cause(error))

    def _is_failure(self, error: ApiError) -> bool:
        """Whether the request failed; one that was refused, as wrong or for lack of room, did not."""
        return error.status >= 500 or self._progress.has_begun

    async def _respond(self) -> web.StreamResponse:
        router, metrics = self._router, self._router.metrics
        while True:
            last = self._last_failure
            # A request with a stream under way waits rather than lose it.
            is_strict = last is not None and last.error.status == 429 and not self._progress.has_begun
            asked_s = monotonic()
            num_streamed = self._progress.num_tokens if self._progress.has_begun else 0
            full = frozenset[str]() if self._progress.has_begun else self._full
            constraints = RouteConstraints(self._avoid, full, is_strict, num_streamed)
            route = await router.queue.route(self._request, constraints)
            if route.server.role is not Role.PREFILL:  # whose own name need not be that of /v1/models
                self._http_request[MODEL] = route.server.model
            waited_s = monotonic() - asked_s
            metrics.waits.observe(waited_s, self._model)
            self._began_s += waited_s
            try:
                return await self._attempt(route)
            except AttemptFailed as failed:
                is_resume = self._progress.has_begun
                self._note_failure(failed)
                if is_resume and self._progress.is_finished:
                    return await self._stream.end(self._missing_end(failed))
                if not self._can_retry(failed):
                    return self._give_up(failed)
                problem = router.wire.resume_problem(self._request, self._progress) if is_resume else ""
                if problem:
                    error = failed.error
                    text = f"{error.message}; the stream cannot be resumed: {problem}"
                    raise ApiError(error.status, text, param=error.param, code=error.code) from None
                wait_s = self._retry_wait_s(failed.error, is_resume=is_resume)
                self._log_attempt(failed, "the stream is resumed" if is_resume else "it is tried again")
            metrics.count("resumes" if is_resume else "retries", self._model)
            await asyncio.sleep(wait_s)

    async def _attempt(self, route: ChosenRoute) -> web.StreamResponse:
        router, request = self._router, self._request
        source = None if route.prefill is None else route.prefill.coordinator
        requests = router.wire.requests(request, self._progress, source)
        stream_filter = requests.stream_filter
        queue_s_max = None if self._progress.has_begun else router.config.limits.queue_s_max
        attempt = Attempt(router, route, requests, queue_s_max)
        self._http_request[ROUTE] = route.text
        record = self._record = AttemptRecord(route.names, route.local_reason, stream_filter is not None)
        router.log.add(self._id, record)
        if route.prefill is not None:
            router.metrics.count("handoffs", self._model)
        elif route.local_reason:
            router.metrics.count("local_prefills", self._model, route.local_reason)
        is_answered = False
        try:
            added_s = monotonic() - self._began_s
            upstream = await attempt.send()
            record.answered_s, answered_s = time.time(), monotonic()
            if stream_filter is not None:
                response = await self._respond_stream(attempt, stream_filter, upstream, answered_s - added_s)
            else:
                whole = await attempt.server.read_all()
                attempt.prompt_tokens = attempt.prompt_tokens or _usage(whole[-1024:])
                router.metrics.added.observe(added_s + monotonic() - answered_s, self._model)
                content_type = upstream.headers.get("Content-Type", "application/octet-stream")
                headers = {"Content-Type": content_type, ID_HEADER: self._id, **NO_STORE}
                response = web.Response(body=whole, headers=headers)
            is_answered = True
            if not request.prompt.is_ids:
                router.chooser.token_size.add(len(request.prompt.raw), attempt.prompt_tokens)
            return response
        except (AttemptFailed, UpstreamError) as error:
            failed = error if isinstance(error, AttemptFailed) else _lost(route.server, error)
            record.fail(_cause(failed.error), failed.error.message)
            if self._is_failure(failed.error) or failed.error.status in RETRIED_STATUSES:
                router.log.add_failure(self._id, record)
            raise failed from None
        finally:
            self._prompt_tokens = self._prompt_tokens or attempt.prompt_tokens
            record.ended_s = time.time()
            attempt.end(is_answered=is_answered)
            router.queue.wake()

    async def _respond_stream(
        self,
        attempt: Attempt,
        stream_filter: StreamFilter,
        upstream: RawResponseMessage,
        added_from_s: float,
    ) -> web.StreamResponse:
        stream, server, name = self._stream, attempt.server, attempt.route.server.name
        content_type = upstream.headers.get("Content-Type", "")
        if not content_type.startswith(EVENT_STREAM):
            text = f"instance {name} answered {content_type!a}, not a stream"
            raise AttemptFailed(ApiError(502, text), name)
        while data := await server.read():
            events, response = stream_filter.feed(data), None
            is_first = bool(events) and not self._progress.has_begun
            self._progress.has_begun |= is_first
            if stream_filter.is_done:
                response = await stream.end(events)
            elif events:
                await stream.write(events)
            if is_first:
                self._router.metrics.added.observe(monotonic() - added_from_s, self._model)
            if events:
                # Tokens have come: earlier failures do not count any more.
                self._num_in_row, self._avoid, self._full = 0, frozenset(), frozenset()
            if stream_filter.error is not None:
                raise attempt.failed_stream(stream_filter.error)
            if response is not None:
                if not server.is_complete:
                    with suppress(TimeoutError, UpstreamError, AttemptFailed):  # the client has everything
                        async with asyncio.timeout(STREAM_END_S):
                            while await server.read():
                                pass
                return response
        raise AttemptFailed(ApiError(502, f"instance {name} ended its stream too early", code="ENDED"), name)

    def _note_failure(self, failed: AttemptFailed) -> None:
        if self._is_failure(failed.error):
            self._router.metrics.count("failures", self._model, _cause(failed.error))
        instances = self._router.fleet.instances
        for instance in [instances[name] for name in failed.blamed if name in instances]:
            if failed.error.code in ENDED_CODES:
                instance.doubt(failed.error.message)
            else:
                instance.wake()
        self._last_failure = failed
        if not self._num_in_row:
            self._failed_s = monotonic()
        self._num_in_row += 1
        self._num_failures += 1
        self._avoid |= failed.blamed
        if failed.error.status == 429:
            self._full |= failed.blamed
        else:
            self._full -= failed.blamed

    def _log_attempt(self, failed: AttemptFailed, remedy: str) -> None:
        names, num_tokens = ", ".join(sorted(failed.blamed)) or "no instance", self._progress.num_tokens
        reason = log_reason(failed.error) or str(failed.error.status)
        fields = {"event": "retry", "request": self._id, "instances": names, "cause": _cause(failed.error)}
        _log.log(
            logging.WARNING if self._is_failure(failed.error) else logging.INFO,
            "request %s: %s failed after %d tokens (%s); %s",
            *(self._id, names, num_tokens, reason, remedy),
            extra={"fields": {**fields, "num_tokens": num_tokens}},
        )

    def _can_retry(self, failed: AttemptFailed) -> bool:
        """A request that is itself wrong stays wrong and is not retried."""
        limits = self._router.config.limits
        return (
            failed.error.status in RETRIED_STATUSES
            and failed.error.code != "QUEUE_TIMEOUT"
            and self._num_in_row < limits.num_attempts_max
            and self._num_failures <= limits.num_resumes_max
            and monotonic() - self._failed_s < limits.retry_s_max
        )

    def _retry_wait_s(self, error: ApiError, *, is_resume: bool) -> float:
        """The pause before the next attempt: exponential, with jitter."""
        most_s = min(RETRY_S_MAX, RETRY_S_FIRST * float(4**self._num_in_row))
        if is_resume and error.code in FULL_CODES:
            most_s = FULL_S
        return most_s * (1 + random.random()) / 2

    def _give_up(self, failed: AttemptFailed) -> web.Response:
        """The instance's own error response, or an ApiError in its place."""
        error = failed.error
        if failed.raw is None or self._progress.has_begun or error.retry_after_s is not None:
            raise error
        self._count_failure(error)
        self._http_request[FAILURE] = log_reason(error)
        return web.Response(body=failed.raw, status=error.status, headers=JSON_HEADERS)

    def _missing_end(self, failed: AttemptFailed) -> bytes:
        """The end of a stream whose choices are all finished."""
        if not self._request.wants_usage or self._progress.has_usage:
            return DONE
        if not self._prompt_tokens or not self._progress.is_exact:
            raise failed.error
        num_completion = sum(self._progress.done.values())
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": num_completion,
            "total_tokens": self._prompt_tokens + num_completion,
        }
        kind = "chat.completion.chunk" if self._request.path == CHAT_PATH else "text_completion"
        event = {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}
        return data_event(msgspec.json.encode({**event, "choices": [], "usage": usage})) + DONE


# ---- waiting for room


class NoInstance(Exception):  # noqa: N818  (a state of the fleet, not an error)
    """No instance is able to answer; the text says what is missing."""


class AllFull(Exception):  # noqa: N818  (a state of the fleet, not an error)
    """Every instance that could answer is at its limit."""


class RouteConstraints(msgspec.Struct, frozen=True):
    """Constraints of one attempt, besides those of the request."""

    avoid: frozenset[str] = frozenset()
    """Instances that failed this request; used again only where there is no other."""
    full: frozenset[str] = frozenset()
    """Those of them that only had no room: the other side does not do their work."""
    is_strict: bool = False
    """Not even then."""
    num_streamed: int = 0
    """Tokens that are prefilled besides the prompt."""


@dataclass(slots=True)
class ModelQueue:
    """The requests that wait for an instance of one model, oldest first."""

    turns: deque[asyncio.Event] = field(default_factory=deque)
    absent_s: float | None = None
    """Since when no instance is able."""


class RouteQueue:
    """Requests that wait for an instance with room: one queue per model, served first come, first served."""

    def __init__(self, chooser: RouteChooser, limits: RouterLimits) -> None:
        self.num_waiting = 0
        self._chooser = chooser
        self._limits = limits
        self._queues: dict[str | None, ModelQueue] = {}

    async def route(self, request: RoutableRequest, constraints: RouteConstraints) -> ChosenRoute:
        """A route, for an attempt that begins at once.

        Raises an ApiError where too many requests wait (429), or where no instance is able (503).
        """
        if request.model not in self._queues:
            with suppress(NoInstance, AllFull):
                return self._choose(request, constraints)
        if self.num_waiting >= self._limits.num_waiting_max:
            raise _queue_full(f"{self.num_waiting} requests wait already")
        queue = self._queues.setdefault(request.model, ModelQueue())
        turn = asyncio.Event()
        queue.turns.append(turn)
        self.num_waiting += 1
        limit_s = None if constraints.num_streamed else self._limits.queue_s_max
        try:
            async with asyncio.timeout(limit_s):
                return await self._wait_turn(queue, turn, request, constraints)
        except TimeoutError:
            text = f"no instance had room within {limit_s:g} s (--queue-timeout)"
            raise failure("QUEUE_TIMEOUT", f"{text}; ask again later, or add instances") from None
        finally:
            self.num_waiting -= 1
            queue.turns.remove(turn)
            if queue.turns:
                queue.turns[0].set()
            else:
                self._queues.pop(request.model, None)

    def wake(self) -> None:
        """An instance has room, or has changed."""
        for queue in self._queues.values():
            queue.turns[0].set()

    def _choose(self, request: RoutableRequest, constraints: RouteConstraints) -> ChosenRoute:
        try:
            return self._chooser.choose(request, constraints)
        except AllFull:
            if constraints.is_strict:
                raise _queue_full("every instance has as many requests as it takes") from None
            raise

    async def _wait_turn(
        self,
        queue: ModelQueue,
        turn: asyncio.Event,
        request: RoutableRequest,
        constraints: RouteConstraints,
    ) -> ChosenRoute:
        while True:
            while queue.turns[0] is not turn:
                turn.clear()
                await turn.wait()
            wait_s = QUEUE_RETRY_S
            try:
                return self._choose(request, constraints)
            except AllFull:
                queue.absent_s = None
            except NoInstance as reason:
                queue.absent_s = queue.absent_s or monotonic()
                left_s = queue.absent_s + self._limits.recover_s_max - monotonic()
                if left_s <= 0:
                    raise failure("NO_INSTANCE", f"{reason}; try again") from None
                wait_s = min(wait_s, left_s)
            turn.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await turn.wait()


def _queue_full(text: str) -> ApiError:
    return failure("QUEUE_FULL", f"{text}; try again later")


# ---- choosing the instances


class ChosenRoute(msgspec.Struct, frozen=True):
    """The instance that answers, the one that prefills for it if any, and the tokens charged to each."""

    server: FleetInstance
    prefill: FleetInstance | None
    local_reason: str
    """Why it is not handed over; empty where it is."""
    server_tokens: int
    prefill_tokens: int

    @property
    def instances(self) -> tuple[FleetInstance, ...]:
        return (self.server,) if self.prefill is None else (self.server, self.prefill)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(instance.name for instance in self.instances)

    @property
    def text(self) -> str:
        """The instances and their layouts, in the order of the work."""
        places = [place for place in (self.prefill, self.server) if place is not None]
        return " to ".join(f"{place.name} ({place.roster.layout})" for place in places)

    @property
    def local_tokens(self) -> int:
        """Of a prompt that the decode instance prefills although there is one for that."""
        return self.prefill_tokens if self.local_reason in ("short", "cached") else 0


class RouteChooser:
    """Applies policies to the able instances of a fleet."""

    def __init__(self, fleet: Fleet, config: RouterConfig) -> None:
        self.prefixes = PrefixIndex()
        self.token_size = TokenSize()
        self._fleet = fleet
        self._mode = config.local
        self.config = config
        self._prefill_policy = Policy(config.prefill_policy)
        self._decode_policy = Policy(config.decode_policy)

    def choose(self, request: RoutableRequest, constraints: RouteConstraints) -> ChosenRoute:
        """Raises NoInstance or AllFull where there is no route now, an ApiError where there cannot be one."""
        able = self.of_model(request.model)
        choice = _Choice(self, request, constraints)
        prefills: list[FleetInstance] = []
        servers: list[FleetInstance] = []
        for instance in able:
            (prefills if instance.role is Role.PREFILL else servers).append(instance)
        servers = _with_dp_group(servers, request.dp_field, request.dp_rank)
        prefills = _with_dp_group(prefills, "disagg_prefill_dp_rank", request.prefill_dp_rank)
        is_one_token = request.num_tokens_max == 1 and request.dp_rank is None
        if is_one_token and prefills and self._mode is not LocalMode.ALWAYS:
            return choice.route(choice.choose(prefills, self._prefill_policy), None, "one_token")
        if not request.can_hand_off and servers:
            return choice.route(choice.choose(servers, self._decode_policy), None, "form")
        paired = self._with_prefill(servers, choice.preferred(prefills))
        can_fall_back = self._mode is not LocalMode.NEVER
        if paired and (choice.preferred(paired) or not can_fall_back):
            return self._pair(choice, paired, prefills)
        if can_fall_back and choice.preferred(servers) and not choice.has_full(prefills):
            return choice.route(choice.choose(servers, self._decode_policy), None, "no_prefill")
        if can_fall_back and choice.preferred(prefills) and not choice.has_full(servers):
            return choice.route(choice.choose(prefills, self._prefill_policy), None, "no_decode")
        paired = [] if constraints.is_strict else self._with_prefill(servers, prefills)
        if paired:
            return self._pair(choice, paired, prefills)
        if can_fall_back and able and not constraints.is_strict:
            # It has failed this request, and is all that is left: perhaps for its peer's fault.
            reason = "no_prefill" if servers else "no_decode"
            policy = self._decode_policy if servers else self._prefill_policy
            return choice.route(choice.choose(servers or prefills, policy), None, reason)
        if constraints.is_strict and able:
            raise AllFull
        raise NoInstance(self._fleet.missing() or "every able instance has just failed")

    def of_model(self, wanted: str | None) -> list[FleetInstance]:
        """The able instances of a model; there may be none at the moment.

        The name is that of the instances which answer. Prefill instances are found by their fingerprint; so
        are the others, where only prefill has the name.
        """
        able = self._fleet.able()
        if wanted is not None:
            named = {instance for instance in able if instance.serves(wanted)}
            fingerprints = {instance.fingerprint for instance in named}
            has_server = any(instance.role is not Role.PREFILL for instance in named)
            if named:
                return [
                    instance
                    for instance in able
                    if instance in named
                    or (
                        instance.fingerprint in fingerprints
                        and not instance.health.info.models  # of vLLM, where an adapter is a name too
                        and (instance.role is Role.PREFILL or not has_server)
                    )
                ]
        known = [instance for instance in self._fleet.instances.values() if instance.model]
        servers = [instance for instance in known if instance.role is not Role.PREFILL]
        names = {name for instance in servers or known for name in instance.models}
        if wanted is not None and any(instance.serves(wanted) for instance in known):
            return []
        fingerprints = {instance.fingerprint for instance in known}
        if wanted is None and min(len({instance.model for instance in known}), len(fingerprints)) < 2:
            return able
        if not names:
            raise NoInstance(self._fleet.missing())
        listed = ", ".join(sorted(names))
        if wanted is None:
            raise ApiError(400, f"model is missing; name one of {listed}", param="model")
        text = f"model {wanted!a} is not served here; use one of {listed}"
        raise ApiError(404, text, param="model", code="model_not_found")

    def _with_prefill(
        self, servers: Sequence[FleetInstance], prefills: Sequence[FleetInstance]
    ) -> list[FleetInstance]:
        """The servers that answer alone by their role, or have a prefill instance of their model."""
        if self._mode is LocalMode.ALWAYS:
            return list(servers)
        given = {cache for instance in prefills for cache in instance.identity.gives}
        return [server for server in servers if server.role is Role.BOTH or server.needs in given]

    def _pair(
        self, choice: _Choice, servers: Sequence[FleetInstance], prefills: Sequence[FleetInstance]
    ) -> ChosenRoute:
        server = choice.choose(servers, self._decode_policy)
        if server.role is Role.BOTH or self._mode is LocalMode.ALWAYS:
            return choice.route(server, None, "" if server.role is Role.BOTH else "always")
        needs = server.needs
        same = [instance for instance in prefills if needs in instance.identity.gives]
        prefill = choice.choose(same, self._prefill_policy)
        can_be_local = self._mode is LocalMode.AUTO and not choice.names_prefill
        reason = choice.local_reason(prefill, server) if can_be_local else ""
        return choice.route(server, None if reason else prefill, reason)


def _with_dp_group(instances: list[FleetInstance], param: str, rank: int | None) -> list[FleetInstance]:
    """The instances that have the DP group which a request names."""
    if rank is None or not instances:
        return instances
    chosen = [instance for instance in instances if 0 <= rank < instance.num_dp_groups]
    if not chosen:
        most = max(instance.num_dp_groups for instance in instances)
        raise bad_field(param, rank, f"give a DP group from 0 to {most - 1}")
    return chosen


class _Choice:
    """One choice: the request's estimates, and which instances are preferred for it."""

    def __init__(
        self, chooser: RouteChooser, request: RoutableRequest, constraints: RouteConstraints
    ) -> None:
        self._chooser = chooser
        self._constraints = constraints
        self.names_prefill = request.prefill_dp_rank is not None
        prompt = request.prompt
        self._num_bytes = max(1, len(prompt.raw))
        self._num_tokens = prompt.num_tokens(chooser.token_size.bytes_per_token) + constraints.num_streamed
        completion = min(request.num_tokens_max or COMPLETION_TOKENS, COMPLETION_TOKENS)
        self._num_completion_tokens = completion * request.num_choices
        self._hashes = chooser.prefixes.hashes(prompt) if request.num_prompts == 1 else ()

    def preferred(self, instances: Sequence[FleetInstance]) -> Sequence[FleetInstance]:
        """The instances that have not failed this request."""
        avoid = self._constraints.avoid
        return [instance for instance in instances if instance.name not in avoid] if avoid else instances

    def has_full(self, instances: Sequence[FleetInstance]) -> bool:
        """Whether one of them had no room for this request."""
        return any(instance.name in self._constraints.full for instance in instances)

    def choose(self, instances: Sequence[FleetInstance], policy: Policy) -> FleetInstance:
        """The policy's choice among the preferred instances that have room; silent ones come last."""
        allowed = self.preferred(instances) or (() if self._constraints.is_strict else instances)
        now_s, num_max = monotonic(), self._chooser.config.limits.num_in_flight_max
        fresh = [instance for instance in allowed if instance.is_fresh(now_s)] or allowed
        roomy = [instance for instance in fresh if instance.has_room(num_max, now_s)]
        if not roomy:
            raise AllFull
        if len(roomy) == 1:
            return roomy[0]
        return policy.choose(roomy, self._new_tokens)

    def local_reason(self, prefill: FleetInstance, server: FleetInstance) -> str:
        new = self._new_tokens
        most = self._chooser.config.local_prefill_max
        return local_reason(prefill, server, self._num_tokens, new(prefill), new(server), most)

    def route(self, server: FleetInstance, prefill: FleetInstance | None, reason: str) -> ChosenRoute:
        """The route; its instances will have this prompt's prefix."""
        prefill_tokens = self._new_tokens(prefill or server)
        for instance in (server, prefill):
            if instance is not None and self._hashes:
                self._chooser.prefixes.add(instance.name, self._hashes)
        server_tokens = self._num_tokens + self._num_completion_tokens
        return ChosenRoute(server, prefill, reason, server_tokens, prefill_tokens)

    def _new_tokens(self, instance: FleetInstance) -> int:
        """Of the prompt, what this instance would have to compute."""
        if not self._hashes:
            return self._num_tokens
        matched = self._chooser.prefixes.matched_bytes(instance.name, self._hashes)
        return max(1, round(self._num_tokens * (1 - min(matched, self._num_bytes) / self._num_bytes)))


# ---- one attempt


class Attempt:
    """The requests of one attempt."""

    def __init__(
        self,
        router: Router,
        route: ChosenRoute,
        requests: UpstreamRequests,
        queue_s_max: float | None = None,
    ) -> None:
        self.route = route
        self._router = router
        self._requests = requests
        self._queue_s_max = queue_s_max
        self.server = self._request(route.server, route.server_tokens, route.local_tokens)
        """To the instance that answers."""
        if requests.stream_filter is not None:  # else its first token cannot be told from its last
            self.server.queue_s_max = queue_s_max
        self.prompt_tokens = 0
        """As the prefill instance counted them; 0 while it has not reported."""
        self._prefill: UpstreamRequest | None = None
        self._is_over = False

    def _request(
        self, instance: FleetInstance, num_tokens: int, num_local_tokens: int = 0
    ) -> UpstreamRequest:
        router, instances = self._router, self.route.instances
        limits = router.config.limits
        request = UpstreamRequest(router.client, instance, limits, instances, num_tokens, num_local_tokens)
        request.has_progress_reports = router.wire.has_progress_reports
        return request

    async def send(self) -> RawResponseMessage:
        """Sends both requests; returns the response's headers, or raises AttemptFailed or UpstreamError."""
        router, prefill, requests = self._router, self.route.prefill, self._requests
        if prefill is not None and requests.num_jobs:
            self._prefill = self._request(prefill, self.route.prefill_tokens)
            self._prefill.queue_s_max = self._queue_s_max
            task = asyncio.create_task(self._run_prefill(self._prefill))
            router.prefill_tasks.add(task)
            task.add_done_callback(router.prefill_tasks.discard)
        response = await self.server.send(requests.path, requests.server_body)
        if response.code != 200:
            raise self._refused(self.route.server, response, await self.server.read_all(KEPT_BYTES_MAX))
        return response

    async def _run_prefill(self, upstream: UpstreamRequest) -> None:
        failed, requests, instance = None, self._requests, upstream.instance
        try:
            response = await upstream.send(requests.path, requests.prefill_body)
            kept = await upstream.read_all(KEPT_BYTES_MAX, drops_rest=True)
            if response.code == 200:
                self.prompt_tokens = _prompt_tokens(response, kept)
            else:
                failed = self._refused(instance, response, kept)
        except AttemptFailed as error:
            failed = error
        except UpstreamError as error:
            failed = _lost(instance, error)
        finally:
            upstream.close()
            self._router.queue.wake()
        # Once decode has all that it needs, a failure of prefill changes nothing.
        if failed is not None and not self._is_over and not self._is_admitted():
            self.server.fail(failed)

    def _is_admitted(self) -> bool:
        if self._requests.stream_filter is not None:
            return self._requests.stream_filter.are_admitted(self._requests.num_jobs)
        return self.server.response is not None

    def end(self, *, is_answered: bool) -> None:
        """Ends what is left; a prefill request whose cache has arrived may finish by itself."""
        self._is_over = True
        self.server.close()
        if self._prefill is not None and is_answered:
            self._prefill.expires_s = monotonic() + LINGER_S
        elif self._prefill is not None:
            self._prefill.close()

    def _refused(self, instance: FleetInstance, response: RawResponseMessage, body: bytes) -> AttemptFailed:
        """The instance answered with a status that is not a success."""
        wire = self._router.wire
        error = read_error(wire.status(response.code), body, response.headers.get("Retry-After"))
        if error.status in (401, 403):
            # The client's key was good: the instance does not accept the router's.
            text = f"instance {instance.name} refuses the router: {error.message}; {wire.key_remedy}"
            return AttemptFailed(failure("REFUSED_AUTHENTICATION", text), instance.name)
        if error.status == 429:
            instance.full_until_s = monotonic() + min(error.retry_after_s or FULL_S, FULL_S)
        return AttemptFailed(error, *_blamed(self.route, instance, error), raw=body)

    def failed_stream(self, event: bytes) -> AttemptFailed:
        """The stream ended with an error event."""
        sent = read_error(502, event)
        status = STATUSES.get(sent.code or "", 500 if sent.code else 502)
        error = ApiError(status, sent.message, param=sent.param, code=sent.code)
        server = self.route.server
        # Without a cause, only the hand-over has two ends.
        is_servers = error.code is None and self._is_admitted()
        blamed = (server.name,) if is_servers else _blamed(self.route, server, error)
        return AttemptFailed(error, *blamed, raw=event)


def _prompt_tokens(response: RawResponseMessage, body: bytes) -> int:
    header = response.headers.get(PROMPT_TOKENS_HEADER, "")
    return int(header) if header.isascii() and header.isdigit() and len(header) < 10 else _usage(body)


def _usage(body: bytes) -> int:
    """The prompt tokens in a response's usage; in text quotes are escaped, so no text looks like it."""
    matches = _PROMPT_TOKENS.findall(body)
    return int(matches[-1]) if matches else 0


def _lost(instance: FleetInstance, error: UpstreamError) -> AttemptFailed:
    """The request to this instance ended without a response."""
    code = error.code if error.code in STATUSES else "PEER_LOST"
    text = f"instance {instance.name}: {error.text}"
    return AttemptFailed(ApiError(STATUSES[code], text, code=code), instance.name)


def _blamed(route: ChosenRoute, instance: FleetInstance, error: ApiError) -> tuple[str, ...]:
    """A hand-over has two ends: the one that lost its peer is not the one to avoid."""
    if error.status != 502 or error.code == "ENDED":
        return (instance.name,)
    if error.code == "PEER_LOST":
        return tuple(name for name in route.names if name != instance.name) or (instance.name,)
    return route.names


class UpstreamRequest:
    """One request to one instance, read by one task; `fail` wakes that task with a cause.

    The instance is charged for it until it is closed, and with `num_local_tokens` until its first token.
    """

    def __init__(
        self,
        client: UpstreamClient,
        instance: FleetInstance,
        limits: RouterLimits,
        instances: Sequence[FleetInstance] = (),
        num_tokens: int = 0,
        num_local_tokens: int = 0,
    ) -> None:
        """`instances` are those of the attempt: while either computes, it may have the request queued."""
        self.instance = instance
        self.response: RawResponseMessage | None = None
        """Once its headers are there."""
        self.is_waiting = False
        """Whether the instance is to blame for silence: more is wanted, and nothing has come."""
        self.expires_s = float("inf")
        """When it is ended, whatever its progress."""
        self.has_progress_reports = True
        """Whether its instances report what they compute, so that a queue that stands still can be seen."""
        self.queue_s_max: float | None = None
        """Without such reports: how long its first token may take."""
        self._has_data = False
        """Whether a part of the body has come: a server may send the headers before the first token."""
        self._progress_s = monotonic()
        """Since when the current wait lasts."""
        self._client = client
        self._instances = instances
        self._limits = limits
        self._num_tokens = num_tokens
        self._num_local_tokens = num_local_tokens
        self._error: UpstreamError | AttemptFailed | None = None
        self._connecting: asyncio.Timeout | None = None
        self._connection: Connection | None = None
        """While it is in use: from the first byte of the request to the last one of the response."""
        self._target: PostTarget
        self._content: aiohttp.StreamReader
        instance.upstreams.add(self)
        instance.charge(1, num_tokens)
        instance.num_local_tokens += num_local_tokens

    async def send(self, path: str, body: bytes) -> RawResponseMessage:
        """Returns when the response's headers are there; raises UpstreamError, or what `fail` was given."""
        if self._error is not None:
            raise self._error
        self.is_waiting, self._progress_s = True, monotonic()
        target = self._target = self._client.target(self.instance.base, path, self.instance.headers)
        try:
            connection = target.take()
            if connection is None:
                async with asyncio.timeout(None) as self._connecting:
                    connection = await self._client.connect(target)
                self._connecting = None
                if self._error is not None:  # `fail` came when the connection was there already
                    connection.close()
                    raise self._error
            self._connection = connection
            protocol, transport = connection.protocol, connection.transport
            if protocol is None or transport is None:
                raise aiohttp.ClientConnectionError("it was closed")
            transport.write(b"%b%d\r\n\r\n%b" % (target.head, len(body), body))
            response, content = await protocol.read()
            while response.code < 200:  # an interim response
                response, content = await protocol.read()
        except (TimeoutError, aiohttp.ClientError, OSError, HttpProcessingError) as error:
            raise self._error or UpstreamError.of(error) from None
        finally:
            self.is_waiting, self._connecting = False, None
        self.response, self._content = response, content
        self.release_local()
        content.on_eof(self._release)
        return response

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has come; some of it may not have been read yet."""
        return self.response is not None and self._connection is None

    def _release(self) -> None:
        """The response is complete: the connection can be used again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._target.put(connection)

    async def read(self) -> bytes:
        """The next part of the body; empty at its end."""
        if self._error is not None:
            raise self._error
        content = self._content
        try:
            if content.is_eof():  # the rest is there
                return content.read_nowait()
            self.is_waiting, self._progress_s = True, monotonic()
            data = await content.readany()
            self._has_data = True
            return data
        except (aiohttp.ClientError, OSError) as error:
            raise self._error or UpstreamError.of(error) from None
        finally:
            self.is_waiting = False

    async def read_all(self, bytes_max: int = RESPONSE_BYTES_MAX, *, drops_rest: bool = False) -> bytes:
        """The whole body; one that is longer is an error, or is cut off."""
        parts: list[bytes] = []
        num_bytes = 0
        while part := await self.read():
            if num_bytes < bytes_max or not drops_rest:
                parts.append(part)
            num_bytes += len(part)
            if num_bytes > bytes_max and not drops_rest:
                raise UpstreamError(f"the response is longer than {bytes_max} bytes")
        return b"".join(parts)

    def fail(self, error: UpstreamError | AttemptFailed) -> None:
        """Ends it at once; the task that reads it gets this error."""
        if self._error is None:
            self._error = error
        connection, self._connection = self._connection, None
        if self._connecting is not None:
            self._connecting.reschedule(asyncio.get_running_loop().time())
        if connection is not None:
            reader = connection.protocol if self.response is None else self._content
            if reader is not None:
                reader.set_exception(aiohttp.ClientConnectionError("the request was ended"))
            connection.close()

    def close(self) -> None:
        """Ends it if it is not over: the instance notices, aborts the request and is not charged any more."""
        if not self.is_complete:
            self.fail(UpstreamError("the router ended the request", "ABORTED"))
        self.release_local()
        if self in self.instance.upstreams:
            self.instance.upstreams.discard(self)
            self.instance.charge(-1, -self._num_tokens)

    def release_local(self) -> None:
        """The first token is there, or will not come: a local prefill delays no stream any more."""
        self.instance.num_local_tokens -= self._num_local_tokens
        self._num_local_tokens = 0

    def check(self, now_s: float, unheard_s: float) -> None:
        """Ends it if it has expired or made no progress for too long; called after each poll."""
        limits, silent_s, name = self._limits, now_s - self._progress_s, self.instance.name
        if now_s > self.expires_s:
            self.close()
        elif not self.is_waiting:
            return
        elif min(silent_s, unheard_s) > limits.silence_s_max:
            text = f"{name} has not responded for {unheard_s:.0f} s"
            self.fail(UpstreamError(text, "DEADLINE"))
        elif not self.has_progress_reports and not self._has_data:
            self._check_queued(now_s, silent_s)
        else:
            if self.response is not None:
                stuck_s, stuck_s_max = silent_s, limits.stall_s_max
            else:
                idle_s = now_s - max((instance.health.moved_s for instance in self._instances), default=-inf)
                stuck_s, stuck_s_max = min(silent_s, idle_s), limits.first_s_max
            if stuck_s > stuck_s_max:
                text = f"{name} has made no progress for {stuck_s:.0f} s"
                self.fail(UpstreamError(text, "DEADLINE"))

    def _check_queued(self, now_s: float, silent_s: float) -> None:
        """It may be in a queue that moves, of an instance that does not report it: health alone counts."""
        health, name = self.instance.health, self.instance.name
        unhealthy_s = now_s - health.healthy_s
        if min(silent_s, unhealthy_s) > self._limits.silence_s_max:
            text = f"{name} has been unhealthy for {unhealthy_s:.0f} s: {health.problem}"
            self.fail(UpstreamError(text, "DEADLINE"))
        elif self.queue_s_max is not None and silent_s > self.queue_s_max:
            error = failure(
                "QUEUE_TIMEOUT", f"no token from {name} within {silent_s:.1f} s (--queue-timeout)"
            )
            self.fail(AttemptFailed(error, name))
