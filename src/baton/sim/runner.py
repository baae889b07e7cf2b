"""Runs seeds: one here, or many over several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from baton.sim.chance import Chance
from baton.sim.options import Options, draw_options
from baton.sim.violation import Violation
from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one seed."""

    seed: int
    duration_s: float
    num_transfers: int
    num_steps: int
    violation: Violation | None = None


def options_of(seed: int, **changes: Any) -> Options:
    """The options that a seed draws, with some of them set."""
    return draw_options(Chance(seed).of("options")).but(**changes)


def make_world(seed: int, options: Options | None = None, *, is_traced: bool = False) -> World:
    """A world that is about to start."""
    world = World(seed, options or options_of(seed), is_traced=is_traced)
    world.populate()
    world.router.draw()
    return world


def run_world(world: World) -> Violation | None:
    """Runs a world to its end; what escapes a driver is a finding like any other."""
    try:
        world.run()
    except Violation as found:
        # What was seen first may have come out of a driver as something else.
        return world.checkers.found or found
    except Exception as error:
        at = f"at {world.schedule.now:.4f} s: {type(error).__name__}: {error}"
        escaped = Violation(world.seed, "escape", at)
        escaped.__cause__ = error
        return escaped
    return None


def run_seed(seed: int) -> Result:
    """Runs one seed."""
    begun = perf_counter()
    world = make_world(seed)
    violation = run_world(world)
    return Result(
        seed, perf_counter() - begun, len(world.router.attempts), world.schedule.num_done, violation
    )


def run_seeds(first: int, count: int, num_jobs: int = 1) -> Iterator[Result]:
    """Runs seeds, each result as it comes."""
    seeds = range(first, first + count)
    if num_jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("fork").Pool(num_jobs) as workers:
        yield from workers.imap_unordered(run_seed, seeds, chunksize=8)
