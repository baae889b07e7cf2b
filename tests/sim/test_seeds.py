"""Random worlds: fresh ones every day, and those that found something once.

BATON_SIM_FIRST and BATON_SIM_SEEDS choose the first seed and the number of seeds.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from baton.sim.runner import run_seed

NUM_SEEDS = int(os.environ.get("BATON_SIM_SEEDS", "2000"))
NUM_FEW = NUM_SEEDS // 10
# Each was a finding in its day. A seed may draw something else since; the findings have scenarios too.
OLD = (6, 21, 24, 40, 52, 71, 82, 92, 237, 280, 466, 467, 541, 844, 1025, 1366, 1711, 1798, 2009671)


def first_seed() -> int:
    """A range of seeds for every day."""
    chosen = os.environ.get("BATON_SIM_FIRST")
    return int(chosen) if chosen else int(datetime.now(UTC).strftime("%Y%m%d")) * 100_000


def check(first: int, stop: int, step: int) -> None:
    for seed in range(first, stop, step):
        violation = run_seed(seed).violation
        assert violation is None, f"{violation}\nreplay: baton sim --seed {seed} --trace"


@pytest.mark.parametrize("batch", range(4))
def test_a_few_fresh_seeds_are_clean(batch: int) -> None:
    first = first_seed()
    check(first + batch, first + NUM_FEW, 4)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(16))
def test_many_fresh_seeds_are_clean(batch: int) -> None:
    first = first_seed()
    check(first + NUM_FEW + batch, first + NUM_SEEDS, 16)


@pytest.mark.parametrize("seed", OLD)
def test_old_findings_stay_away(seed: int) -> None:
    check(seed, seed + 1, 1)
