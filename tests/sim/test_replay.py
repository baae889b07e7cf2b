"""A seed is the same world every time, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from baton.sim.faults import FAULTS
from baton.sim.runner import make_world, options_of, run_seeds, run_world

SEEDS = (3, 8, 20, 36)
PROGRAM = """
import sys
from baton.sim.runner import make_world, run_world
for seed in map(int, sys.argv[1:]):
    world = make_world(seed, is_traced=True)
    run_world(world)
    print(world.trace.digest())
"""


def digest(seed: int) -> str:
    world = make_world(seed, is_traced=True)
    assert run_world(world) is None
    return world.trace.digest()


@pytest.mark.long
def test_a_seed_replays_exactly_in_this_process_and_in_others() -> None:
    here = [digest(seed) for seed in SEEDS]
    assert here == [digest(seed) for seed in SEEDS]
    assert len(set(here)) == len(SEEDS)
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-c", PROGRAM, *map(str, SEEDS)]
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == here


def test_tracing_changes_nothing() -> None:
    worlds = [make_world(36, is_traced=is_traced) for is_traced in (True, False)]
    assert [run_world(world) for world in worlds] == [None, None]
    assert worlds[0].schedule.num_done == worlds[1].schedule.num_done
    assert worlds[0].schedule.now == worlds[1].schedule.now


def test_a_fault_more_leaves_the_draws_of_the_others_alone() -> None:
    options = options_of(36)
    assert len(options.faults) > 3
    kept = dict(sorted(options.faults.items())[1:])
    few, all_of_them = make_world(36, options_of(36, faults=kept)), make_world(36)
    for name in ("router", "network", "copies", *(f"fault/{name}" for name in kept)):
        assert few.rng(name).getstate() == all_of_them.rng(name).getstate(), name


def test_every_fault_is_drawn_by_some_seed_and_some_seeds_have_none() -> None:
    drawn = [set(options_of(seed).faults) for seed in range(300)]
    assert set().union(*drawn) == set(FAULTS)
    assert 20 < sum(not names for names in drawn) < 120


def test_seeds_over_several_processes_are_the_same_seeds() -> None:
    alone = {result.seed: result.num_steps for result in run_seeds(1, 12, 1)}
    together = {result.seed: result.num_steps for result in run_seeds(1, 12, 2)}
    assert alone == together
    assert sorted(alone) == list(range(1, 13))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trace_is_aligned(seed: int) -> None:
    world = make_world(seed, is_traced=True)
    run_world(world)
    assert len(world.trace.rows) > 50
    assert {row[7] for row in world.trace.rows} == {"."}
