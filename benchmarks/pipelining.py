"""Layer pipelining off and on, in the form of the pull request that first measured it, sized to this machine.

A sweep over prompt lengths, dialogues of many turns, and a stress run. Decode streams the first token, after
admission: that is what TTFT means in that report. On CPUs both deployments are up at the same time and take
turns, and the link is throttled so that a transfer takes about as long as the compute of its prompt. On a GPU
(`--device cuda --model dummy:benchmarks/llama-8b.json`) one follows the other, since weights and KV caches of
both do not fit.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deployments import BenchProcesses, DeploymentShape, start_deployment
from rich.console import Console
from rich.table import Table
from suite import Panel, ProgressCallback, SuiteOptions, draw_panels, load_averages, run_suite

from baton.bench.record import write
from baton.bench.serve.client import (
    BenchRequest,
    OpenAIEndpoint,
    Prompt,
    RequestTiming,
    ask,
    find_model,
    join,
    make_prompt,
    make_session,
    probe,
)
from baton.bench.serve.load import (
    ClientMeter,
    LoadResult,
    LoadSpec,
    TokenRange,
    drive,
)
from baton.bench.serve.report import LoadSummary, summarise

POLICIES = ("off", "cost")
"""Without layer pipelining and with."""
ROUTE_WORDS = ("--local", "never")
"""Every prompt is handed over, short ones too."""
NUM_SESSIONS, NUM_TURNS = 16, 10
HALF_A_GPU = ("--gpu-memory-utilization", "0.45")
"""Prefill and decode share it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is sent, by device."""

    link: str
    lengths: tuple[int, ...]
    sweep: LoadSpec
    rounds: int
    stress: LoadSpec
    turn_tokens: int
    turn_answer: int
    instance_options: tuple[str, ...] = ()
    is_together: bool = True
    """Whether the deployments are up at the same time."""


SIZES = {
    "cpu": Sizes(
        link="32MB/s",
        lengths=(128, 256, 512, 1024),
        sweep=LoadSpec(8, TokenRange(0, 0), TokenRange(16, 16), concurrency=4),
        rounds=2,
        stress=LoadSpec(32, TokenRange(256, 256), TokenRange(64, 64), concurrency=16),
        turn_tokens=32,
        turn_answer=8,
    ),
    "cuda": Sizes(
        link="25GB/s",
        lengths=(256, 1024, 4096, 8192, 16384),
        sweep=LoadSpec(12, TokenRange(0, 0), TokenRange(64, 64), concurrency=12),
        rounds=3,
        stress=LoadSpec(64, TokenRange(4096, 4096), TokenRange(256, 256), concurrency=64),
        turn_tokens=256,
        turn_answer=32,
        instance_options=("--chunk-tokens", "8192", "--page-tokens", "64", *HALF_A_GPU),
        is_together=False,
    ),
}


@dataclass(frozen=True, slots=True)
class PipeliningResult:
    """Traces by part and policy; the parts of the sweep are named by their length."""

    timings: dict[tuple[str, str], tuple[RequestTiming, ...]]
    options: dict[str, Any]
    loads: tuple[list[float], list[float]]
    clients: list[str]

    def summary(self, part: str, policy: str) -> LoadSummary:
        """Of all rounds of a part."""
        return summarise(self.timings[part, policy])


@dataclass(frozen=True, slots=True)
class Turn:
    """One part for one policy: what is sent in it."""

    part: str
    load: LoadSpec | None
    """None: the dialogues."""
    round: int

    def seed(self, first: int) -> int:
        """Another one for each part and round: with the same, longer prompts begin as shorter ones did."""
        return zlib.crc32(f"{first} {self.part} {self.round}".encode())


def turns(sizes: Sizes, rounds: int) -> list[Turn]:
    """Everything for one policy, in order."""
    sweep = [
        Turn(str(length), replace(sizes.sweep, input_tokens=TokenRange(length, length)), index)
        for length in sizes.lengths
        for index in range(rounds)
    ]
    dialogues = [Turn("dialogue", None, index) for index in range(rounds)]
    return [*sweep, *dialogues, Turn("stress", sizes.stress, 0)]


def measure(options: SuiteOptions, progress: ProgressCallback) -> PipeliningResult:
    """Every part, the policies taking turns in changing order where both are up."""
    before, sizes = load_averages(), SIZES[options.device]
    link = options.link or sizes.link
    shape = DeploymentShape(options.model or "demo", prefill_options=("--link", link))
    timings: dict[tuple[str, str], tuple[RequestTiming, ...]] = {}
    clients: list[str] = []
    for policies in [POLICIES] if sizes.is_together else [(policy,) for policy in POLICIES]:
        with BenchProcesses() as processes:
            urls = {}
            for policy in policies:
                progress(None, 0, f"starting a deployment with --overlap {policy}")
                words = ("--overlap", policy, "--first-token", "decode", "--device", options.device)
                words += sizes.instance_options
                urls[policy] = start_deployment(
                    processes, replace(shape, instance_options=words, route_options=ROUTE_WORDS)
                ).url
            timed, told_clients = asyncio.run(_measure(urls, options, progress))
        timings |= timed
        clients += told_clients
    told = {"model": shape.model, "link": link, "policies": POLICIES, "seed": options.seed}
    told |= {"device": options.device, "sweep": str(sizes.sweep), "stress": str(sizes.stress)}
    told |= {"turn_tokens": sizes.turn_tokens, "turn_answer": sizes.turn_answer}
    return PipeliningResult(timings, told, (before, load_averages()), clients)


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: ProgressCallback
) -> tuple[dict[tuple[str, str], tuple[RequestTiming, ...]], list[str]]:
    sizes, policies = SIZES[options.device], tuple(urls)
    first = OpenAIEndpoint(urls[policies[0]])
    async with make_session(first) as session:
        model = await find_model(session, first)
        first, vocabulary = await probe(session, replace(first, model=model))
        endpoints = {policy: replace(first, url=url) for policy, url in urls.items()}
    found: dict[tuple[str, str], tuple[RequestTiming, ...]] = {}
    clients = []
    plan = list(_plan(turns(sizes, options.repeats or sizes.rounds), policies))
    for number, (turn, policy) in enumerate(plan):
        progress(len(plan), number, f"{turn.part}, {policy}")
        seed = turn.seed(options.seed)
        if turn.load is None:
            run = await dialogues(endpoints[policy], vocabulary, seed, sizes)
        else:
            run = await drive(endpoints[policy], replace(turn.load, seed=seed), vocabulary)
        key = (turn.part, policy)
        found[key] = found.get(key, ()) + rebased(found.get(key, ()), run.timings)
        clients.append(f"{turn.part}, {policy}: {run.overhead}")
    return found, clients


def _plan(parts: list[Turn], policies: tuple[str, ...]) -> Iterator[tuple[Turn, str]]:
    """Each part by the policies in turn; who begins changes, so that a drift falls on both."""
    for number, turn in enumerate(parts):
        for policy in policies if number % 2 == 0 else policies[::-1]:
            yield turn, policy


def rebased(
    before: tuple[RequestTiming, ...], timings: tuple[RequestTiming, ...]
) -> tuple[RequestTiming, ...]:
    """Timings as if their round had started when the one before ended, without the pause between."""
    if not before or not timings:
        return timings
    shift_s = max(timing.ended_s for timing in before) - min(timing.intended_s for timing in timings)
    return tuple(
        replace(
            timing,
            intended_s=timing.intended_s + shift_s,
            sent_s=timing.sent_s + shift_s,
            ended_s=timing.ended_s + shift_s,
            stamps_s=tuple(stamp + shift_s for stamp in timing.stamps_s),
        )
        for timing in timings
    )


async def dialogues(endpoint: OpenAIEndpoint, vocabulary: int, seed: int, sizes: Sizes) -> LoadResult:
    """Sessions at once, each a dialogue replayed: the next turn does not hold what the model answered."""

    async def one(number: int) -> list[RequestTiming]:
        source = random.Random(f"dialogue {seed} {number}")
        history: Prompt = make_prompt(source, sizes.turn_tokens, vocabulary)
        timings = []
        for _ in range(NUM_TURNS):
            timings.append(await ask(session, endpoint, BenchRequest(history, sizes.turn_answer)))
            num_tokens = sizes.turn_answer + sizes.turn_tokens
            history = join(history, make_prompt(source, num_tokens, vocabulary))
        return timings

    async with make_session(endpoint) as session, ClientMeter() as meter:
        found = await asyncio.gather(*(one(number) for number in range(NUM_SESSIONS)))
    return LoadResult(tuple(timing for timings in found for timing in timings), meter.overhead, endpoint)


def gain(without: float, with_it: float) -> str:
    """How much more or less, in percent."""
    return f"{(with_it / without - 1) * 100:+.0f} %" if without > 0 else "-"


def tables_of(found: PipeliningResult) -> list[Table]:
    """The tables of that report."""
    off, on = POLICIES
    lengths = [part for part, policy in found.timings if policy == off and part.isdecimal()]
    shown = []
    for title, figure in SWEEPS.items():
        table = Table("prompt", "without", "with", "change", title=title)
        for length in lengths:
            values = [figure(found.summary(length, policy)) for policy in (off, on)]
            table.add_row(length, *(f"{value:.0f}" for value in values), gain(*values))
        shown.append(table)
    for part, title in (
        ("dialogue", f"dialogues ({NUM_SESSIONS} sessions x {NUM_TURNS} turns)"),
        ("stress", f"stress ({found.options['stress']})"),
    ):
        table = Table("figure", "without", "with", "change", title=title)
        summaries = [found.summary(part, policy) for policy in (off, on)]
        for name, figure in ENDS.items():
            values = [figure(summary) for summary in summaries]
            table.add_row(name, *(f"{value:.1f}" for value in values), gain(*values))
        shown.append(table)
    return shown


def _mean_ms(summary: LoadSummary, name: str, which: str = "mean_s") -> float:
    found = summary.spreads.get(name)
    return float(getattr(found, which)) * 1e3 if found is not None else 0.0


SWEEPS: dict[str, Callable[[LoadSummary], float]] = {
    "TTFT (ms), mean": lambda summary: _mean_ms(summary, "ttft"),
    "TTFT (ms), p95": lambda summary: _mean_ms(summary, "ttft", "p95_s"),
    "throughput (tokens/s out)": lambda summary: summary.answer_tokens_per_s,
}
ENDS: dict[str, Callable[[LoadSummary], float]] = {
    "completed": lambda summary: float(summary.num_ok),
    "throughput (tokens/s)": lambda summary: summary.answer_tokens_per_s,
    "TTFT mean (ms)": lambda summary: _mean_ms(summary, "ttft"),
    "TPOT mean (ms)": lambda summary: _mean_ms(summary, "tpot"),
}


def panels_of(found: PipeliningResult) -> list[Panel]:
    """The sweep as diagrams."""
    lengths = [part for part, policy in found.timings if policy == POLICIES[0] and part.isdecimal()]
    panels = []
    for title, figure in SWEEPS.items():
        lines = {
            policy: [(float(length), figure(found.summary(length, policy))) for length in lengths]
            for policy in POLICIES
        }
        panels.append(Panel("tokens of the prompt", title, lines=lines))
    return panels


def show(found: PipeliningResult, path: Path, picture: Path | None) -> None:
    """Tables, record, failures."""
    console = Console(width=max(Console().width, 100))
    for table in tables_of(found):
        console.print(table)
    summaries = {
        f"{part}, {policy}": summarise(timings).as_json() for (part, policy), timings in found.timings.items()
    }
    load = {"before": found.loads[0], "after": found.loads[1]}
    write(path, {**found.options, "loadavg": load, "clients": found.clients, "summaries": summaries})
    if picture is not None:
        print(draw_panels(panels_of(found), picture, "layer pipelining off and on, by length of the prompt"))
    for key, summary in summaries.items():
        if summary["failures"]:
            print(f"failed in {key}: {summary['failures']}")


def is_right(found: PipeliningResult) -> bool:
    """Whether every request was answered."""
    return all(timing.is_ok for timings in found.timings.values() for timing in timings)


if __name__ == "__main__":
    run_suite("pipelining", measure, show, is_right)
