"""`baton bench engine` from end to end, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.engine.tiny import tiny

from baton.bench.engine import Comparison
from baton.cli import main

pytestmark = pytest.mark.engine


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "engine", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_table_record_and_picture(tmp_path: Path, monkeypatch, capsys) -> None:
    path, picture = tmp_path / "engine.json", tmp_path / "engine.png"
    words = ["--model", str(tiny("llama")), "--tokens", "70", "--answer", "12", "--requests", "3"]
    words += ["--repeat", "2", "--threads", "1", "--json", str(path), "--png", str(picture)]
    assert run(monkeypatch, *words) == 0
    # One token of each prefill and twelve of each answer, the turn that warms up included.
    assert capsys.readouterr().out.strip().endswith("tokens identical: 39 of 39")
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(path.read_text())
    assert {"command", "commit", "machine", "date"} < set(found)
    results = found["results"]
    assert results["tokens_identical"] == results["tokens_compared"] == 3 * (1 + 12)
    for name, num_engine, num_peer in (("prefill", 70, 70), ("decode", 36, 12)):
        part = results[name]
        assert len(part["engine_s"]) == len(part["transformers_s"]) == 2
        assert part["is_met"] == (part["ratio"] >= part["target"])
        assert part["engine_tokens_per_s"] <= num_engine / min(part["engine_s"])
        assert part["transformers_tokens_per_s"] <= num_peer / min(part["transformers_s"])


def test_the_ratio_is_of_tokens_in_the_same_round() -> None:
    decode = Comparison("decode", 3.0, 80, 10, engine_s=[1.0, 4.0, 2.0], peer_s=[2.0, 4.0, 8.0])
    assert decode.ratio == 8 * 2.0
    assert (decode.engine_per_s, decode.peer_per_s) == (40.0, 2.5)


def test_an_unknown_model_is_one_line_and_code_2(monkeypatch, capsys) -> None:
    assert run(monkeypatch, "--model", "dummy:no-such-card") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no-such-card" in err
