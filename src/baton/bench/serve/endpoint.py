"""One request to an OpenAI endpoint, streamed, as a trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import aiohttp
import msgspec

from baton.bench.serve.prompts import Wanted
from baton.bench.serve.traces import OK, Trace
from baton.errors import ConfigError, EngineError

ENDPOINTS = ("completions", "chat")
VOCABULARIES = (20_000, 1000, 128)
"""Enough for prompts that differ; the smaller ones are for models that are made for tests."""
DATA = b"data:"
DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """What a chat event adds."""

    content: str | None = None


class Choice(msgspec.Struct):
    """One choice of an event, of either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        """Whether there is something to read; the event that names the role has nothing."""
        return bool(self.text or (self.delta is not None and self.delta.content))


class CachedTokens(msgspec.Struct):
    """Details of a prompt."""

    cached_tokens: int | None = 0


class Usage(msgspec.Struct):
    """What the server counted."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: CachedTokens | None = None


class StreamError(msgspec.Struct):
    """An error in the middle of a stream."""

    message: str = ""
    code: str | int | None = None


class Event(msgspec.Struct):
    """One event of a stream, as far as it matters here."""

    id: str = ""
    choices: list[Choice] = []
    usage: Usage | None = None
    error: StreamError | None = None


_EVENT = msgspec.json.Decoder(Event)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and in which form."""

    url: str
    """Up to the port or the path before /v1."""
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
        """Another path of the same server; a URL that ends in /v1 means the same."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        """Of every request."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, wanted: Wanted) -> dict[str, Any]:
        """A request's body."""
        prompt = wanted.prompt
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": wanted.num_answer,
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


def make_session(endpoint: Endpoint) -> aiohttp.ClientSession:
    """Connections without a bound of their own: what waits is to wait at the server."""
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout_s, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=endpoint.headers)


async def find_model(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    """The first model that the server names."""
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
        raise EngineError(f"{endpoint.at('/v1/models')} names no model; give it with --model") from None


class _Reading:
    """A stream while it is read."""

    def __init__(self) -> None:
        self.stamps_s: list[float] = []
        self.status = ""
        self.id = ""
        self.usage = Usage()

    def take(self, data: bytes, now_s: float) -> None:
        """One event that was read at this time."""
        if data == DONE:
            self.status = self.status or OK
            return
        try:
            event = _EVENT.decode(data)
        except msgspec.DecodeError:
            self.status = "an event that is no JSON"
            return
        self.id = self.id or event.id
        if event.error is not None:
            self.status = f"error event: {event.error.code or event.error.message[:60]}"
        if event.usage is not None:
            self.usage = event.usage
        if any(choice.has_text for choice in event.choices):
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
    endpoint: Endpoint,
    wanted: Wanted,
    intended_s: float | None = None,
    leave: asyncio.Event | None = None,
) -> Trace:
    """Sends one request and reads its answer; whatever goes wrong is the trace's status.

    Once `leave` is set, the answer is left with its next event, and what there is of it is whole.
    """
    body = msgspec.json.encode(endpoint.body(wanted))
    reading = _Reading()
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
    return Trace(
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
    response: aiohttp.ClientResponse, reading: _Reading, leave: asyncio.Event | None = None
) -> None:
    async for now_s, data in _events(response):
        reading.take(data, now_s)
        if leave is not None and leave.is_set():
            reading.status = reading.status or OK
            response.close()
            return


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Data of events with the time at which the bytes were there: before they are looked into."""
    rest = b""
    async for block in response.content.iter_any():
        now_s = monotonic()
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield now_s, line[len(DATA) :].strip()


async def time_to_handover(session: aiohttp.ClientSession, endpoint: Endpoint, id: str) -> float | None:
    """tth of a request by the server's own timeline; None where the server keeps none."""
    try:
        async with session.get(endpoint.at(f"/v1/timelines/{id}")) as response:
            found = msgspec.json.decode(await response.read()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
        return None
    return latest_handover(found)


def latest_handover(timeline: Any) -> float | None:
    """tth of a timeline: of the job that was admitted last; one of a router holds those of its instances."""
    told = timeline if isinstance(timeline, dict) else {}
    jobs = [job for each in (told, *told.get("instances", ())) for job in each.get("jobs", ())]
    found = [(job.get("figures") or {}).get("tth_s") for job in jobs]
    return max((float(value) for value in found if isinstance(value, int | float)), default=None)


async def find_vocabulary(session: aiohttp.ClientSession, endpoint: Endpoint) -> int:
    """How many token ids may be drawn from, by asking with the highest; 0: the server takes text alone."""
    for vocabulary in VOCABULARIES:
        if (await ask(session, endpoint, Wanted((vocabulary - 1,), 1))).is_ok:
            return vocabulary
    return 0
