"""Random worlds, the same ones in each run, and those that found something once.

BATON_SIM_FIRST and BATON_SIM_SEEDS choose the first seed and the number of seeds; `make sim` looks at others.
"""

from __future__ import annotations

import os

import pytest

from baton.sim.runner import run_seed

FIRST_SEED = int(os.environ.get("BATON_SIM_FIRST", "1000000"))
NUM_SEEDS = int(os.environ.get("BATON_SIM_SEEDS", "2000"))
NUM_FEW = NUM_SEEDS // 10
# Each was a finding in its day. A seed may draw something else since; the findings have scenarios too.
OLD = (
    6,
    21,
    24,
    40,
    52,
    71,
    82,
    92,
    237,
    280,
    466,
    467,
    541,
    844,
    1025,
    1366,
    1711,
    1798,
    1001198,
    2009671,
    2026111800573,
)


def check(first: int, stop: int, step: int) -> None:
    for seed in range(first, stop, step):
        violation = run_seed(seed).violation
        assert violation is None, f"{violation}\nreplay: baton sim --seed {seed} --trace"


@pytest.mark.parametrize("batch", range(4))
def test_a_few_seeds_are_clean(batch: int) -> None:
    check(FIRST_SEED + batch, FIRST_SEED + NUM_FEW, 4)


@pytest.mark.long
@pytest.mark.parametrize("batch", range(16))
def test_many_seeds_are_clean(batch: int) -> None:
    check(FIRST_SEED + NUM_FEW + batch, FIRST_SEED + NUM_SEEDS, 16)


@pytest.mark.parametrize("seed", OLD)
def test_old_findings_stay_away(seed: int) -> None:
    check(seed, seed + 1, 1)
