"""`baton generate` as a person or a script meets it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tests.cli.models import chat_ids, speaking_model, text_of
from tests.engine.tiny import oracle, tiny

from baton.cli import main
from baton.cli.generate import generate

PROMPT = "the quick fox?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder) -> Path:
    return speaking_model(folder)


@pytest.fixture
def baton(capfd, monkeypatch):
    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["baton", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = capfd.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_a_pair_answers_as_the_oracle_does(baton, model, tmp_path) -> None:
    picture, trace = tmp_path / "t.png", tmp_path / "t.json"
    code, out, err = baton(
        *("generate", "--model", str(model), "--prefill", "pp2", "--decode", "tp2", "--max-tokens", "20"),
        *("--link", "20MB/s", "--overlap", "fixed:1"),
        *("--decode-args", "--page-tokens 64 --kv-layout hnd.apart", "--verify"),
        *("--timeline", str(picture), "--timeline", str(trace), PROMPT),
    )
    assert code == 0, err
    asked = chat_ids(PROMPT)
    (expected,) = oracle(model, [asked], 20)
    assert out == text_of(expected) + "\n"
    sizes = [line for line in err.splitlines() if line.startswith(("prefill: ", "decode: "))]
    assert [line.split(" ranks (")[1].split(")")[0] for line in sizes] == ["pp2", "tp2"]
    assert "handed over in 3 groups of layers" in err, "5 layers in 2 stages, one layer a group"
    assert f"{len(asked)} tokens in" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"queue", "prefill", "exposed transfer", "admission", "layers 0-1", "1 to 0"} <= names


@pytest.mark.slow
def test_token_ids_without_a_tokenizer_and_without_decode(baton, folder) -> None:
    bare = tiny("qwen3", folder)
    code, out, err = baton("generate", "--model", str(bare), "--max-tokens", "9", "5, 6 7")
    assert code == 0, err
    (expected,) = oracle(bare, [[5, 6, 7]], 9)
    stop = expected.index(2) + 1 if 2 in expected else 9
    assert [int(word) for word in out.split()] == expected[:stop]
    assert "handed over" not in err
    assert "3 tokens in" in err


MISUSES = {
    "no layout": (["--prefill", "xp2"], "xp2"),
    "heads that tp does not divide": (
        ["--prefill", "tp1", "--decode", "tp5"],
        "layout tp5: the model has 2 KV heads",
    ),
    "too many stages": (["--prefill", "pp9"], "pp9"),
    "no policy": (["--overlap", "wild"], "wild"),
    "no speed": (["--decode", "tp1", "--link", "fast"], "12.5GB/s"),
    "no side": (["--decode", "tp1", "--first-token", "router"], "'prefill', 'decode'"),
    "no transport": (["--transport", "pigeon"], "shm"),
    "no device": (["--device", "abacus"], "cpu or cuda"),
    "no option of serve": (
        ["--prefill-args", "--colour red"],
        "--prefill-args: --colour cannot be set",
    ),
    "an option of the server": (["--prefill-args", "--drain-s 3"], "--drain-s cannot be set for one side"),
    "options without a side": (["--decode-args", "--page-tokens 64"], "give --decode too"),
    "two transports": (["--decode", "tp1", "--decode-args", "--transport tcp"], "shm and tcp"),
    "no dtype": (["--dtype", "fp4"], "bf16"),
    "no temperature": (["--temperature", "-1"], "temperature"),
    "timeline of nothing": (["--timeline", "t.png"], "--decode"),
    "timeline as a film": (["--decode", "tp1", "--timeline", "t.mp4"], ".png or .json"),
    "timeline nowhere": (["--decode", "tp1", "--timeline", "no/such/t.png"], "no folder"),
    "no model": (["--model", "no/such/model"], "no/such/model"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_one_line_before_anything_starts(baton, model, monkeypatch, name: str) -> None:
    words, said = MISUSES[name]
    monkeypatch.setattr("baton.engine.executor.WorkerProcess", _started)
    code, out, err = baton("generate", "--model", str(model), *words, PROMPT)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert len(err.splitlines()) == 1


def test_words_for_a_model_without_a_tokenizer(baton, folder, monkeypatch) -> None:
    monkeypatch.setattr("baton.engine.executor.WorkerProcess", _started)
    code, out, err = baton("generate", "--model", str(tiny("qwen3", folder)), PROMPT)
    assert (code, out) == (2, "")
    assert "token ids" in err
    assert len(err.splitlines()) == 1


def test_a_prompt_that_is_too_long(baton, model, monkeypatch) -> None:
    monkeypatch.setattr("baton.engine.executor.WorkerProcess", _started)
    code, _, err = baton("generate", "--model", str(model), "--raw", "fox " * 5000)
    assert code == 2
    assert "the context has 4096" in err


@pytest.mark.slow
@pytest.mark.parametrize("sides", [(), ("--prefill", "tp1", "--decode", "tp1")])
def test_a_rank_that_cannot_start_is_a_failure(baton, model, monkeypatch, sides: tuple[str, ...]) -> None:
    monkeypatch.setattr("baton.cli.checks.check_transport", lambda text: None)  # the ranks find it too
    transport = "tcp:host=198.51.100.1"  # of no machine
    code, out, err = baton("generate", "--model", str(model), "--transport", transport, *sides, PROMPT)
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert re.match(r"baton: rank 0 of (instance|prefill|decode): cannot listen on 198\.51\.100\.1", last)


def _started(*_: object) -> None:
    raise AssertionError("a rank was started")


@pytest.mark.parametrize(
    ("line", "num_guesses"),
    [
        (["--draft", PROMPT], 1),
        ([PROMPT, "--draft"], 1),
        (["--draft", "3", PROMPT], 3),
        (["--draft=2", PROMPT], 2),
        ([PROMPT], 0),
    ],
)
def test_the_number_of_guesses_may_be_left_out(line: list[str], num_guesses: int) -> None:
    given = generate.make_context("generate", ["--model", "any", *line]).params
    assert (given["draft"], given["prompt"]) == (num_guesses, PROMPT)
