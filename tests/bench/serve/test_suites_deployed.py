"""Suites on real processes of a tiny model, with few and short requests: they end, and have their tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import interference
import pipelining
import pytest
import router
from interference import COMBINED, PAIR, SHIPPED
from suite import SuiteOptions
from tests.bench.serve.test_own_deployment import processes_with
from tests.serve.speaking import model

from baton.bench.serve.load import TokenRange

pytestmark = pytest.mark.serve


def run(suite: ModuleType, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The record of a suite that has left nothing behind."""
    patch.setenv("TMPDIR", str(folder))
    patch.setattr("tempfile.tempdir", None)
    path, told = folder / "found.json", []
    found = suite.measure(SuiteOptions(str(model()), repeats=1), lambda total, done, text: told.append(text))
    assert suite.is_right(found)
    suite.show(found, path, None)
    assert told
    assert processes_with(str(folder).encode()) == []
    return json.loads(path.read_text())["results"]


def test_interference_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {name: interference.shapes(str(model()), "")[name] for name in (COMBINED, PAIR)}
    monkeypatch.setattr(interference, "shapes", lambda model, link: shapes)
    monkeypatch.setattr(interference, "ALONE_TURNS", 1)
    monkeypatch.setattr(interference, "LONG_EVERY_S", 0.5)
    # Some tokens of the tiny model have no text.
    monkeypatch.setattr(interference, "ALONE_ANSWER", 16)
    monkeypatch.setattr(interference, "LONG_ANSWER", 16)
    found = run(interference, tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    assert set(found["figures"]) == set(found["deployments"]) == {COMBINED, PAIR, SHIPPED}
    for name, figures in found["figures"].items():
        assert name in shown
        assert figures["itl_s"]["num"] >= 1
        assert len(figures["long_ttft_s"]) == len(interference.LONG_TOKENS)
        assert set(figures["ttft_ratio"]) == {str(length) for length in interference.ALONE_TOKENS}
    assert f"{SHIPPED}: itl p99" in shown


def test_pipelining_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = pipelining.SIZES["cpu"]
    few = replace(
        sizes,
        lengths=(32, 64),
        sweep=replace(sizes.sweep, num_requests=4),
        stress=replace(sizes.stress, num_requests=8, output_tokens=TokenRange(8, 8)),
    )
    monkeypatch.setitem(pipelining.SIZES, "cpu", few)
    monkeypatch.setattr(pipelining, "NUM_TURNS", 2)
    found = run(pipelining, tmp_path, monkeypatch)
    shown = capsys.readouterr().out
    parts = {"32": 4, "64": 4, "dialogue": 2 * pipelining.NUM_SESSIONS, "stress": 8}
    wanted = {f"{part}, {policy}": num for part, num in parts.items() for policy in pipelining.POLICIES}
    assert {key: summary["num_ok"] for key, summary in found["summaries"].items()} == wanted
    for part in ("32", "64"):  # every prompt was handed over: one that was not has no tth
        assert found["summaries"][f"{part}, cost"]["spreads"]["tth"]["num"] == 4
    assert all(
        words in shown for words in ("TTFT (ms), mean", "throughput", "dialogues (16 sessions", "stress")
    )


def test_router_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(router, "NUM_TURNS", 20)
    monkeypatch.setattr(router, "BURST_S", 0.3)
    figures = run(router, tmp_path, monkeypatch)["figures"]
    shown = capsys.readouterr().out
    assert set(figures) == set(router.KINDS)
    for kind, each in figures.items():
        assert {router.DIRECT, router.OURS} <= set(each["requests_per_s"])
        assert all(rate > 0 for rate in each["requests_per_s"].values())
        assert f"{kind}: our router adds" in shown
