"""`baton bench transport` from end to end, on sizes that take no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.bench.baselines import BASELINES
from baton.bench.transport import parse_sizes, size_text, spans_of
from baton.cli import main
from baton.errors import ConfigError
from baton.transport import parse_transport


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "transport", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_results_table_and_picture(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "transport.json"
    words = ["--transports", "shm,tcp", "--sizes", "4KiBx8", "--repeats", "2", "--out", str(out)]
    assert run(monkeypatch, *words) == 0
    found = json.loads(out.read_text())["results"]
    assert set(found["throughput"]) == {"shm 4KiBx8", "tcp 4KiBx8"}
    assert found["throughput"]["tcp 4KiBx8"]["of_bare"] > 0
    assert set(found["latency"]["shm"]) == {"small_write", "submit_10000"}
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "of memcpy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transports", "carrier-pigeon"], "carrier-pigeon"),
        (["--sizes", "big"], "big"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_misuse_is_one_line_and_code_2(monkeypatch, capsys, words: list[str], said: str) -> None:
    assert run(monkeypatch, *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_options_of_a_transport() -> None:
    assert parse_transport("nixl:ucx=TLS=tcp;port=1") == ("nixl", {"ucx": "TLS=tcp", "port": 1})
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_transport("nixl:fast")


@pytest.mark.parametrize("name", ["memcpy", "tcp"])
def test_baselines_move_the_spans(name: str) -> None:
    spans = spans_of(512, 16)
    with BASELINES[name](spans, 2 * 512 * 16) as baseline:
        baseline.once()
        baseline.once()


def test_spans_have_no_neighbours() -> None:
    spans = spans_of(64, 100)
    assert sorted(spans.target.tolist()) == spans.source.tolist()
    assert (spans.source[1:] - spans.source[:-1] > 64).all()


def test_sizes() -> None:
    assert parse_sizes("4KiBx256, 1Bx1,16MiBx32") == [(4096, 256), (1, 1), (16 << 20, 32)]
    assert [size_text(*size) for size in parse_sizes("4KiBx256,1Bx1,3MiBx2")] == [
        "4KiBx256",
        "1Bx1",
        "3MiBx2",
    ]


@pytest.mark.parametrize("text", ["", "4KiB", "4KBx2", "0KiBx2", "4KiBx0", "4KiBx2,", "9GiBx1", "-4KiBx1"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_sizes(text)
