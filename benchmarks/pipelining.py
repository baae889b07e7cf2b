"""Layer pipelining off and on, in the form of the pull request that first measured it, sized to this machine.

A sweep over prompt lengths, dialogues of many turns, and a stress run. Both deployments are up at the same
time and take turns. Decode streams the first token, after admission: that is what TTFT means in that report.
The link is throttled so that a transfer takes about as long as the compute of its prompt.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
    find_vocabulary,
    join,
    make_prompt,
    make_session,
)
from baton.bench.serve.load import (
    BenchProcesses,
    ClientMeter,
    DeploymentShape,
    LoadResult,
    LoadSpec,
    TokenRange,
    drive,
    start_deployment,
)
from baton.bench.serve.report import LoadSummary, summarise

POLICIES = ("off", "cost")
"""Without layer pipelining and with."""
ROUTE_WORDS = ("--local", "never")
"""Every prompt is handed over, short ones too."""
LINK_DEFAULT = "32MB/s"
LENGTHS = (128, 256, 512, 1024)
SWEEP = LoadSpec(8, TokenRange(0, 0), TokenRange(16, 16), concurrency=4)
SWEEP_ROUNDS = 2
STRESS = LoadSpec(32, TokenRange(256, 256), TokenRange(64, 64), concurrency=16)
NUM_SESSIONS, NUM_TURNS = 16, 10
TURN_TOKENS, TURN_ANSWER = 32, 8


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


def turns(rounds: int) -> list[Turn]:
    """Everything for one policy, in order."""
    sweep = [
        Turn(str(length), replace(SWEEP, input_tokens=TokenRange(length, length)), index)
        for length in LENGTHS
        for index in range(rounds)
    ]
    return [*sweep, Turn("dialogue", None, 0), Turn("stress", STRESS, 0)]


def measure(options: SuiteOptions, progress: ProgressCallback) -> PipeliningResult:
    """Every part, the policies taking turns in changing order."""
    before = load_averages()
    link = options.link or LINK_DEFAULT
    shape = DeploymentShape(options.model or "demo", prefill_options=("--link", link))
    with BenchProcesses() as processes:
        urls = {}
        for policy in POLICIES:
            progress(None, 0, f"starting a deployment with --overlap {policy}")
            words = ("--overlap", policy, "--first-token", "decode")
            urls[policy] = start_deployment(
                processes, replace(shape, instance_options=words, route_options=ROUTE_WORDS)
            ).url
        timings, clients = asyncio.run(_measure(urls, options, progress))
    told = {"model": shape.model, "link": link, "policies": POLICIES, "seed": options.seed}
    return PipeliningResult(timings, told, (before, load_averages()), clients)


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: ProgressCallback
) -> tuple[dict[tuple[str, str], tuple[RequestTiming, ...]], list[str]]:
    first = OpenAIEndpoint(urls[POLICIES[0]])
    async with make_session(first) as session:
        model = await find_model(session, first)
        endpoints = {policy: OpenAIEndpoint(url, model) for policy, url in urls.items()}
        vocabulary = await find_vocabulary(session, endpoints[POLICIES[0]])
    found: dict[tuple[str, str], tuple[RequestTiming, ...]] = {}
    clients = []
    plan = list(_plan(turns(options.repeats or SWEEP_ROUNDS)))
    for number, (turn, policy) in enumerate(plan):
        progress(len(plan), number, f"{turn.part}, {policy}")
        seed = turn.seed(options.seed)
        if turn.load is None:
            run = await dialogues(endpoints[policy], vocabulary, seed)
        else:
            run = await drive(endpoints[policy], replace(turn.load, seed=seed), vocabulary)
        key = (turn.part, policy)
        found[key] = found.get(key, ()) + rebased(found.get(key, ()), run.timings)
        clients.append(f"{turn.part}, {policy}: {run.overhead}")
    return found, clients


def _plan(parts: list[Turn]) -> Iterator[tuple[Turn, str]]:
    """Each part by both policies in turn; who begins changes, so that a drift falls on both."""
    for number, turn in enumerate(parts):
        for policy in POLICIES if number % 2 == 0 else POLICIES[::-1]:
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


async def dialogues(endpoint: OpenAIEndpoint, vocabulary: int, seed: int) -> LoadResult:
    """Sessions at once, each a dialogue replayed: the next turn does not hold what the model answered."""

    async def one(number: int) -> list[RequestTiming]:
        source = random.Random(f"dialogue {seed} {number}")
        history: Prompt = make_prompt(source, TURN_TOKENS, vocabulary)
        timings = []
        for _ in range(NUM_TURNS):
            timings.append(await ask(session, endpoint, BenchRequest(history, TURN_ANSWER)))
            history = join(history, make_prompt(source, TURN_ANSWER + TURN_TOKENS, vocabulary))
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
        ("stress", f"stress ({STRESS})"),
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
