"""`baton bench serve` without an endpoint: it starts a deployment, measures it, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.serve.speaking import model

pytestmark = pytest.mark.serve

WAIT_S_MAX = 600


def processes_with(words: bytes) -> list[str]:
    found = []
    for each in Path("/proc").iterdir():
        try:
            line = (each / "cmdline").read_bytes() if each.name.isdigit() else b""
        except OSError:
            continue
        if words in line:
            found.append(each.name)
    return found


@pytest.mark.parametrize("decode", ["tp2", "none"])
def test_own_deployment(tmp_path: Path, decode: str) -> None:
    path = tmp_path / "serve.json"
    words = ["--model", str(model()), "--prefill", "tp1", "--decode", decode, "--requests", "6"]
    words += ["--concurrency", "3", "--input-tokens", "40:80", "--output-tokens", "4", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "baton", "bench", "serve", *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(path.read_text())["results"]["summary"]
    assert (summary["num_ok"], summary["failures"]) == (6, {})
    assert summary["num_answer"] == 24  # the end-of-text token does not cut answers short
    assert 6 * 40 <= summary["num_prompt"] <= 6 * 80
    assert "6 of 6 requests answered" in done.stdout
    assert processes_with(str(tmp_path).encode()) == []
