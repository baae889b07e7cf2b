"""What the router costs: the latency it adds, and its requests a second against sglang-router, in one run.

All servers share one set of dummy instances. Latency: single requests in turns, directly to a decode
instance, through our router, and through sglang-router. Throughput: bursts at a fixed concurrency, in turns.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import dummy_instances
from deployments import BenchProcesses
from load_generator import Burst, send_burst, take_turns
from rich.console import Console
from rich.table import Table
from suite import ProgressCallback, SuiteOptions, load_averages, run_suite

from baton.bench.record import write
from baton.bench.serve.client import percentiles_of
from baton.bench.serve.report import ms
from baton.supervisor import ChildProcess, free_port

OURS, THEIRS, DIRECT = "baton", "sglang-router", "direct"
OVERHEAD_S_MAX = 0.001
RATIO_MIN = 0.45
NUM_TURNS = 400
CONCURRENCY = 16
BURST_S = 3.0
ROUNDS = 5
KINDS = {"whole": False, "streamed": True}


@dataclass(frozen=True, slots=True)
class RouterBurst:
    """A burst, and the processor time of the process that answered it."""

    found: Burst
    cpu_s: float

    @property
    def cpu_per_request_s(self) -> float:
        """Depends little on other load."""
        return self.cpu_s / self.found.num_ok if self.found.num_ok else 0.0


@dataclass(frozen=True, slots=True)
class RouterResult:
    """Everything that was measured, by kind of answer and by server."""

    times_s: dict[str, dict[str, list[float]]]
    bursts: dict[str, dict[str, list[RouterBurst]]]
    loads: tuple[list[float], list[float]]

    def added_s(self, kind: str, name: str) -> float:
        """Median of a request through a router, less the median of a direct one."""
        times = self.times_s[kind]
        return median(times[name]) - median(times[DIRECT])

    def per_s(self, kind: str, name: str) -> float:
        """Median of the bursts."""
        return median(burst.found.per_s for burst in self.bursts[kind][name])

    def cpu_s(self, kind: str, name: str) -> float:
        """Processor time of a request, median of the bursts."""
        return median(burst.cpu_per_request_s for burst in self.bursts[kind][name])

    def ratio(self, kind: str) -> float | None:
        """Our requests a second over theirs: the median over adjacent bursts."""
        bursts = self.bursts[kind]
        if THEIRS not in bursts:
            return None
        pairs = zip(bursts[OURS], bursts[THEIRS], strict=True)
        ratios = [ours.found.per_s / theirs.found.per_s for ours, theirs in pairs if theirs.found.per_s > 0]
        return median(ratios) if ratios else None


def measure(options: SuiteOptions, progress: ProgressCallback) -> RouterResult:
    """Starts dummy instances and routers, and measures them in turns."""
    before = load_averages()
    with BenchProcesses() as processes:
        progress(None, 0, "starting dummy instances and routers")
        servers = start_all(processes)
        times_s, bursts = asyncio.run(_measure(servers, options.repeats or ROUNDS, progress))
    return RouterResult(times_s, bursts, (before, load_averages()))


def start_all(processes: BenchProcesses) -> dict[str, tuple[str, ChildProcess]]:
    """URL and process of each server, by name."""
    registry = processes.start_registry()
    arguments = ["--registry", registry, "--secret-file", str(processes.secret_file)]
    dummies = processes.start("dummies", [sys.executable, dummy_instances.__file__, *arguments])
    rows = []
    while not (line := dummies.read_line()).startswith("dummies at "):
        rows.append(line.split())
    prefill = [(row[2], row[3]) for row in rows if row[0] == "prefill"]
    decode = [row[2] for row in rows if row[0] == "decode"]
    ours, router = processes.start_router(registry)
    servers = {DIRECT: (decode[0], dummies), OURS: (ours, router)}
    if importlib.util.find_spec("sglang_router") is not None:
        servers[THEIRS] = start_theirs(processes, prefill, decode)
    return servers


def start_theirs(
    processes: BenchProcesses, prefill: list[tuple[str, str]], decode: list[str]
) -> tuple[str, ChildProcess]:
    """Starts sglang-router in front of these instances."""
    port = free_port()
    argv = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    argv += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    for url, bootstrap_port in prefill:
        argv += ["--prefill", url, bootstrap_port]
    for url in decode:
        argv += ["--decode", url]
    child = processes.start("sglang-router", argv)
    url = f"http://127.0.0.1:{port}"
    child.wait_healthy(url)
    return url, child


async def _measure(
    servers: dict[str, tuple[str, ChildProcess]], rounds: int, progress: ProgressCallback
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[RouterBurst]]]]:
    urls = {name: url for name, (url, _) in servers.items()}
    times_s: dict[str, dict[str, list[float]]] = {}
    bursts: dict[str, dict[str, list[RouterBurst]]] = {kind: {name: [] for name in urls} for kind in KINDS}
    for kind, is_streamed in KINDS.items():
        progress(None, 0, f"latency, {kind}")
        await take_turns(urls, NUM_TURNS // 10, is_streamed=is_streamed)
        times_s[kind] = await take_turns(urls, NUM_TURNS, is_streamed=is_streamed)
    steps = [(number, kind, name) for number in range(rounds) for kind in KINDS for name in urls]
    for done, (_, kind, name) in enumerate(steps):
        progress(len(steps), done, f"requests/s, {kind}, {name}")
        child = servers[name][1]
        before_s = child.cpu_s()
        found = await send_burst(urls[name], CONCURRENCY, BURST_S, is_streamed=KINDS[kind])
        bursts[kind][name].append(RouterBurst(found, child.cpu_s() - before_s))
    return times_s, bursts


def tables_of(found: RouterResult) -> list[Table]:
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
            taken = percentiles_of([value for burst in rounds for value in burst.found.times_s])
            failed = sum(burst.found.num_failed for burst in rounds)
            cost = f"{found.cpu_s(kind, name) * 1e6:.0f}"
            p99 = ms(taken.p99_s) if taken else "-"
            speed.add_row(kind, name, f"{found.per_s(kind, name):.0f}", str(failed), p99, cost)
    return [latency, speed]


def ms2(value_s: float) -> str:
    """Milliseconds with two decimals."""
    return f"{value_s * 1e3:.2f}"


def figures_of(found: RouterResult) -> dict[str, Any]:
    """The figures with their targets."""
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


def show(found: RouterResult, path: Path, picture: Path | None) -> None:
    """Prints tables and targets, and writes the record."""
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
    for kind, each in figures.items():
        verdict = "met" if each["added_is_met"] else "MISSED"
        print(f"{kind}: our router adds {ms2(each['added_s'])} ms (at most {ms2(OVERHEAD_S_MAX)}: {verdict})")
        if each["ratio"] is None:
            print(
                f"{kind}: sglang-router is not installed (pip install sglang-router); nothing to compare with"
            )
            continue
        verdict = "met" if each["ratio_is_met"] else "MISSED"
        print(f"{kind}: {each['ratio']:.2f} of sglang-router's requests/s (at least {RATIO_MIN}: {verdict})")


def is_right(found: RouterResult) -> bool:
    """Whether every request was answered."""
    bursts = [burst for by_name in found.bursts.values() for rounds in by_name.values() for burst in rounds]
    return not any(burst.found.num_failed for burst in bursts)


if __name__ == "__main__":
    run_suite("router", measure, show, is_right)
