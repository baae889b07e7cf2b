"""What the router costs: latency that it adds, and requests a second against sglang-router, in the same run.

All parts share one set of dummy back ends. Latency: single requests in turn to a decode back end itself, to
our router, and to sglang-router. Throughput: bursts at a fixed concurrency, the routers taking turns.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.record import write
from baton.bench.serve.children import Child, Nursery, baton, free_port
from baton.bench.serve.pounding import Pounded, pound, take_turns
from baton.bench.serve.shown import loads, ms
from baton.bench.serve.suites import Progress, SuiteOptions
from baton.bench.serve.summary import spread

OURS, THEIRS, DIRECT = "baton", "sglang-router", "direct"
OVERHEAD_S_MAX = 0.002
RATIO_MIN = 0.5
NUM_TURNS = 400
CONCURRENCY = 16
BURST_S = 3.0
ROUNDS = 5
KINDS = {"whole": False, "streamed": True}


@dataclass(frozen=True, slots=True)
class Burst:
    """Many requests at once, and what they took of the processor in the one that was asked."""

    found: Pounded
    cpu_s: float

    @property
    def cpu_per_request_s(self) -> float:
        """What depends little on what else the machine does."""
        return self.cpu_s / self.found.num_ok if self.found.num_ok else 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that was measured, by kind of answer and by who was asked."""

    times_s: dict[str, dict[str, list[float]]]
    bursts: dict[str, dict[str, list[Burst]]]
    loads: tuple[list[float], list[float]]

    def added_s(self, kind: str, name: str) -> float:
        """Median of a request through a router, less the median of one past it."""
        times = self.times_s[kind]
        return median(times[name]) - median(times[DIRECT])

    def per_s(self, kind: str, name: str) -> float:
        """Median of the bursts."""
        return median(burst.found.per_s for burst in self.bursts[kind][name])

    def cpu_s(self, kind: str, name: str) -> float:
        """Processor time of a request, median of the bursts."""
        return median(burst.cpu_per_request_s for burst in self.bursts[kind][name])

    def ratio(self, kind: str) -> float | None:
        """Our requests a second by theirs: the median of neighbouring bursts."""
        bursts = self.bursts[kind]
        if THEIRS not in bursts:
            return None
        pairs = zip(bursts[OURS], bursts[THEIRS], strict=True)
        ratios = [ours.found.per_s / theirs.found.per_s for ours, theirs in pairs if theirs.found.per_s > 0]
        return median(ratios) if ratios else None


def measure(options: SuiteOptions, progress: Progress) -> Found:
    """Starts back ends and routers, and takes turns."""
    before = loads()
    with Nursery() as nursery:
        progress(None, 0, "starting back ends and routers")
        asked = start_all(nursery)
        times_s, bursts = asyncio.run(_measure(asked, options.repeats or ROUNDS, progress))
    return Found(times_s, bursts, (before, loads()))


def start_all(nursery: Nursery) -> dict[str, tuple[str, Child]]:
    """By name, where requests go and who answers there."""
    registry = nursery.registry()
    words = ["--registry", registry, "--secret-file", str(nursery.secret_file)]
    dummies = nursery.start("dummies", [sys.executable, "-m", "baton.bench.serve.dummy", *words])
    dummies.wait_word("dummies at ")
    listed = [line.split() for line in dummies.text().splitlines()]
    prefill = [(row[2], row[3]) for row in listed if row[0] == "prefill"]
    decode = [row[2] for row in listed if row[0] == "decode"]
    router = nursery.start("router", baton("route", *words, "--port", "0"))
    ours = router.wait_word("routing at ")
    router.wait_health(ours)
    asked = {DIRECT: (decode[0], dummies), OURS: (ours, router)}
    if importlib.util.find_spec("sglang_router") is not None:
        asked[THEIRS] = start_theirs(nursery, prefill, decode)
    return asked


def start_theirs(nursery: Nursery, prefill: list[tuple[str, str]], decode: list[str]) -> tuple[str, Child]:
    """sglang-router before these back ends."""
    port = free_port()
    words = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    words += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    for url, bootstrap_port in prefill:
        words += ["--prefill", url, bootstrap_port]
    for url in decode:
        words += ["--decode", url]
    child = nursery.start("sglang-router", words)
    url = f"http://127.0.0.1:{port}"
    child.wait_health(url)
    return url, child


async def _measure(
    asked: dict[str, tuple[str, Child]], rounds: int, progress: Progress
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[Burst]]]]:
    urls = {name: url for name, (url, _) in asked.items()}
    times_s: dict[str, dict[str, list[float]]] = {}
    bursts: dict[str, dict[str, list[Burst]]] = {kind: {name: [] for name in urls} for kind in KINDS}
    for kind, is_streamed in KINDS.items():
        progress(None, 0, f"latency, {kind}")
        await take_turns(urls, NUM_TURNS // 10, is_streamed=is_streamed)
        times_s[kind] = await take_turns(urls, NUM_TURNS, is_streamed=is_streamed)
    steps = [(number, kind, name) for number in range(rounds) for kind in KINDS for name in urls]
    for done, (_, kind, name) in enumerate(steps):
        progress(len(steps), done, f"requests/s, {kind}, {name}")
        child = asked[name][1]
        before_s = child.cpu_s()
        found = await pound(urls[name], CONCURRENCY, BURST_S, is_streamed=KINDS[kind])
        bursts[kind][name].append(Burst(found, child.cpu_s() - before_s))
    return times_s, bursts


def tables_of(found: Found) -> list[Table]:
    """Latency and throughput."""
    latency = Table("answers", "through", "median (ms)", "added (ms)", title="one request at a time")
    for kind, times in found.times_s.items():
        for name, values in times.items():
            added = "" if name == DIRECT else ms2(found.added_s(kind, name))
            latency.add_row(kind, name, ms2(median(values)), added)
    heads = ("requests/s", "failed", "p99 (ms)", "processor (us/request)")
    speed = Table("answers", "through", *heads, title=f"{CONCURRENCY} at once")
    for kind, bursts in found.bursts.items():
        for name, rounds in bursts.items():
            taken = spread([value for burst in rounds for value in burst.found.times_s])
            failed = sum(burst.found.num_failed for burst in rounds)
            cost = f"{found.cpu_s(kind, name) * 1e6:.0f}"
            p99 = ms(taken.p99_s) if taken else "-"
            speed.add_row(kind, name, f"{found.per_s(kind, name):.0f}", str(failed), p99, cost)
    return [latency, speed]


def ms2(value_s: float) -> str:
    """Milliseconds with two digits behind the point."""
    return f"{value_s * 1e3:.2f}"


def figures_of(found: Found) -> dict[str, Any]:
    """What is held against the targets."""
    shown: dict[str, Any] = {}
    for kind in KINDS:
        added_s, ratio = found.added_s(kind, OURS), found.ratio(kind)
        shown[kind] = {
            "added_s": added_s,
            "added_is_met": added_s <= OVERHEAD_S_MAX,
            "added_by_sglang_router_s": found.added_s(kind, THEIRS) if ratio is not None else None,
            "requests_per_s": {name: found.per_s(kind, name) for name in found.bursts[kind]},
            "cpu_per_request_s": {name: found.cpu_s(kind, name) for name in found.bursts[kind]},
            "ratio": ratio,
            "ratio_is_met": None if ratio is None else ratio >= RATIO_MIN,
        }
    return shown


def show(found: Found, path: Path, picture: Path | None) -> None:
    """Tables, record, and how the targets fared."""
    console = Console(width=max(Console().width, 100))
    for table in tables_of(found):
        console.print(table)
    figures = figures_of(found)
    record = {
        "targets": {"added_s_max": OVERHEAD_S_MAX, "ratio_min": RATIO_MIN},
        "concurrency": CONCURRENCY,
        "burst_s": BURST_S,
        "loadavg": {"before": found.loads[0], "after": found.loads[1]},
        "figures": figures,
        "bursts_per_s": {
            kind: {name: [burst.found.per_s for burst in rounds] for name, rounds in bursts.items()}
            for kind, bursts in found.bursts.items()
        },
    }
    write(path, record)
    print(f"written to {path}")
    for kind, each in figures.items():
        verdict = "met" if each["added_is_met"] else "MISSED"
        print(f"{kind}: our router adds {ms2(each['added_s'])} ms (at most 2: {verdict})")
        if each["ratio"] is None:
            print(
                f"{kind}: sglang-router is not installed (pip install sglang-router); nothing to compare with"
            )
            continue
        verdict = "met" if each["ratio_is_met"] else "MISSED"
        print(f"{kind}: {each['ratio']:.2f} of sglang-router's requests/s (at least 0.5: {verdict})")


def is_right(found: Found) -> bool:
    """Whether every request was answered."""
    bursts = [burst for by_name in found.bursts.values() for rounds in by_name.values() for burst in rounds]
    return not any(burst.found.num_failed for burst in bursts)
