"""`baton plan` as a person or a script meets it."""

from __future__ import annotations

import json
import re
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
        [*words, "--html", str(page)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "Routes" in done.stdout
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def declared_storage(**changes) -> dict:
    """SPEC in one allocation with gaps, K beside V in a row, layers in another order."""
    row = 64 * 2
    page = 2 * 4 * 16 * row + 64
    kv = [
        {
            "component": name,
            "stage": 0,
            "tp": None,
            "buffer": "raw",
            "buffer_bytes": 4 * 20 * page,
            "offset": i * row,
            "strides": [["page", page], ["unit", 16 * 2 * row], ["token", 2 * row]],
            "layer_offsets": [at * 20 * page for at in (2, 0, 1, 3)],
        }
        for i, name in enumerate("kv")
    ]
    return {
        "page_tokens": 16,
        "dtype": "bf16",
        "order": ["layer", "page", "unit", "token"],
        "state_order": ["layer", "page", "unit"],
        "granule": 1,
        "num_pages": [["tokens", 20]],
        "num_pages_default": 1,
        "placements": kv,
    } | changes


def test_declared_memory_is_shown(baton, tmp_path: Path) -> None:
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(declared_storage()))
    words = ["plan", SPEC, "--from", "tp1", "--to", "tp2", "--tokens", "100", "--source-storage", str(path)]
    code, out, err = baton(*words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    start = lines.index("Memory of the source, as declared")
    shown = "k 0 all raw 1.255 MiB 0 page 16448, unit 4096, token 256 at +657920, +0, +328960, +986880"
    assert " ".join(lines[start + 2].split()) == shown
    assert "tp1 (1 ranks, page 16) -> tp2 (2 ranks, page 64)" in lines[0], "the page size is the file's"
    assert "Memory of the target" not in out
    code, out, _ = baton(*words, "--json")
    assert code == 0
    plain = baton(*words[:-2], "--json", "--source-page", "16")[1]
    shown, usual = json.loads(out), json.loads(plain)
    assert shown["source"].pop("placements") == declared_storage()["placements"]
    assert {key: shown[key] for key in ("routes", "bytes", "source", "target")} == {
        key: usual[key] for key in ("routes", "bytes", "source", "target")
    }


def test_groups_in_the_same_bytes_are_shown(baton, tmp_path: Path) -> None:
    spec = "paged:layers=1,heads=1,dim=8+paged:layers=1,heads=1,dim=8,window=32"
    names = ("k", "k.w32", "v", "v.w32")
    placements = [
        declared_storage()["placements"][0]
        | {"component": name, "offset": 256 * (name[0] == "v"), "layer_offsets": []}
        | {"strides": [["page", 512], ["token", 16]]}
        for name in names
    ]
    storage = declared_storage(placements=placements, num_pages=[["tokens", 20], ["tokens.w32", 20]])
    path = tmp_path / "hybrid.json"
    path.write_text(json.dumps(storage))
    words = ["plan", spec, "--from", "pp2", "--to", "tp1", "--tokens", "40", "--target-storage", str(path)]
    code, out, err = baton(*words)
    assert (code, err) == (0, "")
    assert "groups tokens, tokens.w32 overlay each other on ranks 0: a page id belongs to one of them" in out
    placements[1]["offset"] = 4
    path.write_text(json.dumps(storage))
    code, _, err = baton(*words)
    assert code == 2
    assert "k.w32 and v.w32 of group 'tokens.w32' overlap in buffer 'raw': bytes 256 to 260" in err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot read"),
        ("{", "a storage has to be JSON"),
        ("{}", "storage: object missing required field `page_tokens`"),
        (json.dumps(declared_storage(dtype="int3")), "storage.dtype"),
        (
            json.dumps(declared_storage(placements=[])),
            "storage.placements: expected `array` of length >= 1, found",
        ),
        (json.dumps(declared_storage(num_pages=[["tokens", 21]])), "placement of k .* reaches to byte"),
        (
            json.dumps(declared_storage(placements=declared_storage()["placements"][:1])),
            "no placement of v on stage 0",
        ),
    ],
)
def test_a_storage_file_that_cannot_be_used(baton, tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "storage.json"
    if text is not None:
        path.write_text(text)
    code, out, err = baton(
        "plan", SPEC, "--from", "tp1", "--to", "tp2", "--tokens", "100", "--source-storage", str(path)
    )
    assert (code, out) == (2, "")
    assert re.search(reason, err)


def test_vllm_commands_in_place_of_layouts(baton) -> None:
    words = ["--tokens", "200", "--json"]
    own = ["--source-storage", "hnd.fused.layer.granule16", "--source-page", "16"]
    own += ["--target-storage", "hnd.fused.layer.granule16", "--target-page", "16"]
    code, out, err = baton("plan", SPEC, "--from-vllm", "-tp 2", "--to-vllm", "serve x -pp 3", *words)
    assert (code, err) == (0, "")
    _, same, _ = baton("plan", SPEC, "--from", "tp2", "--to", "pp3:1-2-1.tp1", *own, *words)
    assert json.loads(out) == json.loads(same)
    # The model may be named by the commands, and one side may be a layout.
    code, out, _ = baton("plan", "--from-vllm", f"serve {SPEC} -tp 2", "--to", "tp1", *own[4:], *words)
    assert code == 0
    assert json.loads(out)["model"] == SPEC


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--from", "tp1", "--from-vllm", "M", "--to", "tp1"],
            "give one of --from LAYOUT and --from-vllm ARGS",
        ),
        (["--from", "tp1"], "give one of --to LAYOUT and --to-vllm ARGS"),
        (["--from-vllm", "M", "--to-vllm", "N"], "the commands name M and N; give the model"),
        (["--from", "tp1", "--to", "tp1"], "the commands name no model; give the model"),
    ],
)
def test_sides_that_cannot_be_planned(baton, words: list[str], message: str) -> None:
    code, out, err = baton("plan", *words, "--tokens", "10")
    assert (code, out) == (2, "")
    assert message in err
