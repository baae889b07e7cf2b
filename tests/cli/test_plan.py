"""`baton plan` as a person or a script meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from baton.cli import main

SPEC = "paged:layers=4,heads=4,dim=64"


def run(capsys, monkeypatch, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["baton", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def baton(capsys, monkeypatch):
    return lambda *words: run(capsys, monkeypatch, *words)


def test_json_is_one_document_on_stdout(baton) -> None:
    code, out, err = baton(
        "plan", SPEC, "--from", "tp2", "--to", "cp2:stripe64.tp1", "--tokens", "200", "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["copies"] == {"count": 80, "bytes_median": 16384, "packed_pairs": 0}


def test_options_reach_the_plan(baton) -> None:
    words = [
        "--source-page",
        "16",
        "--target-page",
        "32",
        "--source-dp",
        "1",
        "--target-dp",
        "2",
        "--skip-tokens",
        "64",
    ]
    code, out, _ = baton(
        "plan",
        SPEC,
        "--from",
        "dp2.tp2",
        "--to",
        "tp1.dp3",
        "--tokens",
        "200",
        *words,
        "--dtype",
        "fp32",
        "--json",
    )
    found = json.loads(out)
    assert code == 0
    assert found["source"] == {"layout": "dp2.tp2", "ranks": 4, "page": 16, "dp": 1}
    assert found["target"] == {"layout": "tp1.dp3", "ranks": 3, "page": 32, "dp": 2}
    assert found["skip_tokens"] == 64
    assert found["components"][0]["bytes_per_unit"] == 256
    assert found["bytes"]["by_source"][:2] == [0, 0]
    assert found["bytes"]["by_target"] == [0, 0, (200 - 64) * 4 * 4 * 256 * 2]


def test_storage_changes_the_copies(baton) -> None:
    counts = {}
    for words in ("hnd", "hnd.fused", "nhd.fused.page"):
        sides = ["--source-storage", words, "--target-storage", words]
        _, out, _ = baton("plan", SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "256", *sides, "--json")
        counts[words] = json.loads(out)["copies"]["count"]
    assert counts == {"hnd": 32, "hnd.fused": 16, "nhd.fused.page": 4}


def test_words_for_a_person(baton) -> None:
    code, out, _ = baton("plan", "deepseek-v3", "--from", "tp8", "--to", "tp1", "--tokens", "8192")
    assert code == 0
    assert "pages dealt round robin over 8 mirrors for each target" in out
    assert "sent by source rank: 68.62 MiB each (0-7)" in out
    assert "idle source ranks: none" in out
    for gbps in ("100 Gb/s", "200 Gb/s", "400 Gb/s"):
        assert gbps in out
    assert "400 TFLOP/s" in out
    _, out, _ = baton("plan", "latent:layers=2,dim=8", "--from", "tp8", "--to", "tp1", "--tokens", "200")
    assert "idle source ranks: 4-7" in out
    _, out, _ = baton(
        "plan",
        SPEC,
        "--from",
        "tp2",
        "--to",
        "tp1",
        "--tokens",
        "4096",
        "--source-storage",
        "nhd",
        "--target-storage",
        "nhd",
    )
    assert "packing chosen for 2 of 2 pairs of ranks: 65536 copies without it" in out


def test_a_large_plan_stays_short(baton) -> None:
    words = ["--from", "pp16.tp64", "--to", "pp8.cp2.tp64", "--tokens", "4096"]
    code, out, _ = baton("plan", "deepseek-v3", *words)
    assert code == 0
    assert len(out.splitlines()) < 80
    assert "2304 routes" in out


def test_nothing_to_send(baton) -> None:
    words = ["--from", "tp2", "--to", "tp1", "--tokens", "128", "--skip-tokens", "128"]
    code, out, _ = baton("plan", SPEC, *words, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["routes"], found["token_sets"], found["copies"]["count"]) == ([], [], 0)
    assert found["idle_sources"] == [0, 1]
    assert baton("plan", SPEC, *words)[0] == 0


MISUSE = {
    "tp6": [SPEC, "--from", "tp6", "--to", "tp1", "--tokens", "9"],
    "sum to 3": [SPEC, "--from", "pp2:1-2", "--to", "tp1", "--tokens", "9"],
    "pp9": [SPEC, "--from", "tp1", "--to", "pp9", "--tokens", "9"],
    "'TP2'": [SPEC, "--from", "TP2", "--to", "tp1", "--tokens", "9"],
    "'llama-9'": ["llama-9", "--from", "tp1", "--to", "tp1", "--tokens", "9"],
    "found 0": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "0"],
    "found -3": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "-3"],
    "found 99999999999999999999": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "99999999999999999999"],
    "--tokens": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "many"],
    "--from": [SPEC, "--to", "tp1", "--tokens", "9"],
    "--surprise": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--surprise"],
    "100 held tokens": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "200", "--skip-tokens", "100"],
    "found 300": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "200", "--skip-tokens", "300"],
    "found -64": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "200", "--skip-tokens", "-64"],
    "dp group 1": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--source-dp", "1"],
    "dp group -1": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--target-dp", "-1"],
    "page size": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--target-page", "0"],
    "'int4'": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--dtype", "int4"],
    "'diagonal'": [SPEC, "--from", "tp1", "--to", "tp1", "--tokens", "9", "--source-storage", "diagonal"],
    "granules differ": [
        SPEC,
        "--from",
        "tp1",
        "--to",
        "tp1",
        "--tokens",
        "9",
        "--source-storage",
        "granule64",
    ],
    "cannot write": [
        SPEC,
        "--from",
        "tp1",
        "--to",
        "tp1",
        "--tokens",
        "9",
        "--html",
        "no-such-folder/x.html",
        "--json",
    ],
}


@pytest.mark.parametrize("said", MISUSE)
def test_misuse_is_one_line_and_code_2(baton, said: str) -> None:
    code, out, err = baton("plan", *MISUSE[said])
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


def test_the_installed_command(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "baton", "plan", SPEC, "--from", "tp2", "--to", "tp1", "--tokens", "9"]
    page = tmp_path / "plan.html"
    done = subprocess.run(
        [*words, "--html", str(page)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Routes" in done.stdout
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")
