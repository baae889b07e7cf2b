"""The speed that the planner promises, as `baton bench plan` measures it.

In a process of its own: a ratio that is 1.6 in a fresh process was above 5 once in a worker that had run
hundreds of tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_RUNS = 3
"""A machine that others use is too slow at times; a planner that is too slow is so every time."""


def run(out: Path) -> tuple[str, dict[str, Any]]:
    words = [sys.executable, "-m", "baton", "bench", "plan", "--repeats", "3", "--out", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout, json.loads(out.read_text())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What it printed and what it wrote, in a folder that it had to make."""
    return run(tmp_path_factory.mktemp("bench") / "deep" / "plan.json")


def test_targets_are_met(told: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    rows = told[1]["results"]
    missed = {name for name, row in rows.items() if row["is_met"] is False}
    assert len([row for row in rows.values() if row["is_met"] is not None]) == 7
    for _ in range(NUM_RUNS - 1):
        if missed:
            rows = run(tmp_path / "again.json")[1]["results"]
            missed -= {name for name, row in rows.items() if row["is_met"]}
    assert not missed, {name: rows[name] for name in missed}


def test_copies_beside_one_per_token(told: tuple[str, dict[str, Any]]) -> None:
    counted = {name: row for name, row in told[1]["results"].items() if name.startswith("copies")}
    assert len(counted) == 6
    for name, figures in counted.items():
        if "NHD" in name:
            assert figures["direct"] == figures["per_token"]
            assert figures["chosen"] == figures["pairs"] == figures["packed_pairs"]
        else:
            assert figures["direct"] * 64 == figures["per_token"], "whole pages of a head, not tokens"


def test_results_carry_their_provenance(told: tuple[str, dict[str, Any]]) -> None:
    text, record = told
    assert record["command"].startswith("baton bench plan --repeats 3")
    assert {"processor", "cores", "python", "numpy"} <= set(record["machine"])
    assert record["commit"]
    assert "cold plan" in text
