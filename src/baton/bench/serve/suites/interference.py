"""Why roles are taken apart: what long prompts do to streams that are running, and what it costs.

(a) ttft at concurrency 1, disaggregated by undisaggregated: single requests of several lengths, in turn.
(b) p99 of the gaps of running streams while long prompts arrive, disaggregated by combined: rounds in turn.
Every instance may use all cores and is started as it ships. Before the pair are two routers: one hands every
prompt over, the other is as it ships and leaves short prompts to decode. For comparison there is a combined
instance with small chunks: what one can do against long gaps without disaggregation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from baton.bench.record import write
from baton.bench.serve.children import Nursery
from baton.bench.serve.deployment import Shape, start, start_router
from baton.bench.serve.endpoint import Endpoint, ask, find_model, find_vocabulary, make_session
from baton.bench.serve.overhead import Overhead, Watch
from baton.bench.serve.picture import Panel, draw_panels
from baton.bench.serve.prompts import Wanted, make_prompt
from baton.bench.serve.shown import loads, ms
from baton.bench.serve.suites import Progress, SuiteOptions
from baton.bench.serve.summary import Spread, spread
from baton.bench.serve.traces import Trace
from baton.errors import EngineError

COMBINED, CHUNKED = "combined", "combined, small chunks"
PAIR, SHIPPED = "disaggregated", "disaggregated, auto"
HAND_OVER = ("--local", "never")
SMALL_CHUNKS = ("--chunk-tokens", "64")
TTFT_RATIO_MAX = 1.25
ITL_RATIO_MAX = 0.5
ALONE_TOKENS, ALONE_ANSWER, ALONE_TURNS = (64, 256, 1024), 2, 5
NUM_STREAMS = 4
STREAM = 16, 4000
"""Tokens of the prompt and of the answer, which is left when the last long prompt is answered."""
LONG_TOKENS, LONG_ANSWER = (512, 1024, 512, 1024), 2
LONG_EVERY_S = 2.5
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Round:
    """Streams of one deployment beside long prompts."""

    streams: tuple[Trace, ...]
    longs: tuple[Trace, ...]
    client: Overhead

    @property
    def gaps_s(self) -> list[float]:
        """Gaps that ended while long prompts were on their way."""
        return gaps_between(self.streams, *self.window_s)

    @property
    def window_s(self) -> tuple[float, float]:
        """From the first long prompt's sending to the last one's first token."""
        ends = [trace.stamps_s[0] for trace in self.longs if trace.stamps_s]
        return min(trace.intended_s for trace in self.longs), max(ends, default=0.0)


def gaps_between(traces: Sequence[Trace], begun_s: float, ended_s: float) -> list[float]:
    """Gaps between the tokens of these requests that were over in this time."""
    return [
        gap_s
        for trace in traces
        for stamp_s, gap_s in zip(trace.stamps_s[1:], trace.gaps_s, strict=True)
        if begun_s <= stamp_s <= ended_s
    ]


@dataclass(frozen=True, slots=True)
class Found:
    """Everything, by deployment."""

    alone: dict[tuple[str, int], list[Trace]]
    """By length of the prompt too."""
    rounds: dict[str, list[Round]]
    options: dict[str, Any]
    loads: tuple[list[float], list[float]]

    @property
    def model(self) -> str:
        """As it was named."""
        return str(self.options.get("model", ""))

    def ttft_s(self, name: str, length: int) -> float:
        """Median of single requests."""
        found = [trace.ttft_s for trace in self.alone[name, length] if trace.ttft_s is not None]
        if not found:
            raise EngineError(f"{name}: no answer to {length} tokens had text; use another model")
        return median(found)

    def gaps(self, name: str) -> Spread:
        """Of all rounds."""
        found = spread([gap_s for each in self.rounds[name] for gap_s in each.gaps_s])
        if found is None:
            raise EngineError(f"{name}: no stream ran while long prompts arrived; the answers are too short")
        return found

    def ttft_ratio(self, name: str, length: int) -> float:
        """By combined."""
        return self.ttft_s(name, length) / self.ttft_s(COMBINED, length)

    def ttft_ratio_worst(self, name: str) -> float:
        """Target (a): of all lengths."""
        return max(self.ttft_ratio(each, length) for each, length in self.alone if each == name)

    def itl_ratio(self, name: str) -> float:
        """Target (b)."""
        return self.gaps(name).p99_s / self.gaps(COMBINED).p99_s


def shapes(model: str, link: str) -> dict[str, Shape]:
    """The deployments that are compared."""
    words = ("--link", link) if link else ()
    combined = Shape(model, decode=())
    pair = Shape(model, source_words=words, route_words=HAND_OVER)
    return {
        COMBINED: combined,
        CHUNKED: replace(combined, instance_words=SMALL_CHUNKS),
        PAIR: pair,
    }


def described(wanted: dict[str, Shape]) -> dict[str, str]:
    """What each deployment was started with, for the record."""
    found = {}
    for name, shape in wanted.items():
        decode = "+".join(shape.decode) or "none: the other does both"
        words = " ".join((*shape.instance_words, *shape.source_words, *shape.route_words)) or "as it ships"
        found[name] = f"prefill {'+'.join(shape.prefill)}, decode {decode}; {words}"
    return {**found, SHIPPED: f"the instances of {PAIR!r} behind a router as it ships"}


def start_all(nursery: Nursery, wanted: dict[str, Shape], progress: Progress) -> dict[str, str]:
    """By name, where clients ask."""
    urls = {}
    for name, shape in wanted.items():
        progress(None, 0, f"starting: {name}")
        running = start(nursery, shape)
        urls[name] = running.url
        if name == PAIR:
            urls[SHIPPED] = start_router(nursery, running.registry)
    return urls


def measure(options: SuiteOptions, progress: Progress) -> Found:
    """Starts all deployments and takes turns."""
    before = loads()
    wanted = shapes(options.model or "demo", options.link)
    with Nursery() as nursery:
        urls = start_all(nursery, wanted, progress)
        alone, rounds = asyncio.run(_measure(urls, options, progress))
    told = {"model": options.model or "demo", "link": options.link or "none", "seed": options.seed}
    told["deployments"] = described(wanted)
    return Found(alone, rounds, told, (before, loads()))


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: Progress
) -> tuple[dict[tuple[str, int], list[Trace]], dict[str, list[Round]]]:
    first = Endpoint(urls[COMBINED])
    async with make_session(first) as session:
        model = await find_model(session, first)
        endpoints = {name: Endpoint(url, model) for name, url in urls.items()}
        vocabulary = await find_vocabulary(session, endpoints[COMBINED])
        source = Source(random.Random(options.seed), vocabulary)
        alone = await one_at_a_time(session, endpoints, source, progress)
        turns = _in_turn(list(urls), options.repeats or ROUNDS)
        rounds: dict[str, list[Round]] = {name: [] for name in urls}
        for done, (_, name) in enumerate(turns):
            progress(len(turns), done, f"streams beside long prompts: {name}")
            rounds[name].append(await one_round(session, endpoints[name], source))
    return alone, rounds


@dataclass(frozen=True, slots=True)
class Source:
    """Where prompts come from."""

    random: random.Random
    vocabulary: int

    def wanted(self, num_tokens: int, num_answer: int) -> Wanted:
        """A request that no cache has seen."""
        return Wanted(make_prompt(self.random, num_tokens, self.vocabulary), num_answer)


async def one_at_a_time(
    session: aiohttp.ClientSession, endpoints: dict[str, Endpoint], source: Source, progress: Progress
) -> dict[tuple[str, int], list[Trace]]:
    """Single requests of every length to everybody, by name and length."""
    turns = _in_turn(list(endpoints), ALONE_TURNS + 1)
    found: dict[tuple[str, int], list[Trace]] = {
        (name, length): [] for length in ALONE_TOKENS for name in endpoints
    }
    for done, (number, name) in enumerate(turns):
        progress(len(turns), done, f"one at a time: {name}")
        for length in ALONE_TOKENS:
            trace = await ask(session, endpoints[name], source.wanted(length, ALONE_ANSWER))
            if number:  # the first warms up
                found[name, length].append(trace)
    return found


def _in_turn(names: list[str], num_rounds: int) -> list[tuple[int, str]]:
    """Everybody once a round, in changing order, so that a drift falls on all."""
    return [(number, name) for number in range(num_rounds) for name in names[:: 1 if number % 2 else -1]]


async def one_round(session: aiohttp.ClientSession, endpoint: Endpoint, source: Source) -> Round:
    """Streams that run, and long prompts that arrive at fixed times meanwhile; then the streams are left."""
    over = asyncio.Event()

    async def later(wanted: Wanted, wait_s: float) -> Trace:
        await asyncio.sleep(wait_s)
        return await ask(session, endpoint, wanted)

    async with Watch() as watch:
        streams = [
            asyncio.create_task(ask(session, endpoint, source.wanted(*STREAM), None, over))
            for _ in range(NUM_STREAMS)
        ]
        longs = [
            asyncio.create_task(later(source.wanted(length, LONG_ANSWER), LONG_EVERY_S * (number + 1)))
            for number, length in enumerate(LONG_TOKENS)
        ]
        found = await asyncio.gather(*longs)
        over.set()
        left = await asyncio.gather(*streams)
    return Round(tuple(left), tuple(found), watch.found)


def tables_of(found: Found) -> list[Table]:
    """Both parts."""
    lengths = sorted({length for _, length in found.alone})
    heads = [f"{length} tokens" for length in lengths]
    alone = Table("deployment", *heads, title="ttft (ms, of combined), one at a time, median")
    for name in found.rounds:
        values = [(found.ttft_s(name, length), found.ttft_ratio(name, length)) for length in lengths]
        alone.add_row(name, *(f"{ms(value_s)} ({ratio:.2f})" for value_s, ratio in values))
    sizes = " and ".join(map(str, sorted(set(LONG_TOKENS))))
    title = f"{NUM_STREAMS} streams while prompts of {sizes} tokens arrive every {LONG_EVERY_S:g} s"
    columns = ("itl p50", "p90", "p99", "max (ms)", "p99 of combined", "ttft of the long ones")
    gaps = Table("deployment", *columns, title=title)
    for name, rounds in found.rounds.items():
        each = found.gaps(name)
        spread_s = (each.p50_s, each.p90_s, each.p99_s, each.max_s)
        first = [trace.ttft_s for one in rounds for trace in one.longs if trace.ttft_s is not None]
        ratio = f"{found.itl_ratio(name):.2f}"
        gaps.add_row(name, *(ms(value) for value in spread_s), ratio, ms(median(first)) if first else "-")
    return [alone, gaps]


def panels_of(found: Found) -> list[Panel]:
    """Both parts as diagrams."""
    names = list(found.rounds)
    lengths = sorted({length for _, length in found.alone})
    firsts = {name: [(length, found.ttft_s(name, length)) for length in lengths] for name in names}
    gaps = {name: [gap_s for each in found.rounds[name] for gap_s in each.gaps_s] for name in names}
    return [
        Panel("tokens of the prompt, one at a time", "ttft (s)", lines=firsts),
        Panel("gap of a stream beside long prompts (s)", "share of gaps", shares=gaps),
    ]


def figures_of(found: Found) -> dict[str, Any]:
    """Everything in numbers."""
    return {name: _figures(found, name, rounds) for name, rounds in found.rounds.items()}


def _figures(found: Found, name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    gaps = found.gaps(name)
    alone = {length: traces for (each, length), traces in found.alone.items() if each == name}
    return {
        "ttft_s": {length: found.ttft_s(name, length) for length in alone},
        "ttft_ratio": {length: found.ttft_ratio(name, length) for length in alone},
        "ttfts_s": {length: [trace.ttft_s for trace in traces] for length, traces in alone.items()},
        "itl_s": {key: getattr(gaps, key) for key in ("num", "p50_s", "p90_s", "p99_s", "max_s")},
        "itl_ratio": found.itl_ratio(name),
        "itl_p99_by_round_s": [each.p99_s for one in rounds if (each := spread(one.gaps_s)) is not None],
        "long_ttft_s": [trace.ttft_s for one in rounds for trace in one.longs],
        "client": [str(one.client) for one in rounds],
    }


def show(found: Found, path: Path, picture: Path | None) -> None:
    """Tables, record, and how the targets fared."""
    console = Console(width=max(Console().width, 120))
    for table in tables_of(found):
        console.print(table)
    targets = {"ttft_ratio_max": TTFT_RATIO_MAX, "itl_ratio_max": ITL_RATIO_MAX}
    load = {"before": found.loads[0], "after": found.loads[1]}
    write(path, {**found.options, "targets": targets, "loadavg": load, "figures": figures_of(found)})
    print(f"written to {path}")
    if picture is not None:
        print(draw_panels(panels_of(found), picture, f"one combined instance and a pair, {found.model}"))
    for trace in (trace for rounds in found.rounds.values() for each in rounds for trace in each.streams):
        if not trace.is_ok:
            print(f"failed: {trace.status}")
    for name in (name for name in found.rounds if name not in (COMBINED, CHUNKED)):
        first, gap = found.ttft_ratio_worst(name), found.itl_ratio(name)
        verdicts = [
            "met" if is_met else "MISSED" for is_met in (first <= TTFT_RATIO_MAX, gap <= ITL_RATIO_MAX)
        ]
        print(f"{name}: ttft {first:.2f} of combined (at most {TTFT_RATIO_MAX}: {verdicts[0]})")
        print(f"{name}: itl p99 {gap:.2f} of combined (at most {ITL_RATIO_MAX}: {verdicts[1]})")


def is_right(found: Found) -> bool:
    """Whether every request was answered."""
    traces = [trace for each in found.alone.values() for trace in each]
    for rounds in found.rounds.values():
        traces += [trace for each in rounds for trace in (*each.streams, *each.longs)]
    return all(trace.is_ok for trace in traces)
