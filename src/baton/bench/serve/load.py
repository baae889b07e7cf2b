"""Sends a run's requests at their times and gathers their traces.

Open loop (`rate`): requests arrive by a Poisson process whose times are drawn before the first is sent; no
slow answer delays an arrival. Closed loop (`concurrency`): the next request is sent when one has ended, and
is intended for that moment. With both, a request that finds no free place waits, and its figures with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import monotonic

import aiohttp

from baton.bench.serve.endpoint import Endpoint, ask, find_model, make_session, time_to_handover
from baton.bench.serve.options import Load
from baton.bench.serve.overhead import Overhead, Watch
from baton.bench.serve.prompts import Wanted, make_wanted
from baton.bench.serve.traces import Trace
from baton.errors import EngineError

Progress = Callable[[int, int], None]
"""Is told how many requests have ended, of how many."""
MISSED_MAX = 8
HEAD_START_S = 0.05
"""Between drawing the times and the first of them."""


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured."""

    traces: tuple[Trace, ...]
    overhead: Overhead
    endpoint: Endpoint


def arrivals(load: Load) -> list[float]:
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
    endpoint: Endpoint, load: Load, vocabulary: int, progress: Progress = lambda done, total: None
) -> Run:
    """Warms up, measures, and asks for the timelines afterwards."""
    async with make_session(endpoint) as session:
        if not endpoint.model:
            endpoint = replace(endpoint, model=await find_model(session, endpoint))
        warmup, wanted = make_wanted(load, vocabulary)
        await warm_up(session, endpoint, warmup)
        async with Watch() as watch:
            traces = await send(_Sending(session, endpoint, load, progress), wanted)
        return Run(await with_timelines(session, endpoint, traces), watch.found, endpoint)


async def warm_up(session: aiohttp.ClientSession, endpoint: Endpoint, wanted: Sequence[Wanted]) -> None:
    """Requests that count for nothing; one that is refused for what it is would be so every time."""
    for each in wanted:
        trace = await ask(session, endpoint, each)
        if trace.status in ("http 400", "http 401", "http 403", "http 404", "not connected"):
            raise EngineError(
                f"{endpoint.target} refuses a request to warm up with: {trace.status}; check --url, --model, "
                "--api-key-file and the lengths"
            )


@dataclass(frozen=True, slots=True)
class _Sending:
    """What a run's requests have in common."""

    session: aiohttp.ClientSession
    endpoint: Endpoint
    load: Load
    progress: Progress


async def send(sending: _Sending, wanted: Sequence[Wanted]) -> tuple[Trace, ...]:
    """Every request, in the order of the list."""
    load, done = sending.load, 0
    places = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    begun_s = monotonic() + HEAD_START_S

    async def one(each: Wanted, after_s: float) -> Trace:
        nonlocal done
        intended_s = begun_s + after_s
        if (wait_s := intended_s - monotonic()) > 0:
            await asyncio.sleep(wait_s)
        async with places or nullcontext():
            # In a closed loop a request is not due before there is a place for it.
            is_due_now = places is not None and not load.is_open
            trace = await ask(
                sending.session, sending.endpoint, each, monotonic() if is_due_now else intended_s
            )
        done += 1
        sending.progress(done, load.num_requests)
        return trace

    pairs = zip(wanted, arrivals(load), strict=True)
    return tuple(await asyncio.gather(*(one(each, after_s) for each, after_s in pairs)))


async def with_timelines(
    session: aiohttp.ClientSession, endpoint: Endpoint, traces: Sequence[Trace]
) -> tuple[Trace, ...]:
    """The traces with their tth, where the server keeps timelines: asked for when nothing is measured."""
    found: list[Trace] = []
    num_missed = 0
    for trace in reversed(traces):
        tth_s = None
        # Servers keep the latest alone, and others none at all: the first few misses say which.
        if trace.is_ok and trace.id and num_missed < MISSED_MAX:
            tth_s = await time_to_handover(session, endpoint, trace.id)
            num_missed += tth_s is None
        found.append(replace(trace, tth_s=tth_s))
    return tuple(reversed(found))
