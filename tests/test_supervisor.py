"""Child processes: read, asked, restarted, ended, and gone with their parent, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from baton import supervisor
from baton.errors import ConfigError, ProcessError
from baton.supervisor import (
    RESTART_WINDOW_S,
    RESTARTS_MAX,
    ChildProcess,
    Service,
    SupervisedService,
    Supervisor,
)
from tests.faults.stages import is_alive
from tests.ports import free_port

LIMIT_S = 120.0
SAYING = "import time; print('talking at http://127.0.0.1:1', flush=True); time.sleep(600)"
SERVING = """
import sys
from baton.errors import ConfigError
from baton.supervisor import serve_calls

class Calculator:
    def add(self, a, b):
        print("a library prints")
        return a + b

    def fail(self):
        raise ConfigError("no such number")

serve_calls(Calculator(), sys.stdin)
"""


def until(condition: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_the_error_is_quoted_and_not_a_warning_after_it() -> None:
    dying = "import sys, warnings; print('baton: no room', file=sys.stderr); warnings.warn('x'); sys.exit(1)"
    ended = pytest.raises(ProcessError, match=r"one ended with exit code 1: baton: no room$")
    with ChildProcess("one", python(dying)) as child, ended:
        child.wait_line("talking at ", LIMIT_S)


def test_a_ready_line_and_an_end() -> None:
    with ChildProcess("one", python(SAYING)) as child:
        assert child.wait_line("talking at ", LIMIT_S) == "http://127.0.0.1:1"
        assert child.is_running
    assert not child.is_running
    assert child.popen.returncode == -signal.SIGTERM


def test_one_that_ends_early_is_quoted() -> None:
    with ChildProcess("one", python("raise SystemExit('no such layout')")) as child:
        with pytest.raises(ProcessError, match="one ended with exit code 1: no such layout"):
            child.wait_line("talking at ", LIMIT_S)
        with pytest.raises(ProcessError, match="no such layout"):
            child.check()


def test_one_that_never_speaks_is_given_up() -> None:
    with ChildProcess("mute", python("import time; time.sleep(600)")) as child:
        with pytest.raises(ProcessError, match="mute did not print 'talking at ' within"):
            child.wait_line("talking at ", 0.3)
        with pytest.raises(ProcessError, match="mute printed nothing for"):
            child.read_line(0.3)


def test_calls_and_answers() -> None:
    with ChildProcess("calculator", python(SERVING), has_stdin=True) as child:
        assert child.ask("add", 2, 3) == 5
        child.begin("add", 1, 1)
        child.begin("fail")
        assert child.answer() == 2
        with pytest.raises(ProcessError, match="calculator: no such number"):
            child.answer()
        child.kill()
        with pytest.raises(ProcessError, match="calculator was ended by signal 9"):
            child.ask("add", 1, 2)


def test_one_that_ignores_requests_to_end_is_killed(monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "END_S_MAX", 0.5)
    deaf = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\nprint('up', flush=True)\n"
    child = ChildProcess("deaf", python(deaf + "import time; time.sleep(600)"))
    assert child.read_line(LIMIT_S) == "up"
    child.close(0.5)
    assert child.popen.returncode == -signal.SIGKILL


def test_a_killed_parent_leaves_no_child() -> None:
    text = (
        "import sys, time; from baton.supervisor import ChildProcess; "
        f"c = ChildProcess('one', [sys.executable, '-c', {SAYING!r}]); c.wait_line('talking at '); "
        "print(c.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen(python(text), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        pid = int(output.readline())
        assert is_alive(pid)
        parent.kill()
        parent.wait(LIMIT_S)
    until(lambda: not is_alive(pid))


def ready_service() -> SupervisedService:
    supervised = SupervisedService(Service("registry", ("registry",), "registry at "))
    supervised.was_ready = True
    return supervised


def test_restarts_are_limited_by_the_minute() -> None:
    supervised = ready_service()
    for number in range(RESTARTS_MAX):
        message = supervised.ended(1, "baton: it broke", 1000.0)
        assert message.startswith("ended with exit code 1 (it broke); restarting it")
        assert f"({number + 1} of at most {RESTARTS_MAX} restarts a minute)" in message
    later_s = 1000.0 + RESTART_WINDOW_S + 1
    assert supervised.ended(-9, "", later_s).startswith("was ended by signal 9; restarting it (1 of")
    for _ in range(RESTARTS_MAX - 1):
        supervised.ended(1, "it broke", later_s)
    with pytest.raises(ProcessError, match=r"ended 4 times within 60 s; the last time it .* \(it broke\)"):
        supervised.ended(1, "baton: it broke", later_s)


def test_a_service_that_never_was_ready_is_not_restarted() -> None:
    supervised = SupervisedService(Service("registry", ("registry",), "registry at "))
    with pytest.raises(
        ProcessError, match=r"registry ended with exit code 1 \(it broke\) before it was ready"
    ):
        supervised.ended(1, "baton: it broke", 0.0)
    with pytest.raises(ConfigError, match="registry: it broke"):
        supervised.ended(2, "baton: it broke", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "run"
    (found / "deeper").mkdir(parents=True)
    return found


def test_a_supervisor_restarts_on_the_same_port() -> None:
    lines: list[str] = []
    environment = {**os.environ, "BATON_SECRET": "s" * 32}
    found = Supervisor(environment, lambda name, line: lines.append(f"{name}: {line}"))
    registry = found.start(Service("registry", ("registry",), "registry at "))
    assert found.wait_until(lambda: registry.is_listening, LIMIT_S)
    registry.was_ready, first, url = True, registry.process, registry.url
    assert first is not None
    first.kill()
    assert found.wait_until(lambda: registry.process is not first and registry.is_listening, LIMIT_S)
    assert registry.url == url
    assert any("registry: was ended by signal 9; restarting it" in line for line in lines)
    found.close([["registry"]])
    assert not registry.is_running


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_folder_is_guarded_before_it_exists_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_guarded: bool
) -> None:
    folder, begin, existed = tmp_path / "run", subprocess.Popen, []

    def popen(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        existed.append(folder.exists())
        return begin(argv, **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", popen)
    found = Supervisor({}, lambda name, line: None, str(folder))
    (folder / "deeper").mkdir()
    assert existed == [False]
    assert folder.stat().st_mode & 0o777 == 0o700
    if not is_guarded:
        found._guard.kill()
        found._guard.wait(LIMIT_S)
    found.close([])
    assert not folder.exists()


def test_a_client_that_connects_while_the_router_is_restarted_waits_for_it() -> None:
    environment = {**os.environ, "BATON_SECRET": "s" * 32}
    found = Supervisor(environment, lambda name, line: None)
    words = ("route", "--registry", "http://127.0.0.1:9")
    router = found.start(Service("router", words, "routing at ", free_port(), host="127.0.0.1"))
    try:
        assert found.wait_until(lambda: router.is_listening, LIMIT_S)
        router.was_ready, first = True, router.process
        assert first is not None
        parts = urlsplit(router.url)
        os.kill(first.pid, signal.SIGSTOP)  # the connection is made before it is killed, and after
        with socket.create_connection((parts.hostname, parts.port), timeout=LIMIT_S) as client:
            first.kill()
            client.sendall(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
            with socket.create_connection((parts.hostname, parts.port), timeout=LIMIT_S) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: router\r\n\r\n")
                for sock in (client, other):
                    assert sock.recv(12) == b"HTTP/1.1 503"
    finally:
        found.close([["router"]])
    assert router.process is not first
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((parts.hostname, parts.port), timeout=LIMIT_S)


def test_misuse_of_a_service_is_raised_in_the_waiting_thread() -> None:
    environment = {**os.environ, "BATON_SECRET": "short"}
    found = Supervisor(environment, lambda name, line: None)
    found.start(Service("registry", ("registry",), "registry at "))
    try:
        with pytest.raises(ConfigError, match="registry: variable BATON_SECRET has 5 bytes"):
            found.wait_until(lambda: False, LIMIT_S)
    finally:
        found.close([["registry"]])


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def start_guard(folder: Path, *pids: int, end_s: float = 20.0) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", supervisor.__name__, str(folder), str(end_s)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
    process.stdin.flush()
    return process


def is_ignoring(pid: int, number: int) -> bool:
    (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_guard_ends_what_its_parent_left(folder: Path, sleeper) -> None:
    process = start_guard(folder, sleeper.pid, 2**22 - 1)
    until(lambda: is_ignoring(process.pid, signal.SIGINT))
    process.send_signal(signal.SIGINT)  # as a terminal sends it to all
    assert is_alive(sleeper.pid)
    assert folder.exists()
    process.stdin.close()
    assert process.wait(LIMIT_S) == 0
    assert sleeper.wait(LIMIT_S) == -signal.SIGINT
    assert not folder.exists()


def test_the_guard_kills_what_ignores_it(folder: Path) -> None:
    deaf = subprocess.Popen(["sh", "-c", "trap '' INT; echo ready; exec sleep 600"], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    with deaf.stdout as output:
        assert output.readline() == b"ready\n"
    with start_guard(folder, deaf.pid, end_s=0.5) as process:
        process.communicate(timeout=LIMIT_S)
    assert deaf.wait(LIMIT_S) == -signal.SIGKILL


def test_replies_are_told_from_what_libraries_print() -> None:
    text = "from baton.supervisor import reply; print('noise'); reply({'a': [1]}); print('more')"
    with ChildProcess("one", python(text)) as child:
        assert child.receive(LIMIT_S) == json.loads('{"a": [1]}')
        assert child.wait(LIMIT_S)
