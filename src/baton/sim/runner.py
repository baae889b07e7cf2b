"""Draws the options of seeds, and runs them: one here, or many over several processes."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from baton.sim.checkers import attach_checkers
from baton.sim.core import Options, Strength, Violation
from baton.sim.families import NUM_FAMILIES, family
from baton.sim.faults import Pressure, draw_faults
from baton.sim.world import World

OVERLOAD_SHARE = 0.1
"""Seeds with many requests, slow prefills and small pools: most transfers wait in a queue."""


def options_of(seed: int, **changes: Any) -> Options:
    """The options that a seed draws, with some of them set."""
    rng = random.Random(f"{seed}/options")
    options = replace(_draw_options(rng), withdraw_share=rng.choice((0.0, 0.0, 0.5, 1.0)))
    if rng.random() < OVERLOAD_SHARE:
        pressure = Pressure(source_share=rng.choice((0.0, 0.8)), target_share=0.8)
        options = replace(
            options,
            num_requests=12,
            slowness=30.0,
            decode_slowness=rng.choice((1.0, 30.0)),
            faults={**options.faults, "pressure": pressure},
        )
    return replace(options, **changes)


def _draw_options(rng: random.Random) -> Options:
    is_strong = rng.random() < 0.5
    options = Options(
        family=rng.randrange(NUM_FAMILIES),
        num_requests=rng.choice((1, 2, 2, 3, 3, 4)),
        spread_s=rng.choice((0.0, 0.01, 0.05)),
        faults=draw_faults(rng),
        faults_s=rng.choice((0.1, 0.3, 0.6)),
        strength=Strength(
            can_enforce_grants=is_strong or rng.random() < 0.3,
            can_revoke=is_strong or rng.random() < 0.3,
        ),
        slowness=rng.choice((0.3, 1.0, 3.0)),
        held_share=rng.choice((0.0, 0.5, 1.0)),
        one_call_share=rng.choice((0.0, 1.0)),
        verified_share=rng.choice((0.0, 0.0, 1.0)),
        is_packing=rng.random() < 0.25,
    )
    if options.strength.can_enforce_grants or rng.random() < 0.25:
        return options
    # A grant is sent ahead of opening only where the ranks have copied before, and nothing is packed.
    spread_s = rng.choice((0.1, 0.3, 0.6))
    return replace(
        options, num_requests=8, spread_s=spread_s, has_same_ends=True, verified_share=0.0, is_packing=False
    )


def make_world(seed: int, options: Options | None = None, *, is_traced: bool = False) -> World:
    """A world with all checkers that is about to start."""
    options = options or options_of(seed)
    world = World(seed, options, family(options.family), is_traced=is_traced)
    attach_checkers(world)
    world.router.draw_requests()
    return world


def run_world(world: World) -> Violation | None:
    """Runs a world to its end; an exception that escapes a driver is a violation too."""
    try:
        world.run()
    except Violation as violation:
        # The first violation may have come out of a driver as something else.
        return world.violation or violation
    except Exception as error:
        text = f"at {world.schedule.now:.4f} s: {type(error).__name__}: {error}"
        escaped = Violation(world.seed, "escape", text)
        escaped.__cause__ = error
        return escaped
    return None


@dataclass(frozen=True, slots=True)
class SeedResult:
    seed: int
    duration_s: float
    num_transfers: int
    num_steps: int
    violation: Violation | None = None


def run_seed(seed: int) -> SeedResult:
    begun = perf_counter()
    world = make_world(seed)
    violation = run_world(world)
    return SeedResult(
        seed, perf_counter() - begun, len(world.router.attempts), world.schedule.num_done, violation
    )


def run_seeds(first: int, count: int, num_jobs: int = 1) -> Iterator[SeedResult]:
    """Runs seeds, and yields each result as it comes."""
    seeds = range(first, first + count)
    if num_jobs <= 1:
        yield from map(run_seed, seeds)
        return
    with multiprocessing.get_context("fork").Pool(num_jobs) as workers:
        yield from workers.imap_unordered(run_seed, seeds, chunksize=8)
