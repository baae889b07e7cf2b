"""Processes that fork from a cradle: what they start with, how they end, and who ends with whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from baton.engine.instance.kin import Cradle, Kin, Nursery
from baton.engine.rank.birth import Birth
from baton.errors import EngineError

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
LIMIT_S = 30.0


class Newborn:
    """A forked process with its pipe and its words."""

    def __init__(self, cradle: Cradle, what: str, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        with theirs:
            self.kin: Kin = cradle.bear(theirs.fileno(), self.errors.fileno())
        self.connection = Connection(ours.detach())
        birth = Birth("baton rank 7", "tests.engine.instance.newborn", (what,), ENVIRONMENT | environment)
        self.connection.send_bytes(msgspec.msgpack.encode(birth))

    def words(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()


def until(is_so: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Ended, whether or not anybody has looked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def cradle() -> Iterator[Cradle]:
    found = Cradle(ENVIRONMENT)
    yield found
    found.close()


def test_a_process_has_its_own_environment_session_and_name(cradle: Cradle):
    one, other = Newborn(cradle, "tell", MINE="a"), Newborn(cradle, "tell", YOURS="b")
    (first, pid, session, name), (second, *_) = one.connection.recv(), other.connection.recv()
    assert first == ENVIRONMENT | {"MINE": "a"}
    assert second == ENVIRONMENT | {"YOURS": "b"}
    assert pid == one.kin.pid == session
    assert name == "baton rank 7\n"
    assert (one.kin.wait(LIMIT_S), other.kin.wait(LIMIT_S)) == (0, 0)


def test_how_a_process_ended_is_told_with_its_last_words(cradle: Cradle):
    failed, killed = Newborn(cradle, "fail"), Newborn(cradle, "kill")
    assert failed.kin.wait(LIMIT_S) == 1
    assert failed.words().endswith("ValueError: it cannot be\n")
    assert killed.kin.wait(LIMIT_S) == -signal.SIGKILL
    assert (failed.kin.poll(), killed.kin.poll()) == (1, -signal.SIGKILL)
    killed.kin.kill()  # of one that is gone: nothing


def test_waiting_has_an_end_and_kill_brings_it_about(cradle: Cradle):
    lingering = Newborn(cradle, "linger")
    pid = lingering.connection.recv()
    assert lingering.kin.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        lingering.kin.wait(0.05)
    waiting = threading.Thread(target=lingering.kin.wait, args=(LIMIT_S,))
    waiting.start()
    assert lingering.kin.poll() is None
    assert waiting.is_alive(), "who looks does not wait for who waits"
    lingering.kin.kill()
    waiting.join(LIMIT_S)
    assert lingering.kin.wait(LIMIT_S) == -signal.SIGKILL
    assert is_gone(pid)


def test_nobody_holds_the_pipe_of_another(cradle: Cradle):
    """An end of a pipe is heard although younger ones live, and none has more descriptors than the first."""
    born = [Newborn(cradle, "listen") for _ in range(3)]
    held = [each.connection.recv() for each in born]
    assert held[0] == held[1] == held[2]
    assert held[0] == ["", "file", "file", "file", "socket"]
    born[0].connection.close()
    assert born[0].kin.wait(LIMIT_S) == 0
    assert born[1].kin.poll() is None
    for each in born[1:]:
        each.connection.close()
        assert each.kin.wait(LIMIT_S) == 0


def test_an_environment_that_imports_read_has_its_own_cradle_and_a_dead_one_is_replaced():
    nursery = Nursery()
    first = nursery.cradle(ENVIRONMENT)
    assert nursery.cradle(ENVIRONMENT | {"SOMETHING": "else"}) is first
    other = nursery.cradle(ENVIRONMENT | {"OMP_NUM_THREADS": "2"})
    assert other is not first
    assert nursery.cradle(ENVIRONMENT) is first
    born = Newborn(first, "linger")
    pid = born.connection.recv()
    first._process.kill()
    first._process.wait()
    assert born.kin.wait(LIMIT_S) == -signal.SIGKILL
    until(lambda: is_gone(pid))
    with pytest.raises(EngineError, match="ranks fork from ended"):
        Newborn(first, "linger")
    again = nursery.cradle(ENVIRONMENT)
    assert again is not first
    assert Newborn(again, "tell").kin.wait(LIMIT_S) == 0
    nursery.close()
    assert not again.is_alive
    assert not other.is_alive


def test_a_cradle_ends_at_once_even_while_it_imports():
    found = Cradle(ENVIRONMENT)
    found.close()
    assert not found.is_alive


def test_a_cradle_that_cannot_import_says_why(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such luck')")
    with pytest.raises(EngineError, match=r"exit code 1.*no such luck"):
        Newborn(Cradle(ENVIRONMENT | {"PYTHONPATH": str(tmp_path)}), "tell")


IMPORTS = """
import os, sys
import torch

def ask(*words, **named):
    raise SystemExit("a device was asked for while importing")

for module in (torch.cuda, torch.accelerator):
    for name in ("is_available", "device_count", "_lazy_init", "current_device", "current_accelerator"):
        if hasattr(module, name):
            setattr(module, name, ask)
if sys.argv[1:]:
    torch.cuda.is_available()
import baton.engine.rank.cradle
print(len(os.listdir("/proc/self/task")))
"""


def test_what_is_imported_before_the_forks_asks_for_no_device_and_starts_no_thread():
    """A process that forked after either could not use the device, or would wait for a thread that is not."""
    words = [sys.executable, "-c", IMPORTS]
    run = partial(subprocess.run, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=60)
    assert run(words).stdout == "1\n"
    assert "asked for" in run([*words, "ask"]).stderr


ORPHANS = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.engine.instance.test_kin import ENVIRONMENT, Cradle, Newborn
cradle = Cradle(ENVIRONMENT)
born = []
starting = threading.Thread(target=lambda: born.append(Newborn(cradle, "linger")))
starting.start()
starting.join()
pid = os.fork()
if pid == 0:
    signal.pause()  # holds every descriptor of its parent
print(pid, cradle._process.pid, born[0].connection.recv(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_outlives_the_parent_whoever_else_holds_its_descriptors():
    words = [sys.executable, "-c", ORPHANS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as parent:
        assert parent.stdout is not None
        holder, *pids = map(int, parent.stdout.readline().split())
        try:
            until(lambda: all(map(is_gone, pids)))
            assert not is_gone(holder)
        finally:
            os.kill(holder, signal.SIGKILL)
