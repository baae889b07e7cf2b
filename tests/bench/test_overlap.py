"""`baton bench overlap` from end to end: two instances of a tiny model behind a slow link."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.engine.tiny import tiny

from baton.cli import main

pytestmark = pytest.mark.engine

NUM_TOKENS = 1500
NUM_LAYERS = 5
# 2 kv heads of 8 channels, keys and values, float32.
PROMPT_BYTES = NUM_TOKENS * NUM_LAYERS * 2 * 8 * 2 * 4


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "overlap", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_table_record_and_picture(tmp_path: Path, monkeypatch, capsys) -> None:
    path, picture = tmp_path / "overlap.json", tmp_path / "overlap.png"
    words = ["--model", str(tiny("llama")), "--tokens", str(NUM_TOKENS), "--link", "8MB/s", "--threads", "1"]
    words += ["--policy", "fixed:1,cost", "--repeat", "2", "--json", str(path), "--png", str(picture)]
    assert run(monkeypatch, *words) == 0
    out = capsys.readouterr().out
    assert "compute-only" in out
    assert "cost: tth at most " in out
    slower = [line for line in out.splitlines() if " is slower than off at " in line]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "tokens identical: 8 of 8" in out
    found = json.loads(path.read_text())
    assert {"command", "commit", "machine", "date"} < set(found)
    rows = {row["policy"]: row for row in found["results"]["rows"]}
    # `off` is measured unasked: the others are held to its transfer time.
    assert list(rows) == ["off", "fixed:1", "cost"]
    assert len(slower) == len(found["results"]["slower_than_off"])
    for row in rows.values():
        assert row["tth_over_compute"] > 0
        is_listed = any(row["policy"] == loss["policy"] for loss in found["results"]["slower_than_off"])
        assert is_listed == (row["tth_s"] > rows["off"]["tth_s"])
    assert {row["num_bytes"] for row in rows.values()} == {PROMPT_BYTES}
    assert [rows["off"]["num_groups"], rows["fixed:1"]["num_groups"]] == [1, NUM_LAYERS]
    for row in rows.values():
        assert len(row["runs"]) == 2
        assert row["serial_transfer_s"] >= PROMPT_BYTES / 8e6
        assert 0 < row["bound"] <= 1
        for each in row["runs"]:
            assert each["tth_s"] >= each["compute_s"] + each["exposed_s"] - 1e-9
    # Layers that left while later ones were computed are no longer there to be waited for.
    assert rows["fixed:1"]["exposed_s"] < rows["off"]["exposed_s"] * 0.9
    assert rows["fixed:1"]["efficiency"] > rows["off"]["efficiency"] + 0.1
    assert found["results"]["targets"].keys() == {f"{NUM_TOKENS} tokens, 8 MB/s"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--policy", "best"], "best"),
        (["--tokens", "many"], "many"),
        (["--link", "fast"], "fast"),
        (["--prefill", "xp2"], "xp2"),
        (["--transport", "carrier-pigeon"], "carrier-pigeon"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_misuse_is_one_line_and_code_2(monkeypatch, capsys, words: list[str], said: str) -> None:
    assert run(monkeypatch, "--model", str(tiny("llama")), *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err
