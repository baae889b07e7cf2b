"""`baton serve`: one instance behind HTTP. It listens at once, loads, serves, and drains before it ends.

`Server._generate` is the handler. It reads and parses the body (`baton.serving.openai`) into jobs. A
`Generation` submits them to the instance, whose events come back through the `EventBridge`, and writes the
response. The response headers go out with the first token, so that a failure before it has a status of its
own. After that, each wake-up sends everything that has arrived in one write.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton import __version__
from baton.engine.config import EngineConfig
from baton.engine.instance import Instance
from baton.engine.load import EngineLoad
from baton.engine.requests import OutputChunk, RequestError, RequestEvent, RequestFinished
from baton.engine.sampling_params import STATED_DEFAULTS
from baton.errors import ConfigError, ContextError, EngineError, FullError, for_clients
from baton.protocol.outcomes import Cause, Stage, Why
from baton.serving.http import (
    CALLER,
    DONE,
    DRAIN_S,
    EVENT_STREAM,
    HOST,
    ID_HEADER,
    NO_STORE,
    PROMPT_TOKENS_HEADER,
    REQUEST_ID,
    ApiError,
    Credentials,
    EventStream,
    HttpLimits,
    HttpServer,
    OpenRequests,
    TokenNote,
    bad_field,
    data_event,
    failure,
    json_response,
    note_line,
    route_pattern,
    run_until_signal,
)
from baton.serving.observing import RecordedRequest, RequestObserver
from baton.serving.openai import (
    TOO_LONG,
    CachedTokens,
    ChatRequest,
    ChoiceDelta,
    CompletionRequest,
    DetokenizeRequest,
    DrainBody,
    GenerateRequest,
    HealthBody,
    ModelCard,
    ModelList,
    ParsedRequest,
    RequestBody,
    ResponseFormat,
    ServedModel,
    TokenizeRequest,
    Usage,
    check_model,
    claimed_id,
    parse_request,
    read_hints,
    reader_of,
    response_format,
)
from baton.serving.openapi import description
from baton.serving.supervisor import InstanceSupervisor
from baton.serving.tool_calls import PARSERS
from baton.settings import Tls, check_binding

FIRST_TOKEN = ("prefill", "decode")
TIMELINE_FORMATS = ("json", "perfetto")
CLOSE_S = 10.0
LOST_S = 1.0
"""How long an instance that ended is given to report it to its requests itself."""
USAGE_S_MAX = 0.2
"""How long a response waits for the number of cached tokens, which is known when its pages are freed."""
WRITE_S_MAX = 30.0
NUM_HELD_MAX = 16
"""Tokens of a choice that wait until there is something to show of them."""

OnEvent = Callable[[RequestEvent], None]

_encoder = msgspec.json.Encoder()
_read_tokenize, _read_detokenize = reader_of(TokenizeRequest), reader_of(DetokenizeRequest)
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
    served_model_name: str = ""
    """The model's name in the API; empty: `instance.model`."""
    tool_call_parser: str = "auto"
    limits: HttpLimits = field(default_factory=HttpLimits)
    tls: Tls | None = None
    """For HTTPS; the instance has its own for control links."""

    def __post_init__(self) -> None:
        if self.first_token not in FIRST_TOKEN:
            raise ConfigError(
                f"first token {self.first_token!r} is not known; use {' or '.join(FIRST_TOKEN)}"
            )
        if self.tool_call_parser not in PARSERS:
            raise ConfigError(
                f"tool call parser {self.tool_call_parser!r} is not known; use one of {', '.join(PARSERS)}"
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
        self.ended = asyncio.Event()
        """Set when the supervisor has given up."""
        self._loop = asyncio.get_running_loop()
        self._bridge = EventBridge(self._loop)
        self._model_name = config.served_model_name or instance.model
        self._observer = RequestObserver(instance.name, instance.role, instance.layout, self._model_name)
        self._created = int(time.time())
        self._running: tuple[Instance, ServedModel] | None = None
        """The latest instance, and what requests need of it."""
        self.open = OpenRequests[Generation]()
        """Those that hold something of an instance."""
        self._http = HttpServer(
            Credentials(config.api_keys, instance.secret or None),
            config.limits,
            ssl_context=None if config.tls is None else config.tls.serving(),
            on_response=lambda request, status: self._observer.metrics.add_response(
                route_pattern(request), status
            ),
        )
        generate = self._generate
        self._http.app.add_routes(
            [
                web.post("/v1/completions", partial(generate, reader_of(CompletionRequest))),
                web.post("/v1/chat/completions", partial(generate, reader_of(ChatRequest))),
                web.post("/generate", partial(generate, reader_of(GenerateRequest))),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
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
        )

    @property
    def url(self) -> str:
        return self._http.url

    async def start(self) -> None:
        """Listens, and begins to load."""
        await self._http.start(self.config.host, self.config.port)
        self.supervisor.config = replace(self.supervisor.config, url=self.url)
        self.supervisor.start()

    async def wait(self) -> None:
        """Until the supervisor has given up, which raises its error."""
        await self.ended.wait()
        assert self.supervisor.failure is not None
        raise self.supervisor.failure

    async def drain(self, wait_s: float) -> None:
        """Takes no new requests, and waits for open ones up to this time."""
        await self.open.drain(wait_s)

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
        for generation in list(self.open):
            instance = generation.instance
            if not instance.is_running:
                generation.lost(f"{instance.config.name} has ended: {instance.failure}")

    async def _generate(
        self, read: Callable[[bytes], RequestBody], request: web.Request
    ) -> web.StreamResponse:
        if self.open.is_draining:
            raise self._draining()
        instance, model = self._serving()
        raw = await request.read()
        try:
            body = read(raw)
        except ApiError:
            request[REQUEST_ID] = claimed_id(raw, request[CALLER])
            raise
        request[REQUEST_ID] = read_hints(body, request[CALLER]).id  # of a refusal too
        parsed = await parse_request(body, request[CALLER], model)
        request[REQUEST_ID] = parsed.id
        generation = Generation(parsed, instance, self._observer, self.open.discard)
        self.open.add(generation)
        generation.start(self._bridge)
        try:
            return await generation.respond(request, response_format(parsed, model))
        finally:
            generation.close()

    def _serving(self) -> tuple[Instance, ServedModel]:
        """The running instance, and its model as requests need it."""
        instance = self.supervisor.running()
        if self._running is None or self._running[0] is not instance:
            sizes, architecture = instance.sizes, instance.sizes.architecture
            model = ServedModel(
                name=self._model_name,
                tokenizer=instance.tokenizer,
                context_max=sizes.context_max,
                vocab_size=architecture.vocab_size,
                num_tokens_max=instance.core.num_tokens_max,
                defaults=instance.sampling_defaults,
                eos_ids=instance.eos_ids,
                hidden_size=architecture.hidden_size,
                role=instance.config.role,
                address=instance.address,
                first_token=self.config.first_token,
                num_dp_groups=sizes.layout.size("dp"),
                tool_call_parser=self.config.tool_call_parser,
            )
            self._running = instance, model
        return self._running

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = _read_tokenize(await request.read())
        check_model(body.model, self._model_name)
        return json_response(await self._serving()[1].tokenize(body))

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = _read_detokenize(await request.read())
        check_model(body.model, self._model_name)
        return json_response(await self._serving()[1].detokenize(body))

    def _draining(self) -> ApiError:
        name = self.config.instance.name
        return failure("DRAINING", f"{name} is draining and takes no new requests; ask another instance")

    async def _get_health(self, request: web.Request) -> web.Response:
        if self.open.is_draining:
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
        return ModelCard(
            name, self._created, root=self.config.instance.model, max_model_len=self._context_max
        )

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
                "has_draft": config.has_draft,
                "sampling_defaults": instance
                and {name: getattr(instance.sampling_defaults, name) for name in STATED_DEFAULTS},
                "context_max": self._context_max,
                "is_ready": supervisor.is_ready and not self.open.is_draining,
                "is_draining": self.open.is_draining,
                "stage": supervisor.stage,
                "version": __version__,
                "load": {
                    "num_running": load.num_running,
                    "num_waiting": load.num_waiting,
                    "num_tokens": load.num_tokens,
                    "num_queue_max": config.queue_max,
                    "num_steps": load.num_steps,
                    "num_open": len(self.open),
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
        return json_response(self._observer.timelines())

    async def _get_timeline(self, request: web.Request) -> web.Response:
        name, form = request.match_info["id"], request.query.get("format", "json")
        if form not in TIMELINE_FORMATS:
            raise bad_field("format", form, f"use {' or '.join(TIMELINE_FORMATS)}")
        observer = self._observer
        timeline = observer.trace(name) if form == "perfetto" else observer.timeline(name)
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
        self.open.is_draining = True
        return json_response(DrainBody(True, len(self.open)))


# ---- one request


class Generation:
    """One parsed request at an instance; everything here runs on the event loop."""

    def __init__(
        self,
        parsed: ParsedRequest,
        instance: Instance,
        observer: RequestObserver,
        on_close: Callable[[Generation], None],
    ) -> None:
        self.parsed = parsed
        self.recorded = RecordedRequest(parsed)
        self.instance = instance
        self._observer = observer
        self._on_close = on_close
        """Called when the instance holds nothing of the request any more."""
        self._arrived_s = monotonic()
        self._woken = asyncio.Event()
        self._deltas: dict[int, ChoiceDelta] = {}
        """By choice: what was not rendered yet."""
        self._open_choices = set(parsed.choices())
        self._last_token_s: dict[int, float] = {}
        self._num_cached = 0
        """Tokens of prompts, as far as jobs are over."""
        self._numbers: dict[int, int] = {}
        """By job that is not finished: its number at the instance."""
        self._error: ApiError | None = None
        self._num_tokens: dict[int, int] = {**parsed.hints.done}
        """By choice: its number of tokens, including those of earlier attempts."""

    def start(self, bridge: EventBridge) -> None:
        """Submits every job to the instance; all of them, or none and an ApiError."""
        self._num_tokens |= {index: len(tokens) for index, tokens in self.parsed.resumed.items()}
        try:
            for job_index, job in enumerate(self.parsed.jobs):
                sink = bridge.sink(partial(self._on_event, job_index))
                self._numbers[job_index] = self.instance.core.submit(job.request, sink)
        except (ConfigError, EngineError) as error:
            self._error = _refusal(error)
            self.close()
            if not self._numbers:
                self._on_close(self)
            raise self._error from None
        self._observer.started(self.recorded)

    def close(self) -> None:
        """Aborts what is still running."""
        if self._open_choices or self._error or self.parsed.is_prefill:
            for number in self._numbers.values():
                self.instance.core.abort(number)

    def lost(self, text: str) -> None:
        """The instance has ended; fails the jobs that it did not inform."""
        for job_index in list(self._numbers):
            cause = Cause(Why.PEER_LOST, Stage.COPY, text=text)
            self._on_event(job_index, RequestError(cause, text))

    async def respond(self, request: web.Request, form: ResponseFormat) -> web.StreamResponse:
        if self.parsed.is_prefill or not self.parsed.is_stream:
            return await self._respond_whole(form)
        stream = EventStream(request, self.parsed.id, WRITE_S_MAX)
        try:
            return await self._stream(stream, form)
        except ApiError as error:
            if stream.response is None:
                raise
            # The status is out: report the error in the stream, which then ends without [DONE].
            return await stream.fail(error)

    async def _stream(self, stream: EventStream, form: ResponseFormat) -> web.StreamResponse:
        while self._open_choices or self._deltas:
            await self._wake()
            blocks = []
            for index, delta in list(self._deltas.items()):
                form.take(delta)
                # Tokens without text, as parts of a character or of a tool call, wait for the next ones; not
                # for long, since a router takes a stream that does not grow for a stalled one.
                if not form.is_silent(delta) or len(delta.tokens) >= NUM_HELD_MAX:
                    blocks.append(self._event_block(self._deltas.pop(index), form))
            if blocks:
                await stream.write(b"".join(blocks))
        end = DONE
        if self.parsed.has_usage:
            event = form.usage_event(await self._usage())
            end = (data_event(_encoder.encode(event)) if event is not None else b"") + DONE
        response = await stream.end(end)
        self._finish()
        return response

    async def _respond_whole(self, form: ResponseFormat) -> web.Response:
        parsed = self.parsed
        while self._open_choices:
            await self._wake()
        if parsed.is_prefill:
            await self._settled()
        usage = await self._usage()
        self._finish()
        ordered = [delta for _, delta in sorted(self._deltas.items())]
        for delta in ordered:
            form.take(delta)
        headers = {ID_HEADER: parsed.id, PROMPT_TOKENS_HEADER: str(usage.prompt_tokens), **NO_STORE}
        if not parsed.is_stream:
            headers["Content-Type"] = "application/json"
            return web.Response(body=_encoder.encode(form.whole(ordered, usage)), headers=headers)
        headers["Content-Type"] = EVENT_STREAM
        blocks = [self._event_block(delta, form) for delta in ordered]
        return web.Response(body=b"".join(blocks) + DONE, headers=headers)

    def _event_block(self, delta: ChoiceDelta, form: ResponseFormat) -> bytes:
        event = data_event(_encoder.encode(form.event(delta)))
        if not self.parsed.hints.tokens:
            return event
        return note_line(TokenNote(delta.index, tuple(delta.ids), delta.finish)) + event

    async def _wake(self) -> None:
        """Until the next event; raises the ApiError of a failure."""
        if self._error is None:
            await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error

    async def _settled(self) -> None:
        """Until the instance has freed everything and each hand-over has its verdict."""
        while self._numbers or self._error is not None:
            await self._wake()

    async def _usage(self) -> Usage:
        with suppress(TimeoutError, ApiError):  # the response is complete, whatever becomes of its pages
            async with asyncio.timeout(USAGE_S_MAX):
                await self._settled()
        return self._counted()

    def _counted(self) -> Usage:
        num_prompt = sum(len(prompt) for prompt in self.parsed.prompts)
        num_completion = sum(self._num_tokens.values())
        num_cached = min(num_prompt, self._num_cached)
        return Usage(num_prompt, num_completion, num_prompt + num_completion, CachedTokens(num_cached))

    def _finish(self) -> None:
        self._observer.finished(self._counted(), monotonic() - self._arrived_s)

    def _on_event(self, job_index: int, event: RequestEvent) -> None:
        match event:
            case OutputChunk():
                prompt_index = self.parsed.jobs[job_index].prompt_index
                self._add(prompt_index * self.parsed.n + event.index, event)
            case RequestError(cause, text, trace):
                code = cause.why.name if cause is not None else "QUEUE_TIMEOUT"
                self._error = self._error or failure(code, for_clients(text))
                self._observer.failed(self.recorded, job_index, code, text, trace)
                self._job_over(job_index)
            case RequestFinished(trace):
                self._num_cached += trace.num_cached
                self._observer.traced(self.recorded, job_index, trace)
                self._job_over(job_index)
        self._woken.set()

    def _job_over(self, job_index: int) -> None:
        if self._numbers.pop(job_index, None) is not None and not self._numbers:
            self._on_close(self)

    def _add(self, index: int, chunk: OutputChunk) -> None:
        if self.parsed.is_echo_only:
            chunk = replace(chunk, tokens=(), text="", finish="length")
        delta, now_s = self._deltas.get(index), monotonic()
        if delta is None:
            has_begun = index in self._last_token_s or bool(self.parsed.resumed.get(index))
            delta = self._deltas[index] = ChoiceDelta(index, not has_begun)
        delta.add(chunk.text, chunk.tokens, chunk.finish)
        delta.prompt_logprobs = delta.prompt_logprobs or chunk.prompt_logprobs
        if chunk.tokens:
            self._num_tokens[index] = self._num_tokens.get(index, 0) + len(chunk.tokens)
            since_s = now_s - self._last_token_s.get(index, self._arrived_s)
            self._observer.sampled(len(chunk.tokens), since_s, is_first=index not in self._last_token_s)
            self._last_token_s[index] = now_s
        if chunk.finish is not None:
            self._open_choices.discard(index)


def _refusal(error: ConfigError | EngineError) -> ApiError:
    match error:
        case FullError(retry_after_s=wait_s):
            return ApiError(429, str(error), code="QUEUE_FULL", retry_after_s=wait_s)
        case ContextError():
            return ApiError(400, str(error), code=TOO_LONG)
        case ConfigError():
            return ApiError(400, str(error))
        case _:
            return failure("LOADING", str(error))


class EventBridge:
    """Takes engine events from the instance's thread to the event loop, one call per wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[OnEvent, RequestEvent]] = deque()
        self._is_woken = False

    def sink(self, on_event: OnEvent) -> OnEvent:
        """A callback for the instance; `on_event` gets its events on the loop, in order."""
        return lambda event: self._put(on_event, event)

    def _put(self, on_event: OnEvent, event: RequestEvent) -> None:
        # Append before the check: a delivery that has begun clears the flag before it takes anything.
        self._waiting.append((on_event, event))
        if not self._is_woken:
            self._is_woken = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._waiting:
            on_event, event = self._waiting.popleft()
            on_event(event)


# ---- until a signal


async def serve(config: ServerConfig, say: Callable[[str], None]) -> None:
    """Serves until a signal."""
    server = Server(config)

    def on_start(url: str) -> None:
        say(f"serving at {url}")

    if await run_until_signal(server, server.start(), config.drain_s, on_start):
        raise KeyboardInterrupt
