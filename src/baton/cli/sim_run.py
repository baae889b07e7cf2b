"""What `baton sim` runs: the production drivers under simulated faults, repeatable from a seed."""

from __future__ import annotations

import os
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from baton.sim.checkers import BUILT_IN, CHECKERS
from baton.sim.core import Violation
from baton.sim.faults import FAULTS
from baton.sim.runner import SeedResult, make_world, run_seeds, run_world
from baton.sim.scenarios import SCENARIOS, run_scenario
from baton.sim.world import World


def run(seed: int, seeds: int, jobs: int, scenario: str | None, *, has_trace: bool, is_list: bool) -> int:
    """The exit code."""
    if is_list:
        return _list()
    if scenario is not None:
        world, violation = run_scenario(scenario, is_traced=has_trace)
        return _report(world, violation, f"{scenario}: {SCENARIOS[scenario].text}: as expected")
    if has_trace:
        world = make_world(seed, is_traced=True)
        violation = run_world(world)
        return _report(world, violation, f"seed {seed}: {len(world.trace.rows)} events, no violation")
    return _search(seed, seeds, jobs or os.cpu_count() or 1)


def _search(first: int, count: int, num_jobs: int) -> int:
    results: list[SeedResult] = []
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("seeds", total=count)
        for result in run_seeds(first, count, num_jobs):
            results.append(result)
            progress.advance(task)
            if result.violation is not None:
                console.print(str(result.violation), markup=False)
                console.print(f"replay: baton sim --seed {result.seed} --trace", markup=False)
    num_bad = sum(result.violation is not None for result in results)
    num_transfers = sum(result.num_transfers for result in results)
    median_ms = 1000 * median(result.duration_s for result in results)
    text = f"{num_bad} violations" if num_bad else "no violation"
    print(
        f"{text} in {count} seeds from {first}: {num_transfers} transfers, median {median_ms:.0f} ms a seed"
    )
    return 1 if num_bad else 0


def _report(world: World, violation: Violation | None, text: str) -> int:
    for row in world.trace.rows:
        print(row)
    print(text if violation is None else str(violation))
    return 1 if violation is not None else 0


def _list() -> int:
    sections = {
        "scenarios": {name: scenario.text for name, scenario in sorted(SCENARIOS.items())},
        "faults": {name: _summary(fault) for name, fault in FAULTS.items()},
        "checkers": {**{name: _summary(checker) for name, checker in CHECKERS.items()}, **BUILT_IN},
    }
    for title, texts in sections.items():
        print(title)
        for name, text in texts.items():
            print(f"  {name:<26} {text}")
    return 0


def _summary(kind: type) -> str:
    """The first line of a docstring."""
    assert kind.__doc__ is not None
    return kind.__doc__.strip().partition("\n")[0]
