"""Layer pipelining off and on, in the form of the pull request that first measured it, sized to this machine.

A sweep over prompt lengths, dialogues of many turns, and a stress run. Both deployments are up at the same
time and take turns; the first token is streamed by decode, after admission, which is what that report's TTFT
means. The link is throttled so that a transfer takes about as long as the compute of its prompt.
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

from baton.bench.record import write
from baton.bench.serve.children import Nursery
from baton.bench.serve.deployment import Shape, start
from baton.bench.serve.endpoint import Endpoint, ask, find_model, find_vocabulary, make_session
from baton.bench.serve.load import Run, drive
from baton.bench.serve.options import Lengths, Load
from baton.bench.serve.overhead import Watch
from baton.bench.serve.picture import Panel, draw_panels
from baton.bench.serve.prompts import Prompt, Wanted, join, make_prompt
from baton.bench.serve.shown import loads
from baton.bench.serve.suites import Progress, SuiteOptions
from baton.bench.serve.summary import Summary, summarise
from baton.bench.serve.traces import Trace

POLICIES = ("off", "cost")
"""Without layer pipelining and with."""
ROUTE_WORDS = ("--local", "never")
"""Every prompt is handed over, short ones too."""
LINK_DEFAULT = "32MB/s"
LENGTHS = (128, 256, 512, 1024)
SWEEP = Load(8, Lengths(0, 0), Lengths(16, 16), concurrency=4)
SWEEP_ROUNDS = 2
STRESS = Load(32, Lengths(256, 256), Lengths(64, 64), concurrency=16)
NUM_SESSIONS, NUM_TURNS = 16, 10
TURN_TOKENS, TURN_ANSWER = 32, 8


@dataclass(frozen=True, slots=True)
class Found:
    """Traces by part and policy; the parts of the sweep are named by their length."""

    traces: dict[tuple[str, str], tuple[Trace, ...]]
    options: dict[str, Any]
    loads: tuple[list[float], list[float]]
    clients: list[str]

    def summary(self, part: str, policy: str) -> Summary:
        """Of all rounds of a part."""
        return summarise(self.traces[part, policy])


@dataclass(frozen=True, slots=True)
class Turn:
    """One part for one policy: what is sent in it."""

    part: str
    load: Load | None
    """None: the dialogues."""
    round: int

    def seed(self, first: int) -> int:
        """Another one for each part and round: with the same, longer prompts begin as shorter ones did."""
        return zlib.crc32(f"{first} {self.part} {self.round}".encode())


def turns(rounds: int) -> list[Turn]:
    """Everything for one policy, in order."""
    sweep = [
        Turn(str(length), replace(SWEEP, input_tokens=Lengths(length, length)), index)
        for length in LENGTHS
        for index in range(rounds)
    ]
    return [*sweep, Turn("dialogue", None, 0), Turn("stress", STRESS, 0)]


def measure(options: SuiteOptions, progress: Progress) -> Found:
    """Every part, the policies taking turns in changing order."""
    before = loads()
    link = options.link or LINK_DEFAULT
    shape = Shape(options.model or "demo", source_words=("--link", link))
    with Nursery() as nursery:
        urls = {}
        for policy in POLICIES:
            progress(None, 0, f"starting a deployment with --overlap {policy}")
            words = ("--overlap", policy, "--first-token", "decode")
            urls[policy] = start(nursery, replace(shape, instance_words=words, route_words=ROUTE_WORDS)).url
        traces, clients = asyncio.run(_measure(urls, options, progress))
    told = {"model": shape.model, "link": link, "policies": POLICIES, "seed": options.seed}
    return Found(traces, told, (before, loads()), clients)


async def _measure(
    urls: dict[str, str], options: SuiteOptions, progress: Progress
) -> tuple[dict[tuple[str, str], tuple[Trace, ...]], list[str]]:
    first = Endpoint(urls[POLICIES[0]])
    async with make_session(first) as session:
        model = await find_model(session, first)
        endpoints = {policy: Endpoint(url, model) for policy, url in urls.items()}
        vocabulary = await find_vocabulary(session, endpoints[POLICIES[0]])
    found: dict[tuple[str, str], tuple[Trace, ...]] = {}
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
        found[key] = found.get(key, ()) + rebased(found.get(key, ()), run.traces)
        clients.append(f"{turn.part}, {policy}: {run.overhead}")
    return found, clients


def _plan(parts: list[Turn]) -> Iterator[tuple[Turn, str]]:
    """Each part by both policies in turn; who begins changes, so that a drift falls on both."""
    for number, turn in enumerate(parts):
        for policy in POLICIES if number % 2 == 0 else POLICIES[::-1]:
            yield turn, policy


def rebased(before: tuple[Trace, ...], traces: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """Traces as if their round had begun when the one before ended: the pause between belongs to nobody."""
    if not before or not traces:
        return traces
    shift_s = max(trace.ended_s for trace in before) - min(trace.intended_s for trace in traces)
    return tuple(
        replace(
            trace,
            intended_s=trace.intended_s + shift_s,
            sent_s=trace.sent_s + shift_s,
            ended_s=trace.ended_s + shift_s,
            stamps_s=tuple(stamp + shift_s for stamp in trace.stamps_s),
        )
        for trace in traces
    )


async def dialogues(endpoint: Endpoint, vocabulary: int, seed: int) -> Run:
    """Sessions at once, each a dialogue replayed: the next turn does not hold what the model answered."""

    async def one(number: int) -> list[Trace]:
        source = random.Random(f"dialogue {seed} {number}")
        history: Prompt = make_prompt(source, TURN_TOKENS, vocabulary)
        traces = []
        for _ in range(NUM_TURNS):
            traces.append(await ask(session, endpoint, Wanted(history, TURN_ANSWER)))
            history = join(history, make_prompt(source, TURN_ANSWER + TURN_TOKENS, vocabulary))
        return traces

    async with make_session(endpoint) as session, Watch() as watch:
        found = await asyncio.gather(*(one(number) for number in range(NUM_SESSIONS)))
    return Run(tuple(trace for traces in found for trace in traces), watch.found, endpoint)


def gain(without: float, with_it: float) -> str:
    """How much more or less, in percent."""
    return f"{(with_it / without - 1) * 100:+.0f} %" if without > 0 else "-"


def tables_of(found: Found) -> list[Table]:
    """The tables of that report."""
    off, on = POLICIES
    lengths = [part for part, policy in found.traces if policy == off and part.isdecimal()]
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


def _mean_ms(summary: Summary, name: str, which: str = "mean_s") -> float:
    found = summary.spreads.get(name)
    return float(getattr(found, which)) * 1e3 if found is not None else 0.0


SWEEPS: dict[str, Callable[[Summary], float]] = {
    "TTFT (ms), mean": lambda summary: _mean_ms(summary, "ttft"),
    "TTFT (ms), p95": lambda summary: _mean_ms(summary, "ttft", "p95_s"),
    "throughput (tokens/s out)": lambda summary: summary.answer_tokens_per_s,
}
ENDS: dict[str, Callable[[Summary], float]] = {
    "completed": lambda summary: float(summary.num_ok),
    "throughput (tokens/s)": lambda summary: summary.answer_tokens_per_s,
    "TTFT mean (ms)": lambda summary: _mean_ms(summary, "ttft"),
    "TPOT mean (ms)": lambda summary: _mean_ms(summary, "tpot"),
}


def panels_of(found: Found) -> list[Panel]:
    """The sweep as diagrams."""
    lengths = [part for part, policy in found.traces if policy == POLICIES[0] and part.isdecimal()]
    panels = []
    for title, figure in SWEEPS.items():
        lines = {
            policy: [(float(length), figure(found.summary(length, policy))) for length in lengths]
            for policy in POLICIES
        }
        panels.append(Panel("tokens of the prompt", title, lines=lines))
    return panels


def show(found: Found, path: Path, picture: Path | None) -> None:
    """Tables, record, failures."""
    console = Console(width=max(Console().width, 100))
    for table in tables_of(found):
        console.print(table)
    summaries = {
        f"{part}, {policy}": summarise(traces).as_json() for (part, policy), traces in found.traces.items()
    }
    load = {"before": found.loads[0], "after": found.loads[1]}
    write(path, {**found.options, "loadavg": load, "clients": found.clients, "summaries": summaries})
    print(f"written to {path}")
    if picture is not None:
        print(draw_panels(panels_of(found), picture, "layer pipelining off and on, by length of the prompt"))
    for key, summary in summaries.items():
        if summary["failures"]:
            print(f"failed in {key}: {summary['failures']}")


def is_right(found: Found) -> bool:
    """Whether every request was answered."""
    return all(trace.is_ok for traces in found.traces.values() for trace in traces)
