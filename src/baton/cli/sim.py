"""`baton sim`: the production drivers under simulated faults, repeatable from a seed."""

from __future__ import annotations

import os
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from baton.cli.parser import command, flag, option
from baton.errors import ConfigError
from baton.sim.checkers import BUILT_IN, CHECKERS
from baton.sim.core import Violation
from baton.sim.faults import FAULTS
from baton.sim.runner import SeedResult, make_world, run_seeds, run_world
from baton.sim.scenarios import SCENARIOS, run_scenario
from baton.sim.world import World


@command
def sim(
    *,
    seed: int = option(1, "S", "the first seed"),
    seeds: int = option(1, "N", "how many seeds"),
    jobs: int = option(1, "J", "processes; 0: one per core"),
    trace: bool = flag("print every event of one seed"),
    scenario: str | None = option(None, "NAME", "run a named scenario"),
    list_: bool = flag("list scenarios, faults and checkers"),
) -> int:
    """Run instances of random layouts under random faults, and check every transfer.

    Exits with 1 if a checker finds a violation, and prints the command that replays it.
    """
    if seeds < 1 or jobs < 0:
        raise ConfigError(f"--seeds must be at least 1 and --jobs at least 0, got {seeds} and {jobs}")
    if list_:
        return _list()
    if scenario is not None:
        world, violation = run_scenario(scenario, is_traced=trace)
        return _report(world, violation, f"{scenario}: {SCENARIOS[scenario].text}: as expected")
    if trace:
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
