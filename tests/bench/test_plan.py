"""The speed that the planner promises, measured as `baton bench plan` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.bench.plan import Row, run
from baton.cli import main


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return list(run(repeats=3))


def test_targets_are_met(rows: list[Row]) -> None:
    judged = [row for row in rows if row.is_met is not None]
    assert len(judged) == 7
    assert [row.name for row in judged if not row.is_met] == []


def test_copies_beside_one_per_token(rows: list[Row]) -> None:
    counted = {row.name: row.figures for row in rows if row.name.startswith("copies")}
    assert len(counted) == 6
    for name, figures in counted.items():
        if "NHD" in name:
            assert figures["direct"] == figures["per_token"]
            assert figures["chosen"] == figures["pairs"] == figures["packed_pairs"]
        else:
            assert figures["direct"] * 64 == figures["per_token"], "whole pages of a head, not tokens"


def test_results_carry_their_provenance(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "deep" / "plan.json"
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "plan", "--repeats", "1", "--out", str(out)])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    record = json.loads(out.read_text())
    assert record["command"].startswith("baton bench plan --repeats 1")
    assert {"processor", "cores", "python", "numpy"} <= set(record["machine"])
    assert record["commit"]
    assert "cold plan" in capsys.readouterr().out
