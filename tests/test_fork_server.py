"""Processes forked from a server: what they start with, and how they end."""

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

from baton.engine.config import WORKER_MODULES
from baton.errors import EngineError, for_clients
from baton.fork_server import ForkedProcess, ForkServer, ForkServerPool, SpawnRequest, ended_error, last_error

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
LIMIT_S = 120.0


WARNING = "/lib/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked semaphore objects"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (
            ["baton: layout 'tpp2': unknown axis", WARNING, "  warnings.warn("],
            "baton: layout 'tpp2': unknown axis",
        ),
        (["Traceback (most recent call last):", "  f()", "OSError: no space", WARNING], "OSError: no space"),
        (["torch.cuda.OutOfMemoryError: 2 GiB", "see the docs"], "torch.cuda.OutOfMemoryError: 2 GiB"),
        (["Fatal Python error: Aborted", "Thread 0x1", "  File x"], "Fatal Python error: Aborted"),
        (
            ["2026-11-19 10:00:00,000 ERROR vllm: engine died", "bye"],
            "2026-11-19 10:00:00,000 ERROR vllm: engine died",
        ),
        (
            ['{"time": "x", "level": "error", "message": "no such file"}', "bye"],
            "no such file",
        ),
        (["loading", "cannot go on", "10:00 WARNING slow"], "cannot go on"),
        (["/lib/fx.py:1: FutureWarning: use another", "  return func(*args, **kwargs)"], "no message"),
        ([], "no message"),
    ],
)
def test_the_last_error_is_quoted_not_a_warning_after_it(lines: list[str], error: str) -> None:
    assert last_error(lines) == error


def test_clients_are_not_shown_what_a_process_printed() -> None:
    with tempfile.TemporaryFile() as output:
        output.write(f"OSError: /srv/models/private\n{WARNING}\n".encode())
        ended = str(ended_error("rank 0 of decode-0", 1, output))
    assert ended == "rank 0 of decode-0 ended with exit code 1; its last words: OSError: /srv/models/private"
    assert for_clients(ended) == "rank 0 of decode-0 ended with exit code 1"


class Forked:
    """A forked process with its pipe and its words."""

    def __init__(self, server: ForkServer, behaviour: str, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        with theirs:
            self.process: ForkedProcess = server.spawn(theirs.fileno(), self.errors.fileno())
        self.connection = Connection(ours.detach())
        request = SpawnRequest("baton rank 7", "tests.forked", (behaviour,), ENVIRONMENT | environment)
        self.connection.send_bytes(msgspec.msgpack.encode(request))

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
def server() -> Iterator[ForkServer]:
    server = ForkServer(ENVIRONMENT, WORKER_MODULES)
    yield server
    server.close()


def test_a_process_has_its_own_environment_session_and_name(server: ForkServer):
    first_process, second_process = Forked(server, "tell", MINE="a"), Forked(server, "tell", YOURS="b")
    (first, pid, session, name), (second, *_) = (
        first_process.connection.recv(),
        second_process.connection.recv(),
    )
    assert first == ENVIRONMENT | {"MINE": "a"}
    assert second == ENVIRONMENT | {"YOURS": "b"}
    assert pid == first_process.process.pid == session
    assert name == "baton rank 7\n"
    assert (first_process.process.wait(LIMIT_S), second_process.process.wait(LIMIT_S)) == (0, 0)


def test_how_a_process_ended_is_told_with_its_last_words(server: ForkServer):
    failed, killed = Forked(server, "fail"), Forked(server, "kill")
    assert failed.process.wait(LIMIT_S) == 1
    assert failed.words().endswith("ValueError: it cannot be\n")
    assert killed.process.wait(LIMIT_S) == -signal.SIGKILL
    assert (failed.process.poll(), killed.process.poll()) == (1, -signal.SIGKILL)
    killed.process.kill()  # of one that is gone: nothing


def test_waiting_has_an_end_and_kill_brings_it_about(server: ForkServer):
    lingering = Forked(server, "linger")
    pid = lingering.connection.recv()
    assert lingering.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        lingering.process.wait(0.05)
    waiting = threading.Thread(target=lingering.process.wait, args=(LIMIT_S,))
    waiting.start()
    assert lingering.process.poll() is None
    assert waiting.is_alive(), "who looks does not wait for who waits"
    lingering.process.kill()
    waiting.join(LIMIT_S)
    assert lingering.process.wait(LIMIT_S) == -signal.SIGKILL
    assert is_gone(pid)


def test_no_process_holds_the_pipe_of_another(server: ForkServer):
    """An end of a pipe is heard although younger ones live, and none has more descriptors than the first."""
    forked = [Forked(server, "listen") for _ in range(3)]
    held = [process.connection.recv() for process in forked]
    assert held[0] == held[1] == held[2]
    # On some processors torch keeps files open.
    assert [kind for kind in held[0] if kind != "file"] == ["", "socket"]
    forked[0].connection.close()
    assert forked[0].process.wait(LIMIT_S) == 0
    assert forked[1].process.poll() is None
    for process in forked[1:]:
        process.connection.close()
        assert process.process.wait(LIMIT_S) == 0


@pytest.mark.slow
def test_variables_read_at_import_need_another_server_and_a_dead_one_is_replaced():
    pool = ForkServerPool()
    first = pool.get(ENVIRONMENT, WORKER_MODULES)
    assert pool.get(ENVIRONMENT | {"SOMETHING": "else"}, WORKER_MODULES) is first
    second_process = pool.get(ENVIRONMENT | {"OMP_DYNAMIC": "true"}, WORKER_MODULES)
    assert second_process is not first
    assert pool.get(ENVIRONMENT, WORKER_MODULES) is first
    forked = Forked(first, "linger")
    pid = forked.connection.recv()
    first._process.kill()
    first._process.wait()
    assert forked.process.wait(LIMIT_S) == -signal.SIGKILL
    until(lambda: is_gone(pid))
    with pytest.raises(EngineError, match="the fork server was ended by signal 9"):
        Forked(first, "linger")
    again = pool.get(ENVIRONMENT, WORKER_MODULES)
    assert again is not first
    assert Forked(again, "tell").process.wait(LIMIT_S) == 0
    pool.close()
    assert not again.is_alive
    assert not second_process.is_alive


def test_a_server_ends_at_once_even_while_it_imports():
    server = ForkServer(ENVIRONMENT, WORKER_MODULES)
    server.close()
    assert not server.is_alive


def test_a_server_that_cannot_import_says_why(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('no such luck')")
    with pytest.raises(EngineError, match=r"exit code 1.*no such luck"):
        Forked(ForkServer(ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"}, WORKER_MODULES), "tell")


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
import baton.fork_server, baton.engine.worker
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.slow
def test_what_is_imported_before_the_forks_asks_for_no_device_and_starts_no_thread():
    """A process that forked after either could not use the device, or would wait for a thread that is not."""
    words = [sys.executable, "-c", IMPORTS]
    run = partial(subprocess.run, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=300)
    assert run(words).stdout == "1\n"
    assert "asked for" in run([*words, "ask"]).stderr


ORPHANS = f"""
import os, signal, sys, threading
sys.path.insert(0, {str(ROOT)!r})
if "early" in sys.argv:
    from baton.engine.config import WORKER_MODULES
    from baton.fork_server import FORK_SERVERS
    FORK_SERVERS.fork_early(dict(os.environ), WORKER_MODULES)
    server = FORK_SERVERS.get(dict(os.environ), WORKER_MODULES)
from tests.test_fork_server import ENVIRONMENT, WORKER_MODULES, Forked, ForkServer
if "early" not in sys.argv:
    server = ForkServer(ENVIRONMENT, WORKER_MODULES)
forked = []
starting = threading.Thread(target=lambda: forked.append(Forked(server, "linger")))
starting.start()
starting.join()
pid = os.fork()
if pid == 0:
    signal.pause()  # holds every descriptor of its parent
print(pid, server._process.pid, forked[0].connection.recv(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start", ["new", "early"])
def test_nothing_outlives_the_parent_whoever_else_holds_its_descriptors(start: str):
    words = [sys.executable, "-c", ORPHANS, start]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as parent:
        assert parent.stdout is not None
        holder, *pids = map(int, parent.stdout.readline().split())
        try:
            until(lambda: all(map(is_gone, pids)))
            assert not is_gone(holder)
        finally:
            os.kill(holder, signal.SIGKILL)


EARLY = f"""
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from baton import settings
from baton.engine.config import WORKER_MODULES
from baton.fork_server import FORK_SERVERS
environment = settings.rank_environment(1)
if "thread" in sys.argv:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
FORK_SERVERS.fork_early(environment, WORKER_MODULES)
print(len(FORK_SERVERS._servers))
if FORK_SERVERS._servers:
    server = FORK_SERVERS.get(environment, WORKER_MODULES)
    assert FORK_SERVERS.get(environment | {{"OMP_DYNAMIC": "true"}}, WORKER_MODULES) is not server
    FORK_SERVERS.fork_early(environment, WORKER_MODULES)  # the modules are there: no second one
    from tests.test_fork_server import LIMIT_S, Forked
    told, failed, killed = (Forked(server, name) for name in ("tell", "fail", "kill"))
    print(told.connection.recv()[3].strip(), told.process.wait(LIMIT_S))
    print(failed.process.wait(LIMIT_S), failed.words().splitlines()[-1], killed.process.wait(LIMIT_S))
    print(open(f"/proc/{{server._process.pid}}/comm").read().strip(), len(FORK_SERVERS._servers))
    server._process.kill()
    print(server._process.wait(LIMIT_S), FORK_SERVERS.get(environment, WORKER_MODULES) is server)
"""


@pytest.mark.slow
def test_a_command_forks_its_server_before_it_has_threads():
    run = partial(subprocess.run, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=300)
    found = run([sys.executable, "-c", EARLY])
    assert found.stderr == ""
    assert found.stdout.splitlines() == [
        "1",
        "baton rank 7 0",
        "1 ValueError: it cannot be -9",
        "baton fork 2",
        "-9 False",
    ]
    assert run([sys.executable, "-c", EARLY, "thread"]).stdout == "0\n"


SETS = """
import os
os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")
"""
NESTED = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, sys.argv[1]]
from baton import settings
from baton.fork_server import FORK_SERVERS
FORK_SERVERS.fork_early(settings.rank_environment(1), ("sets_a_variable",))
(server,) = FORK_SERVERS._servers.values()
assert os.environ["KMP_INIT_AT_FORK"] == "FALSE"
print(FORK_SERVERS.get(settings.rank_environment(1), ("sets_a_variable",)) is server)
from tests.test_fork_server import LIMIT_S, Forked
child = Forked(server, "nest", **settings.rank_environment(1))
print(child.connection.recv(), child.process.wait(LIMIT_S))
"""


def test_a_variable_that_a_library_sets_while_it_is_imported_asks_for_no_other_server(tmp_path: Path):
    """scikit-learn sets KMP_INIT_AT_FORK, and transformers imports it: everything was imported twice."""
    (tmp_path / "sets_a_variable.py").write_text(SETS)
    command = [sys.executable, "-c", NESTED, str(tmp_path)]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "KMP_INIT_AT_FORK"}
    found = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT_S
    )
    assert found.stderr == ""
    assert found.stdout.splitlines() == ["True", "True 0"]
