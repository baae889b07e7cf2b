"""Requests to an OpenAI endpoint: prompts, one streamed request, and what a client sees of the answer.

Times count from the moment at which a request was *intended* to be sent. A client that is late, or that waits
for a free place, does not make the server look faster: its delay is in every figure, and apart as `late_s`.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from time import monotonic
from typing import Any

import aiohttp
import msgspec
import numpy as np

from baton.errors import ConfigError, EngineError

Prompt = tuple[int, ...] | str

WORDS_FROM = 300
"""Lower ids are often special tokens and single bytes; a model that continues with those answers with tokens
without text."""
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city name"
)
WORDS = tuple(_WORDS.split(" "))
"""Common words: with a leading space each is one token in most tokenizers."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request before it is sent."""

    prompt: Prompt
    num_answer: int


def make_prompt(source: random.Random, num_tokens: int, vocabulary: int) -> Prompt:
    """Random token ids; with a vocabulary of 0, about as many words."""
    if vocabulary:
        lowest = WORDS_FROM if vocabulary > 2 * WORDS_FROM else 0
        return tuple(source.randrange(lowest, vocabulary) for _ in range(num_tokens))
    return " ".join(source.choices(WORDS, k=num_tokens))


def join(first: Prompt, second: Prompt) -> Prompt:
    """Two prompts of the same form, concatenated."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}".strip()
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    return first + second


_TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s)")
SLO_NAMES = ("ttft", "itl", "tpot", "tth", "e2e")


def parse_time(text: str) -> float:
    """Seconds of `200ms` or `1.5s`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"time {text!r} cannot be read; write it with its unit, like 200ms or 1.5s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must keep, all of them, to count for goodput."""

    bounds: tuple[tuple[str, float], ...]
    """Seconds by name of a figure."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {bound_s * 1e3:g} ms" for name, bound_s in self.bounds)


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,itl=50ms`: itl limits every gap of a request, tpot their mean."""
    bounds = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in SLO_NAMES or name in bounds:
            raise ConfigError(
                f"slo {part!r} cannot be used; give each of {', '.join(SLO_NAMES)} at most once, "
                "like ttft=500ms,itl=50ms"
            )
        bounds[name] = parse_time(value)
    return Slo(tuple(bounds.items()))


OK = "ok"


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """One request on the client's monotonic clock."""

    intended_s: float
    sent_s: float
    ended_s: float
    stamps_s: tuple[float, ...] = ()
    """When each event that carried text, or tokens of a model without a tokenizer, was read."""
    status: str = OK
    """`ok`, or a short cause; equal causes are counted together."""
    num_prompt: int = 0
    num_cached: int = 0
    num_answer: int = 0
    """Tokens as the server counts them; if it does not, the events."""
    id: str = ""
    tth_s: float | None = None
    """Request in to admitted on decode, by the server's clock; None if it is not known."""

    @property
    def is_ok(self) -> bool:
        """Whether the answer is complete."""
        return self.status == OK

    @property
    def late_s(self) -> float:
        """The delay that the client itself added."""
        return self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return self.stamps_s[0] - self.intended_s if self.stamps_s else None

    @property
    def e2e_s(self) -> float:
        """Time to the end of the answer."""
        return self.ended_s - self.intended_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between events: the inter-token latencies."""
        stamps = self.stamps_s
        return tuple(later - earlier for earlier, later in pairwise(stamps))

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first, by the server's count of tokens."""
        if self.num_answer < 2 or not self.stamps_s:
            return None
        return (self.stamps_s[-1] - self.stamps_s[0]) / (self.num_answer - 1)

    def is_good(self, slo: Slo) -> bool:
        """Whether the answer is complete and keeps every limit; an unknown figure keeps none."""
        figures = {
            "ttft": self.ttft_s,
            "itl": max(self.gaps_s, default=0.0),
            "tpot": self.tpot_s if self.num_answer > 1 else 0.0,
            "tth": self.tth_s,
            "e2e": self.e2e_s,
        }
        values = [(figures[name], bound_s) for name, bound_s in slo.bounds]
        return self.is_ok and all(value is not None and value <= bound_s for value, bound_s in values)


ENDPOINTS = ("completions", "chat")
VOCABULARIES = (20_000, 1000, 128)
"""Tried in this order; the smaller ones are for tiny test models."""
DATA = b"data:"
DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """The text of a chat event."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One choice of an event, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    """Where they were asked for."""

    @property
    def has_output(self) -> bool:
        """Whether it carries text or tokens; the event that names the role does not."""
        return bool(self.text or self.token_ids or (self.delta is not None and self.delta.content))


class CachedTokens(msgspec.Struct):
    """Details of the prompt."""

    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """The server's token counts."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class StreamError(msgspec.Struct):
    """An error in the middle of a stream."""

    message: str = ""
    code: str | int | None = None


class StreamEvent(msgspec.Struct):
    """One event of a stream; other fields are ignored."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: StreamError | None = None


_EVENT = msgspec.json.Decoder(StreamEvent)


@dataclass(frozen=True, slots=True)
class OpenAIEndpoint:
    """Where requests go, and in which form."""

    url: str
    """Without /v1."""
    model: str = ""
    kind: str = "completions"
    api_key: str = field(default="", repr=False)
    is_eos_ignored: bool = True
    timeout_s: float = 600.0
    extra: tuple[tuple[str, Any], ...] = ()
    """Further fields of every body."""

    def __post_init__(self) -> None:
        if self.kind not in ENDPOINTS:
            raise ConfigError(f"endpoint {self.kind!r} is not known; use {' or '.join(ENDPOINTS)}")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url {self.url!r} cannot be used; write it like http://127.0.0.1:8000")

    @property
    def target(self) -> str:
        """The URL of requests."""
        return self.at("/v1/chat/completions" if self.kind == "chat" else "/v1/completions")

    def at(self, path: str) -> str:
        """A path of the same server; a URL may end in /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """A request's body."""
        prompt = request.prompt
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.num_answer,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(self.extra),
        }
        if self.is_eos_ignored:
            body["ignore_eos"] = True
        if self.kind == "completions":
            return {**body, "prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
        if not isinstance(prompt, str):
            raise ConfigError("the chat endpoint takes no token ids; use --prompts text")
        return {**body, "messages": [{"role": "user", "content": prompt}]}


def make_session(endpoint: OpenAIEndpoint) -> aiohttp.ClientSession:
    """A session without a limit of connections: requests must queue at the server, not here."""
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=endpoint.headers)


async def find_model(session: aiohttp.ClientSession, endpoint: OpenAIEndpoint) -> str:
    """The first model that the server lists."""
    try:
        async with session.get(endpoint.at("/v1/models")) as response:
            text = await response.read()
            if response.status != 200:
                raise EngineError(
                    f"{endpoint.at('/v1/models')} answered {response.status}; name the model with --model"
                )
        return str(msgspec.json.decode(text)["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise EngineError(f"{endpoint.url} cannot be reached: {cause}; is a server running there?") from None
    except (msgspec.DecodeError, LookupError, TypeError):
        raise EngineError(f"{endpoint.at('/v1/models')} lists no model; name one with --model") from None


class _StreamReader:
    """Reads the events of one stream."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []
        self.status = ""
        self.id = ""
        self.usage = Usage()

    def take(self, data: bytes, now_s: float) -> None:
        """Takes one event that arrived at this time."""
        if data == DONE:
            self.status = self.status or OK
            return
        try:
            event = _EVENT.decode(data)
        except msgspec.DecodeError:
            self.status = "an event that is not JSON"
            return
        self.id = self.id or event.id
        if event.error is not None:
            self.status = f"error event: {event.error.code or event.error.message[:60]}"
        if event.usage is not None:
            self.usage = event.usage
        if any(choice.has_output for choice in event.choices):
            self.stamps_s.append(now_s)

    @property
    def num_answer(self) -> int:
        return self.usage.completion_tokens or len(self.stamps_s)

    @property
    def num_cached(self) -> int:
        details = self.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0


async def ask(
    session: aiohttp.ClientSession,
    endpoint: OpenAIEndpoint,
    request: BenchRequest,
    intended_s: float | None = None,
    leave: asyncio.Event | None = None,
) -> RequestTiming:
    """Sends one request and reads its answer; a failure is the timing's status.

    Once `leave` is set, the stream is closed after its next event and counts as complete.
    """
    body = msgspec.json.encode(endpoint.body(request))
    reading = _StreamReader()
    sent_s = monotonic()
    try:
        async with session.post(endpoint.target, data=body, headers=_JSON) as response:
            if response.status == 200:
                await _read(response, reading, leave)
            else:
                await response.read()
                reading.status = f"http {response.status}"
    except TimeoutError:
        reading.status = "timed out"
    except aiohttp.ClientConnectorError:
        reading.status = "not connected"
    except (aiohttp.ClientError, ConnectionError):
        reading.status = "disconnected"
    return RequestTiming(
        intended_s=sent_s if intended_s is None else intended_s,
        sent_s=sent_s,
        ended_s=monotonic(),
        stamps_s=tuple(reading.stamps_s),
        status=reading.status or "ended without [DONE]",
        num_prompt=reading.usage.prompt_tokens,
        num_cached=reading.num_cached,
        num_answer=reading.num_answer,
        id=reading.id,
    )


_JSON = {"Content-Type": "application/json"}


async def _read(
    response: aiohttp.ClientResponse, reading: _StreamReader, leave: asyncio.Event | None = None
) -> None:
    async for now_s, data in _events(response):
        reading.take(data, now_s)
        if leave is not None and leave.is_set():
            reading.status = reading.status or OK
            response.close()
            return


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """The data of each event, with the time at which its bytes arrived."""
    rest = b""
    async for block in response.content.iter_any():
        now_s = monotonic()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield now_s, line[len(DATA) :].strip()


async def time_to_handoff(session: aiohttp.ClientSession, endpoint: OpenAIEndpoint, id: str) -> float | None:
    """tth of a request from the server's timeline; None if the server keeps none."""
    try:
        async with session.get(endpoint.at(f"/v1/timelines/{id}")) as response:
            timeline = msgspec.json.decode(await response.read()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
        return None
    return latest_handoff(timeline)


def latest_handoff(timeline: Any) -> float | None:
    """tth of the job that was admitted last; a router's timeline holds those of its instances."""
    body = timeline if isinstance(timeline, dict) else {}
    jobs = [job for part in (body, *body.get("instances", ())) for job in part.get("jobs", ())]
    tths = [(job.get("figures") or {}).get("tth_s") for job in jobs]
    return max((float(value) for value in tths if isinstance(value, int | float)), default=None)


async def probe(session: aiohttp.ClientSession, endpoint: OpenAIEndpoint) -> tuple[OpenAIEndpoint, int]:
    """How to ask this server, and the vocabulary size, found by trying the highest id; 0: it takes text only.

    A server without a tokenizer sends no text: it is asked for token ids, so that its events can be timed.
    """
    for vocabulary in VOCABULARIES:
        timing = await ask(session, endpoint, BenchRequest((vocabulary - 1,), 1))
        if timing.is_ok:
            extra = endpoint.extra if timing.stamps_s else (*endpoint.extra, ("return_token_ids", True))
            return replace(endpoint, extra=extra), vocabulary
    return endpoint, 0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of a figure, in seconds."""

    num: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def percentiles_of(values: Sequence[float]) -> Percentiles | None:
    """Percentiles with linear interpolation; None without values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(array, (50, 90, 95, 99)))
    return Percentiles(len(values), float(array.mean()), p50, p90, p95, p99, float(array.max()))
