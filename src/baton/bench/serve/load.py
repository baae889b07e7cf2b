"""Sends a run's requests at their times, and gathers their timings.

Open loop (`rate`): requests arrive by a Poisson process whose times are drawn before the first is sent; a
slow answer delays no arrival. Closed loop (`concurrency`): the next request is sent when one has ended, and
is intended for that moment. With both, a request that finds no free place waits, and the wait counts.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from time import monotonic, perf_counter, process_time
from typing import Any, Self

import aiohttp

from baton.bench.serve.client import (
    BenchRequest,
    OpenAIEndpoint,
    Percentiles,
    RequestTiming,
    ask,
    find_model,
    join,
    make_prompt,
    make_session,
    percentiles_of,
    probe,
    time_to_handoff,
)
from baton.errors import ConfigError, EngineError

PROMPTS = ("auto", "tokens", "text")
Progress = Callable[[int | None, int, str], None]
"""Called with the number of steps if it is known, the number done, and a description."""


def no_progress(total: int | None, done: int, text: str) -> None:
    """Shows nothing."""


LAG_PROBE_S = 0.02
TIMELINES_MISSED_MAX = 8
LEAD_S = 0.05
"""Between drawing the arrival times and the first of them."""


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A uniform distribution of lengths, from low to high inclusive."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """A random length."""
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def parse_lengths(text: str) -> TokenRange:
    """`512`, or `128:1024`."""
    first, _, second = text.partition(":")
    try:
        lengths = TokenRange(int(first), int(second or first))
    except ValueError:
        lengths = TokenRange(0, 0)
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(f"length {text!r} cannot be used; write it like 512, or 128:1024 for a range")
    return lengths


def parse_rate(text: str) -> float:
    """Requests a second; `inf`: all at once."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise ConfigError(f"rate {text!r} cannot be used; give requests a second above 0, or inf")
    return rate


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The requests of one run."""

    num_requests: int
    input_tokens: TokenRange
    output_tokens: TokenRange
    rate: float = math.inf
    """Poisson arrivals a second; inf: all at once."""
    concurrency: int = 0
    """Maximum requests in flight; 0: no limit."""
    num_shared: int = 0
    """Tokens of a prefix that all prompts share."""
    seed: int = 0
    num_warmup: int = 1
    """Requests before the measured ones, one after another, that do not count."""

    def __post_init__(self) -> None:
        if self.num_shared > self.input_tokens.low:
            raise ConfigError(
                f"a shared prefix of {self.num_shared} tokens does not fit prompts of {self.input_tokens}; "
                "make it shorter, or --input-tokens longer"
            )

    @property
    def is_open(self) -> bool:
        """Whether it is an open loop: requests arrive however slowly they are answered."""
        return math.isfinite(self.rate)

    def __str__(self) -> str:
        when = f"{self.rate:g} requests/s (Poisson)" if self.is_open else "as fast as answered"
        bound = f", at most {self.concurrency} at once" if self.concurrency else ""
        return (
            f"{self.num_requests} requests, {when}{bound}, {self.input_tokens} in, {self.output_tokens} out"
        )


def make_requests(load: LoadSpec, vocabulary: int) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """The warm-up requests, and those of the run."""
    source = random.Random(load.seed)
    shared = make_prompt(source, load.num_shared, vocabulary)

    def draw_request() -> BenchRequest:
        num_own = load.input_tokens.draw(source) - load.num_shared
        prompt = make_prompt(source, num_own, vocabulary)
        return BenchRequest(
            join(shared, prompt) if load.num_shared else prompt, load.output_tokens.draw(source)
        )

    run = [draw_request() for _ in range(load.num_requests)]
    return [draw_request() for _ in range(load.num_warmup)], run


@dataclass(frozen=True, slots=True)
class ClientOverhead:
    """What the client itself took: it often shares the machine with the servers."""

    wall_s: float
    cpu_s: float
    lag: Percentiles | None
    """How late the event loop woke a sleeping task."""

    @property
    def share(self) -> float:
        """Share of one core."""
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything."""
        return {**asdict(self), "share_of_a_core": self.share}

    def __str__(self) -> str:
        lag = self.lag
        late = f"; event loop lag p50 {lag.p50_s * 1e3:.1f} ms, p99 {lag.p99_s * 1e3:.1f} ms" if lag else ""
        return f"the client itself took {self.share:.0%} of a core{late}"


class ClientMeter:
    """Measures the client from entry to exit."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None
        self._begun = (0.0, 0.0)
        self.overhead = ClientOverhead(0.0, 0.0, None)

    async def __aenter__(self) -> Self:
        self._begun = (perf_counter(), process_time())
        self._task = asyncio.create_task(self._probe_lag())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        wall_s, cpu_s = self._begun
        self.overhead = ClientOverhead(
            perf_counter() - wall_s, process_time() - cpu_s, percentiles_of(self._lags_s)
        )

    async def _probe_lag(self) -> None:
        while True:
            asked_s = perf_counter() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            self._lags_s.append(max(0.0, perf_counter() - asked_s))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was measured."""

    timings: tuple[RequestTiming, ...]
    overhead: ClientOverhead
    endpoint: OpenAIEndpoint


def arrivals(load: LoadSpec) -> list[float]:
    """Seconds from the start at which requests are intended to be sent, in order."""
    if not load.is_open:
        return [0.0] * load.num_requests
    source = random.Random(f"arrivals {load.seed}")
    times, now_s = [], 0.0
    for _ in range(load.num_requests):
        times.append(now_s)
        now_s += source.expovariate(load.rate)
    return times


async def drive(
    endpoint: OpenAIEndpoint,
    load: LoadSpec,
    vocabulary: int,
    progress: Progress = no_progress,
) -> LoadResult:
    """Warms up, measures, and fetches the timelines afterwards."""
    async with make_session(endpoint) as session:
        if not endpoint.model:
            endpoint = replace(endpoint, model=await find_model(session, endpoint))
        warmup, requests = make_requests(load, vocabulary)
        await warm_up(session, endpoint, warmup)
        async with ClientMeter() as meter:
            timings = await _send_all(session, endpoint, load, requests, progress)
        return LoadResult(await with_timelines(session, endpoint, timings), meter.overhead, endpoint)


async def warm_up(
    session: aiohttp.ClientSession, endpoint: OpenAIEndpoint, requests: Sequence[BenchRequest]
) -> None:
    """Sends requests that do not count; raises on a refusal that every request would meet."""
    for request in requests:
        timing = await ask(session, endpoint, request)
        if timing.status in ("http 400", "http 401", "http 403", "http 404", "not connected"):
            raise EngineError(
                f"{endpoint.target} refuses a warm-up request: {timing.status}; "
                "check --url, --model, --api-key-file and the lengths"
            )


async def _send_all(
    session: aiohttp.ClientSession,
    endpoint: OpenAIEndpoint,
    load: LoadSpec,
    requests: Sequence[BenchRequest],
    progress: Progress,
) -> tuple[RequestTiming, ...]:
    num_done = 0
    places = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    start_s = monotonic() + LEAD_S

    async def send(request: BenchRequest, after_s: float) -> RequestTiming:
        nonlocal num_done
        intended_s = start_s + after_s
        if (wait_s := intended_s - monotonic()) > 0:
            await asyncio.sleep(wait_s)
        async with places or nullcontext():
            # In a closed loop a request is not due before there is a place for it.
            is_due_now = places is not None and not load.is_open
            timing = await ask(session, endpoint, request, monotonic() if is_due_now else intended_s)
        num_done += 1
        progress(load.num_requests, num_done, "requests")
        return timing

    pairs = zip(requests, arrivals(load), strict=True)
    return tuple(await asyncio.gather(*(send(request, after_s) for request, after_s in pairs)))


async def with_timelines(
    session: aiohttp.ClientSession, endpoint: OpenAIEndpoint, timings: Sequence[RequestTiming]
) -> tuple[RequestTiming, ...]:
    """The timings with their tth, if the server keeps timelines; fetched when nothing is measured."""
    completed: list[RequestTiming] = []
    num_missed = 0
    for timing in reversed(timings):
        tth_s = None
        # Our servers keep the latest timelines, others none: a few misses show which.
        if timing.is_ok and timing.id and num_missed < TIMELINES_MISSED_MAX:
            tth_s = await time_to_handoff(session, endpoint, timing.id)
            num_missed += tth_s is None
        completed.append(replace(timing, tth_s=tth_s))
    return tuple(reversed(completed))


def check_prompts(prompts: str, endpoint: str) -> None:
    """Raises ConfigError unless an endpoint takes prompts of this form."""
    if prompts not in PROMPTS:
        raise ConfigError(f"prompts {prompts!r} are not known; use {', '.join(PROMPTS)}")
    if prompts == "tokens" and endpoint == "chat":
        raise ConfigError("the chat endpoint takes no token ids; use --prompts text")


async def measure(
    endpoint: OpenAIEndpoint, load: LoadSpec, prompts: str = "auto", progress: Progress = no_progress
) -> LoadResult:
    """Finds out what the server takes, and runs the load once."""
    async with make_session(endpoint) as session:
        if not endpoint.model:
            endpoint = replace(endpoint, model=await find_model(session, endpoint))
        vocabulary = 0
        if endpoint.kind != "chat" and prompts != "text":
            endpoint, vocabulary = await probe(session, endpoint)
            if prompts == "tokens" and not vocabulary:
                raise EngineError(f"{endpoint.target} takes no token ids; use --prompts text")
    return await drive(endpoint, load, vocabulary, progress)
