"""`baton sim`: the production drivers under every fault there is, from a seed."""

from __future__ import annotations

import os
from statistics import median
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from baton.errors import ConfigError
from baton.sim.runner import Result, make_world, run_seeds, run_world
from baton.sim.scenarios import play, scenario, scenario_names
from baton.sim.variants import catch, variant, variant_names
from baton.sim.violation import Violation


def sim(
    *,
    seed: Annotated[int, typer.Option(metavar="S", help="the first seed")] = 1,
    seeds: Annotated[int, typer.Option(metavar="N", help="how many seeds")] = 1,
    jobs: Annotated[int, typer.Option(metavar="J", help="processes; 0: one per core")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="print every event of one seed")] = False,
    scenario_name: Annotated[
        str | None, typer.Option("--scenario", metavar="NAME", help="play a named scenario")
    ] = None,
    variant_name: Annotated[
        str | None, typer.Option("--variant", metavar="NAME", help="put a defect in, and catch it")
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="list scenarios and defects")] = False,
) -> int:
    """Runs instances of random layouts under random faults, and checks that nothing wrong is ever shown."""
    if seeds < 1 or jobs < 0:
        raise ConfigError(f"--seeds must be at least 1 and --jobs at least 0, found {seeds} and {jobs}")
    if list_names:
        return _list()
    if scenario_name is not None:
        return _play(scenario_name, trace)
    if variant_name is not None:
        return _catch(variant_name, trace)
    if trace:
        return _trace(seed)
    return _search(seed, seeds, jobs or os.cpu_count() or 1)


def _search(first: int, count: int, num_jobs: int) -> int:
    results: list[Result] = []
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
    middle_ms = 1000 * median(result.duration_s for result in results)
    found = f"{num_bad} violations" if num_bad else "no violation"
    print(
        f"{found} in {count} seeds from {first}: {num_transfers} transfers, median {middle_ms:.0f} ms a seed"
    )
    return 1 if num_bad else 0


def _trace(seed: int) -> int:
    world = make_world(seed, is_traced=True)
    found = run_world(world)
    for row in world.trace.rows:
        print(row)
    return _verdict(found, f"seed {seed}: {len(world.trace.rows)} events, no violation")


def _play(name: str, is_traced: bool) -> int:
    world, found = play(scenario(name), is_traced=is_traced)
    for row in world.trace.rows:
        print(row)
    return _verdict(found, f"{name}: {scenario(name).text}: as it should be")


def _catch(name: str, is_traced: bool) -> int:
    caught = catch(name, is_traced=is_traced)
    if caught is None:
        print(f"{name}: not caught in {variant(name).num_tries} tries")
        return 1
    for row in caught.world.trace.rows:
        print(row)
    print(f"{name}: caught in try {caught.num_tries}: {caught.violation}")
    return 0


def _verdict(found: Violation | None, text: str) -> int:
    print(text if found is None else str(found))
    return 1 if found is not None else 0


def _list() -> int:
    texts = {
        "scenarios": {name: scenario(name).text for name in scenario_names()},
        "defects": {name: variant(name).text for name in variant_names()},
    }
    for title, found in texts.items():
        print(title)
        for name, text in found.items():
            print(f"  {name:<34} {text}")
    return 0
