"""`baton bench handoff` from end to end: real processes, on sizes that take no time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.observe.test_timeline import check_trace

from baton.cli import main

SMALL = ["--model", "paged:layers=4,heads=4,dim=16", "--tokens", "200", "--page", "16", "--repeat", "1"]


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["baton", "bench", "handoff", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.slow
def test_table_record_picture_and_trace(tmp_path: Path, monkeypatch, capsys) -> None:
    words = [*SMALL, "--from", "pp2.tp1", "--to", "tp2", "--layer-ms", "5", "--policy", "fixed:1"]
    assert run(monkeypatch, *words, "--link", "50MB/s", "--verify", "--out", str(tmp_path)) == 0
    out = capsys.readouterr().out
    last = out.strip().splitlines()[-1]
    assert last.startswith("tth ")
    assert "every byte right" in last
    found = json.loads((tmp_path / "handoff.json").read_text())["results"]
    assert found["bytes_compared"] == found["bytes_right"] == 4 * 200 * 4 * 16 * 2 * 2
    assert found["median"]["num_bytes"] == found["bytes_compared"]
    assert found["median"]["num_groups"] == 4
    assert found["median"]["compute_s"] >= 0.020
    assert found["median"]["tth_s"] >= found["median"]["compute_s"] + found["median"]["exposed_s"]
    assert 0 < found["median"]["bound"] <= 1
    assert (tmp_path / "handoff.png").read_bytes().startswith(b"\x89PNG")
    events = check_trace((tmp_path / "handoff.trace.json").read_text())
    names = {event["cat"] for event in events if event["ph"] == "X"}
    assert {"queue", "compute", "exposed transfer", "admission"} < names
    assert any(name.startswith("copy to") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--from", "tp2", "--to", "tp1", "--dtype", "bf16:fp32", "--transport", "tcp"],
        ["--from", "tp1", "--to", "cp2:stripe4", "--storage", "nhd.fused:hnd", "--chunk", "64"],
    ],
)
def test_conversion_chunks_and_other_transports(tmp_path: Path, monkeypatch, capsys, words) -> None:
    assert run(monkeypatch, *SMALL, *words, "--ratio", "2", "--out", str(tmp_path)) == 0
    assert "every byte right" in capsys.readouterr().out.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--link", "fast"], "fast"),
        (["--transport", "carrier-pigeon"], "carrier-pigeon"),
        (["--from", "xp2"], "xp2"),
        (["--policy", "best"], "best"),
        (["--control", "--sweep"], "--sweep"),
    ],
)
def test_misuse_is_one_line_and_code_2(monkeypatch, capsys, words: list[str], said: str) -> None:
    assert run(monkeypatch, *SMALL, *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def ranks_of(parent: int) -> list[int]:
    """The children of a process, by what the kernel says."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[1]) == parent and words[0] != "Z":
            found.append(int(folder.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_its_parent(tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "baton", "bench", "handoff", *SMALL, "--layer-ms", "10000"]
    parent = subprocess.Popen(
        [*words, "--from", "tp1", "--to", "tp1", "--out", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell that runs the tests in the background has had this one ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads yet
    )
    try:
        limit_s = time.monotonic() + 300
        while len(children := ranks_of(parent.pid)) < 3:
            assert time.monotonic() < limit_s
            assert parent.poll() is None
            time.sleep(0.02)
        parent.send_signal(number)
        try:
            code = parent.wait(20)
        except subprocess.TimeoutExpired:
            # Python loses what comes while it forks with a `preexec_fn`, and a child was just seen to appear.
            parent.send_signal(number)
            code = parent.wait(120)
        assert code == (130 if number is signal.SIGINT else -signal.SIGKILL)
        while any(os.path.exists(f"/proc/{pid}") for pid in children):
            assert time.monotonic() < limit_s
            time.sleep(0.02)
    finally:
        parent.kill()
        parent.wait()
