"""Every deliberate defect is caught, by a checker that watches what it breaks."""

from __future__ import annotations

import pytest

from baton.sim.checkers import checker_names
from baton.sim.runner import make_world, options_of, run_world
from baton.sim.scenarios import scenario_names
from baton.sim.variants import catch, variant, variant_names

BUILT_IN = {"escape", "settles"}
NUM_MIN = 16


@pytest.mark.parametrize("name", variant_names())
def test_the_defect_is_caught(name: str) -> None:
    caught = catch(name)
    assert caught is not None, f"nothing noticed in {variant(name).num_tries} tries: {variant(name).text}"


def test_there_are_enough_defects_and_they_name_checkers_that_exist() -> None:
    assert len(variant_names()) >= NUM_MIN
    known = {*checker_names(), *scenario_names(), *BUILT_IN}
    assert {checker for name in variant_names() for checker in variant(name).checkers} <= known


@pytest.mark.parametrize("name", ["count_duplicates", "ignore_digest", "free_at_commit"])
def test_a_defect_leaves_no_trace_behind(name: str) -> None:
    found = variant(name)
    with found.broken():
        pass
    assert catch_without(name) is None


def catch_without(name: str):
    """The worlds of a defect without the defect."""
    for seed in range(1, 6):
        violation = run_world(make_world(seed, options_of(seed, **variant(name).options)))
        if violation is not None:
            return violation
    return None
