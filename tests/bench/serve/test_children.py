"""Processes that a benchmark starts: known by their words, and gone with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from baton.bench.serve import children
from baton.bench.serve.children import Nursery
from baton.errors import EngineError

SAYING = "import time; print('talking at http://127.0.0.1:1 now', flush=True); time.sleep(600)"
WAIT_S_MAX = 60.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> bool:
    until_s = time.monotonic() + WAIT_S_MAX
    while is_alive(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    return not is_alive(pid)


def test_child_is_known_by_its_words_and_ended():
    with Nursery() as nursery:
        child = nursery.start("one", [sys.executable, "-c", SAYING])
        assert child.wait_word("talking at ") == "http://127.0.0.1:1"
        assert nursery.secret_file.stat().st_mode & 0o077 == 0
        folder = nursery.folder
    assert not is_alive(child.pid)
    assert not folder.exists()


def test_child_that_ends_early_is_quoted():
    with Nursery() as nursery:
        child = nursery.start("one", [sys.executable, "-c", "raise SystemExit('no such layout')"])
        with pytest.raises(EngineError, match="one-0 ended with 1 before it was ready: no such layout"):
            child.wait_word("talking at ")


def test_child_that_never_speaks_is_given_up(monkeypatch):
    monkeypatch.setattr(children, "START_S_MAX", 0.5)
    with Nursery() as nursery:
        child = nursery.start("mute", [sys.executable, "-c", "import time; time.sleep(600)"])
        with pytest.raises(EngineError, match="did not print 'talking at '"):
            child.wait_word("talking at ")


def test_killed_benchmark_leaves_nobody_behind():
    """Ended without a chance to clean up, as by a time limit."""
    text = (
        "import sys, time; from baton.bench.serve.children import Nursery; nursery = Nursery(); "
        f"child = nursery.start('one', [sys.executable, '-c', {SAYING!r}]); child.wait_word('talking at '); "
        "print(child.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(WAIT_S_MAX)
    parent.stdout.close()
    assert wait_gone(pid)
