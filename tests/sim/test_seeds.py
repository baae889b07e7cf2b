"""Random worlds: fresh ones every day, and those that found something once.

BATON_SIM_FIRST and BATON_SIM_SEEDS choose others, and more of them.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime

import pytest

from baton.sim.runner import run_seed

NUM_SEEDS = int(os.environ.get("BATON_SIM_SEEDS", "2000"))
NUM_BATCHES = 16
# Each was a finding in its day. What a seed draws may have changed since; the findings have scenarios too.
OLD = (6, 21, 24, 40, 52, 71, 82, 92, 237, 280, 466, 467, 541, 844, 1025, 1366, 1711, 1798, 2009671)


def first_seed() -> int:
    """A range of seeds for every day."""
    chosen = os.environ.get("BATON_SIM_FIRST")
    return int(chosen) if chosen else int(datetime.now(UTC).strftime("%Y%m%d")) * 100_000


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_fresh_seeds_are_clean(batch: int) -> None:
    first = first_seed()
    for seed in range(first + batch, first + NUM_SEEDS, NUM_BATCHES):
        found = run_seed(seed).violation
        assert found is None, f"{found}\nreplay: baton sim --seed {seed} --trace"


@pytest.mark.parametrize("seed", OLD)
def test_old_findings_stay_away(seed: int) -> None:
    assert run_seed(seed).violation is None
