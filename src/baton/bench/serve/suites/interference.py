"""Why roles are taken apart: what long prompts do to streams that are running, and what it costs.

(a) ttft at concurrency 1, disaggregated by undisaggregated: single requests in turn.
(b) p99 of the gaps of running streams while long prompts arrive, disaggregated by combined: rounds in turn.
Every instance may use all cores and is started as it ships. Before the pair are two routers: one hands every
prompt over, the other is as it ships and leaves short prompts to decode. One more pair has its prefill
processes at a lower scheduling priority.
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
from baton.bench.serve.prompts import Wanted, make_prompt
from baton.bench.serve.shown import loads, ms
from baton.bench.serve.suites import Progress, SuiteOptions
from baton.bench.serve.summary import Spread, spread
from baton.bench.serve.traces import Trace
from baton.errors import EngineError

COMBINED, PAIR, SHIPPED, NICED = "combined", "disaggregated", "disaggregated, auto", "disaggregated, niced"
HAND_OVER = ("--local", "never")
NICENESS = 10
TTFT_RATIO_MAX = 1.25
ITL_RATIO_MAX = 0.5
ALONE_TOKENS, ALONE_ANSWER, ALONE_TURNS = 512, 2, 6
NUM_STREAMS, STREAM_TOKENS, STREAM_ANSWER = 4, 16, 200
NUM_LONG, LONG_TOKENS, LONG_ANSWER = 3, 1024, 2
LONG_EVERY_S = 3.0
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

    alone: dict[str, list[Trace]]
    rounds: dict[str, list[Round]]
    options: dict[str, Any]
    loads: tuple[list[float], list[float]]

    def ttft_s(self, name: str) -> float:
        """Median of single requests."""
        return median(trace.ttft_s for trace in self.alone[name] if trace.ttft_s is not None)

    def gaps(self, name: str) -> Spread:
        """Of all rounds."""
        found = spread([gap_s for each in self.rounds[name] for gap_s in each.gaps_s])
        if found is None:
            raise EngineError(f"{name}: no stream ran while long prompts arrived; the answers are too short")
        return found

    def ttft_ratio(self, name: str) -> float:
        """Target (a)."""
        return self.ttft_s(name) / self.ttft_s(COMBINED)

    def itl_ratio(self, name: str) -> float:
        """Target (b)."""
        return self.gaps(name).p99_s / self.gaps(COMBINED).p99_s


def shapes(model: str, link: str) -> dict[str, Shape]:
    """The deployments that are compared."""
    words = ("--link", link) if link else ()
    pair = Shape(model, source_words=words, route_words=HAND_OVER)
    return {COMBINED: Shape(model, decode=()), PAIR: pair, NICED: replace(pair, prefill_niceness=NICENESS)}


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
    return Found(alone, rounds, told, (before, loads()))


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: Progress
) -> tuple[dict[str, list[Trace]], dict[str, list[Round]]]:
    num_rounds = options.repeats or ROUNDS
    first = Endpoint(urls[COMBINED])
    async with make_session(first) as session:
        model = await find_model(session, first)
        endpoints = {name: Endpoint(url, model) for name, url in urls.items()}
        vocabulary = await find_vocabulary(session, endpoints[COMBINED])
        source = random.Random(options.seed)
        turns = list(_in_turn(list(urls), ALONE_TURNS + 1))
        alone: dict[str, list[Trace]] = {name: [] for name in urls}
        for done, (number, name) in enumerate(turns):
            progress(len(turns), done, f"one at a time: {name}")
            wanted = Wanted(make_prompt(source, ALONE_TOKENS, vocabulary), ALONE_ANSWER)
            trace = await ask(session, endpoints[name], wanted)
            if number:  # the first warms up
                alone[name].append(trace)
        turns = list(_in_turn(list(urls), num_rounds))
        rounds: dict[str, list[Round]] = {name: [] for name in urls}
        for done, (_, name) in enumerate(turns):
            progress(len(turns), done, f"streams beside long prompts: {name}")
            rounds[name].append(await one_round(session, endpoints[name], source, vocabulary))
    return alone, rounds


def _in_turn(names: list[str], num_rounds: int) -> list[tuple[int, str]]:
    """Everybody once a round, in changing order, so that a drift falls on all."""
    return [(number, name) for number in range(num_rounds) for name in names[:: 1 if number % 2 else -1]]


async def one_round(
    session: aiohttp.ClientSession, endpoint: Endpoint, source: random.Random, vocabulary: int
) -> Round:
    """Streams that run, long prompts that arrive at fixed times meanwhile, and the end of all."""
    short = [
        Wanted(make_prompt(source, STREAM_TOKENS, vocabulary), STREAM_ANSWER) for _ in range(NUM_STREAMS)
    ]
    long = [Wanted(make_prompt(source, LONG_TOKENS, vocabulary), LONG_ANSWER) for _ in range(NUM_LONG)]

    async def later(wanted: Wanted, wait_s: float) -> Trace:
        await asyncio.sleep(wait_s)
        return await ask(session, endpoint, wanted)

    async with Watch() as watch:
        streams = [asyncio.create_task(ask(session, endpoint, each)) for each in short]
        longs = [
            asyncio.create_task(later(each, LONG_EVERY_S * (number + 1))) for number, each in enumerate(long)
        ]
        found = await asyncio.gather(*streams, *longs)
    return Round(tuple(found[:NUM_STREAMS]), tuple(found[NUM_STREAMS:]), watch.found)


def tables_of(found: Found) -> list[Table]:
    """Both parts."""
    alone = Table(
        "deployment", "ttft median (ms)", "of combined", title=f"{ALONE_TOKENS} tokens, one at a time"
    )
    for name in found.alone:
        alone.add_row(name, ms(found.ttft_s(name)), f"{found.ttft_ratio(name):.2f}")
    title = f"{NUM_STREAMS} streams while prompts of {LONG_TOKENS} tokens arrive every {LONG_EVERY_S:g} s"
    heads = ("itl p50", "p90", "p99", "max (ms)", "p99 of combined", "ttft of the long ones")
    gaps = Table("deployment", *heads, title=title)
    for name, rounds in found.rounds.items():
        each = found.gaps(name)
        values = (each.p50_s, each.p90_s, each.p99_s, each.max_s)
        first = [trace.ttft_s for one in rounds for trace in one.longs if trace.ttft_s is not None]
        ratio = f"{found.itl_ratio(name):.2f}"
        gaps.add_row(name, *(ms(value) for value in values), ratio, ms(median(first)) if first else "-")
    return [alone, gaps]


def figures_of(found: Found) -> dict[str, Any]:
    """Everything in numbers."""
    return {
        name: {
            "ttft_s": found.ttft_s(name),
            "ttft_ratio": found.ttft_ratio(name),
            "ttfts_s": [trace.ttft_s for trace in found.alone[name]],
            "itl_s": {
                key: getattr(found.gaps(name), key) for key in ("num", "p50_s", "p90_s", "p99_s", "max_s")
            },
            "itl_ratio": found.itl_ratio(name),
            "itl_p99_by_round_s": [
                gaps.p99_s for each in rounds if (gaps := spread(each.gaps_s)) is not None
            ],
            "long_ttft_s": [trace.ttft_s for each in rounds for trace in each.longs],
            "client": [str(each.client) for each in rounds],
        }
        for name, rounds in found.rounds.items()
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
    for trace in (trace for rounds in found.rounds.values() for each in rounds for trace in each.streams):
        if not trace.is_ok:
            print(f"failed: {trace.status}")
    for name in (PAIR, SHIPPED, NICED):
        first, gap = found.ttft_ratio(name), found.itl_ratio(name)
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
