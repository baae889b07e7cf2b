"""Why prefill and decode are disaggregated: what long prompts do to running streams, and what it costs.

(a) ttft at concurrency 1, disaggregated over combined: single requests of several lengths, in turns.
(b) p99 of the inter-token gaps of running streams while long prompts arrive, disaggregated over combined.
Every instance may use all cores and has default options. The pair has two routers: one hands every prompt
over, the other has default options and leaves short prompts to decode. For comparison there is a combined
instance with small chunks, the usual remedy against long gaps without disaggregation.
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
from deployments import BenchProcesses, DeploymentShape, start_deployment
from rich.console import Console
from rich.table import Table
from suite import Panel, ProgressCallback, SuiteOptions, draw_panels, load_averages, run_suite

from baton.bench.record import write
from baton.bench.serve.client import (
    BenchRequest,
    OpenAIEndpoint,
    Percentiles,
    RequestTiming,
    ask,
    find_model,
    make_prompt,
    make_session,
    percentiles_of,
    probe,
)
from baton.bench.serve.load import ClientMeter, ClientOverhead
from baton.bench.serve.report import ms
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
"""Tokens of the prompt and of the answer, which is stopped when the last long prompt is answered."""
LONG_TOKENS, LONG_ANSWER = (512, 1024, 512, 1024), 2
LONG_EVERY_S = 2.5
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Round:
    """Streams of one deployment beside long prompts."""

    streams: tuple[RequestTiming, ...]
    longs: tuple[RequestTiming, ...]
    client: ClientOverhead

    @property
    def gaps_s(self) -> list[float]:
        """Gaps that ended while long prompts were on their way."""
        return gaps_between(self.streams, *self.window_s)

    @property
    def window_s(self) -> tuple[float, float]:
        """From the first long prompt's sending to the last one's first token."""
        ends = [timing.stamps_s[0] for timing in self.longs if timing.stamps_s]
        return min(timing.intended_s for timing in self.longs), max(ends, default=0.0)


def gaps_between(timings: Sequence[RequestTiming], begun_s: float, ended_s: float) -> list[float]:
    """Gaps between the tokens of these requests that were over in this time."""
    return [
        gap_s
        for timing in timings
        for stamp_s, gap_s in zip(timing.stamps_s[1:], timing.gaps_s, strict=True)
        if begun_s <= stamp_s <= ended_s
    ]


@dataclass(frozen=True, slots=True)
class InterferenceResult:
    """Everything, by deployment."""

    alone: dict[tuple[str, int], list[RequestTiming]]
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
        found = [timing.ttft_s for timing in self.alone[name, length] if timing.ttft_s is not None]
        if not found:
            raise EngineError(f"{name}: no answer to {length} tokens had text; use another model")
        return median(found)

    def gaps(self, name: str) -> Percentiles:
        """Of all rounds."""
        found = percentiles_of([gap_s for each in self.rounds[name] for gap_s in each.gaps_s])
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


def shapes(model: str, link: str) -> dict[str, DeploymentShape]:
    """The deployments that are compared."""
    words = ("--link", link) if link else ()
    combined = DeploymentShape(model, decode=())
    pair = DeploymentShape(model, prefill_options=words, route_options=HAND_OVER)
    return {
        COMBINED: combined,
        CHUNKED: replace(combined, instance_options=SMALL_CHUNKS),
        PAIR: pair,
    }


def described(wanted: dict[str, DeploymentShape]) -> dict[str, str]:
    """The options of each deployment, for the record."""
    found = {}
    for name, shape in wanted.items():
        decode = "+".join(shape.decode) or "none: the other does both"
        words = (
            " ".join((*shape.instance_options, *shape.prefill_options, *shape.route_options))
            or "default options"
        )
        found[name] = f"prefill {'+'.join(shape.prefill)}, decode {decode}; {words}"
    return {**found, SHIPPED: f"the instances of {PAIR!r} behind a router with default options"}


def start_all(
    processes: BenchProcesses, wanted: dict[str, DeploymentShape], progress: ProgressCallback
) -> dict[str, str]:
    """URLs by name."""
    urls = {}
    for name, shape in wanted.items():
        progress(None, 0, f"starting: {name}")
        deployment = start_deployment(processes, shape)
        urls[name] = deployment.url
        if name == PAIR:
            urls[SHIPPED], _ = processes.start_router(deployment.registry)
    return urls


def measure(options: SuiteOptions, progress: ProgressCallback) -> InterferenceResult:
    """Starts all deployments and takes turns."""
    before = load_averages()
    wanted = shapes(options.model or "demo", options.link)
    with BenchProcesses() as processes:
        urls = start_all(processes, wanted, progress)
        alone, rounds = asyncio.run(_measure(urls, options, progress))
    told = {"model": options.model or "demo", "link": options.link or "none", "seed": options.seed}
    told["deployments"] = described(wanted)
    return InterferenceResult(alone, rounds, told, (before, load_averages()))


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: ProgressCallback
) -> tuple[dict[tuple[str, int], list[RequestTiming]], dict[str, list[Round]]]:
    first = OpenAIEndpoint(urls[COMBINED])
    async with make_session(first) as session:
        model = await find_model(session, first)
        first, vocabulary = await probe(session, replace(first, model=model))
        endpoints = {name: replace(first, url=url) for name, url in urls.items()}
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

    def wanted(self, num_tokens: int, num_answer: int) -> BenchRequest:
        """A request that no cache has seen."""
        return BenchRequest(make_prompt(self.random, num_tokens, self.vocabulary), num_answer)


async def one_at_a_time(
    session: aiohttp.ClientSession,
    endpoints: dict[str, OpenAIEndpoint],
    source: Source,
    progress: ProgressCallback,
) -> dict[tuple[str, int], list[RequestTiming]]:
    """Single requests of every length to every deployment, by name and length."""
    turns = _in_turn(list(endpoints), ALONE_TURNS + 1)
    found: dict[tuple[str, int], list[RequestTiming]] = {
        (name, length): [] for length in ALONE_TOKENS for name in endpoints
    }
    for done, (number, name) in enumerate(turns):
        progress(len(turns), done, f"one at a time: {name}")
        for length in ALONE_TOKENS:
            timing = await ask(session, endpoints[name], source.wanted(length, ALONE_ANSWER))
            if number:  # the first warms up
                found[name, length].append(timing)
    return found


def _in_turn(names: list[str], num_rounds: int) -> list[tuple[int, str]]:
    """Every deployment once a round, in changing order, so that a drift falls on all."""
    return [(number, name) for number in range(num_rounds) for name in names[:: 1 if number % 2 else -1]]


async def one_round(session: aiohttp.ClientSession, endpoint: OpenAIEndpoint, source: Source) -> Round:
    """Streams that run, and long prompts that arrive at fixed times meanwhile; then the streams are left."""
    over = asyncio.Event()

    async def later(wanted: BenchRequest, wait_s: float) -> RequestTiming:
        await asyncio.sleep(wait_s)
        return await ask(session, endpoint, wanted)

    async with ClientMeter() as meter:
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
    return Round(tuple(left), tuple(found), meter.overhead)


def tables_of(found: InterferenceResult) -> list[Table]:
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
        first = [timing.ttft_s for one in rounds for timing in one.longs if timing.ttft_s is not None]
        ratio = f"{found.itl_ratio(name):.2f}"
        gaps.add_row(name, *(ms(value) for value in spread_s), ratio, ms(median(first)) if first else "-")
    return [alone, gaps]


def panels_of(found: InterferenceResult) -> list[Panel]:
    """Both parts as diagrams."""
    names = list(found.rounds)
    lengths = sorted({length for _, length in found.alone})
    firsts = {name: [(length, found.ttft_s(name, length)) for length in lengths] for name in names}
    gaps = {name: [gap_s for each in found.rounds[name] for gap_s in each.gaps_s] for name in names}
    return [
        Panel("tokens of the prompt, one at a time", "ttft (s)", lines=firsts),
        Panel("gap of a stream beside long prompts (s)", "share of gaps", distributions=gaps),
    ]


def figures_of(found: InterferenceResult) -> dict[str, Any]:
    """Everything in numbers."""
    return {name: _figures(found, name, rounds) for name, rounds in found.rounds.items()}


def _figures(found: InterferenceResult, name: str, rounds: Sequence[Round]) -> dict[str, Any]:
    gaps = found.gaps(name)
    alone = {length: timings for (each, length), timings in found.alone.items() if each == name}
    return {
        "ttft_s": {length: found.ttft_s(name, length) for length in alone},
        "ttft_ratio": {length: found.ttft_ratio(name, length) for length in alone},
        "ttfts_s": {length: [timing.ttft_s for timing in timings] for length, timings in alone.items()},
        "itl_s": {key: getattr(gaps, key) for key in ("num", "p50_s", "p90_s", "p99_s", "max_s")},
        "itl_ratio": found.itl_ratio(name),
        "itl_p99_by_round_s": [
            each.p99_s for one in rounds if (each := percentiles_of(one.gaps_s)) is not None
        ],
        "long_ttft_s": [timing.ttft_s for one in rounds for timing in one.longs],
        "client": [str(one.client) for one in rounds],
    }


def show(found: InterferenceResult, path: Path, picture: Path | None) -> None:
    """Tables, record, and how the targets fared."""
    console = Console(width=max(Console().width, 120))
    for table in tables_of(found):
        console.print(table)
    targets = {"ttft_ratio_max": TTFT_RATIO_MAX, "itl_ratio_max": ITL_RATIO_MAX}
    load = {"before": found.loads[0], "after": found.loads[1]}
    write(path, {**found.options, "targets": targets, "loadavg": load, "figures": figures_of(found)})
    if picture is not None:
        print(draw_panels(panels_of(found), picture, f"one combined instance and a pair, {found.model}"))
    for timing in (timing for rounds in found.rounds.values() for each in rounds for timing in each.streams):
        if not timing.is_ok:
            print(f"failed: {timing.status}")
    for name in (name for name in found.rounds if name not in (COMBINED, CHUNKED)):
        first, gap = found.ttft_ratio_worst(name), found.itl_ratio(name)
        verdicts = [
            "met" if is_met else "MISSED" for is_met in (first <= TTFT_RATIO_MAX, gap <= ITL_RATIO_MAX)
        ]
        print(f"{name}: ttft {first:.2f} of combined (at most {TTFT_RATIO_MAX}: {verdicts[0]})")
        print(f"{name}: itl p99 {gap:.2f} of combined (at most {ITL_RATIO_MAX}: {verdicts[1]})")


def is_right(found: InterferenceResult) -> bool:
    """Whether every request was answered."""
    timings = [timing for each in found.alone.values() for timing in each]
    for rounds in found.rounds.values():
        timings += [timing for each in rounds for timing in (*each.streams, *each.longs)]
    return all(timing.is_ok for timing in timings)


if __name__ == "__main__":
    run_suite("interference", measure, show, is_right)
