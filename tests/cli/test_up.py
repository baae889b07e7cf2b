"""`baton up` refuses what cannot work before it starts anything, and knows how to keep what it started."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.models import speaking_model
from tests.faults.stages import is_alive

from baton.cli import main
from baton.cli.deployment import guard
from baton.cli.deployment.child import Child
from baton.cli.deployment.options import Front, Options, instance_parts, registry_part, router_part
from baton.cli.deployment.pairs import pairs, sides
from baton.cli.deployment.running import Kept, Running, is_log, stage_of
from baton.errors import ConfigError, EngineError

LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return speaking_model(tmp_path_factory.mktemp("models"))


@pytest.fixture
def up(capfd, monkeypatch, model):
    def started(*_: object) -> None:
        raise AssertionError("something was started")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.delenv("BATON_API_KEY", raising=False)
        monkeypatch.setattr("baton.cli.deployment.up.running", started)
        monkeypatch.setattr(sys, "argv", ["baton", "up", "--model", str(model), "--port", "0", *words])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return run


MISUSES = {
    "no layout": (["--prefill", "xp2"], "xp2"),
    "an empty layout": (["--prefill", "tp1,,tp2"], "empty layout"),
    "one of several layouts": (["--prefill", "tp1", "--decode", "tp2,pp9"], "pp9"),
    "a pair without a plan": (["--prefill", "tp1,tp2", "--decode", "tp1,tp5"], "component k, this tp5"),
    "no policy": (["--prefill", "tp1", "--overlap", "wild"], "wild"),
    "no way to route": (["--prefill", "tp1", "--policy", "by_colour"], "round_robin"),
    "no speed": (["--prefill", "tp1", "--decode", "tp1", "--link", "fast"], "12.5GB/s"),
    "no side": (["--prefill", "tp1", "--decode", "tp1", "--first-token", "router"], "prefill or decode"),
    "no transport": (["--prefill", "tp1", "--transport", "pigeon"], "shm"),
    "no dtype": (["--prefill", "tp1", "--dtype", "fp4"], "bf16"),
    "no draft": (["--prefill", "tp1", "--draft"], "there is no draft layer"),
    "no model": (["--prefill", "tp1", "--model", "no/such/model"], "no/such/model"),
    "the world may ask": (["--prefill", "tp1", "--host", "0.0.0.0"], "--api-key-file"),
    "no keys": (["--prefill", "tp1", "--api-key-file", "no/such/file"], "no/such/file"),
    "no port": (["--prefill", "tp1", "--port", "70000"], "65535"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_one_line_before_anything_starts(up, name: str) -> None:
    words, said = MISUSES[name]
    code, out, err = up(*words)
    assert (code, out) == (2, "")
    assert said in err.splitlines()[-1]
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_a_failure_before_weights_are_loaded(up) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = up("--prefill", "tp1", "--port", str(port))
    assert (code, out) == (1, "")
    assert f"cannot listen on 127.0.0.1:{port}" in err.splitlines()[-1]
    assert "--port" in err.splitlines()[-1]


def test_every_pair_is_planned(model) -> None:
    options = Options(str(model), ("tp1", "pp2"), ("tp2", "tp1"))
    found = pairs(options, sides(options))
    names = [(pair.source.name, pair.target.name) for pair in found]
    assert names == [(f"prefill-{i}", f"decode-{j}") for i in range(2) for j in range(2)]
    assert [len({(route.source, route.target) for route in pair.report.routes}) for pair in found] == [
        2,
        1,
        4,
        2,
    ]
    assert (
        found[2].line().startswith("prefill-1 (pp2) to decode-0 (tp2): 8 routes between 4 pairs of ranks, ")
    )


def test_the_command_lines_of_the_parts() -> None:
    options = Options(
        "demo", ("pp2", "tp1"), ("tp3",), link="5MB/s", front=Front(port=81, policy="round_robin")
    )
    first, second, third = instance_parts(options, "http://127.0.0.1:8400")
    assert [part.name for part in (first, second, third)] == ["prefill-0", "prefill-1", "decode-0"]
    assert first.command(0)[:7] == ["serve", "--role", "prefill", "--model", "demo", "--layout", "pp2"]
    assert "--link" in second.words
    assert "--link" not in third.words, "links are of prefill ranks"
    assert first.command(4321)[-2:] == ["--port", "4321"], "started again on the port that it had"
    assert router_part(options, "http://127.0.0.1:8400").command(0)[-2:] == ["--port", "81"]
    (alone,) = instance_parts(Options("demo", ("pp2",)), "http://127.0.0.1:8400")
    assert (alone.name, alone.role) == ("both-0", "both")


def test_health_in_words() -> None:
    body = b'{"error": {"message": "prefill-0 is not ready: loading weights", "code": "LOADING"}}'
    assert stage_of("prefill-0", body) == "loading weights"
    assert stage_of("router", b'{"error": {"message": "no instance"}}') == "no instance"
    for strange in (b"", b"<html>", b"[]", b'{"error": 1}'):
        assert stage_of("x", strange) == "not ready"
    assert is_log("2026-11-15 13:54:39,984 baton.server: running")
    assert not is_log("baton: no such file")


class Judged:
    """A part that has died, in the eyes of whoever keeps it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.running = Running.__new__(Running)
        self.running._say = lambda name, line: self.said.append(f"{name}: {line}")
        self.kept = Kept(registry_part())
        self.child = Child.__new__(Child)
        self.child._lines = ["baton: it broke"]

    def died(self, code: int) -> None:
        self.running._judge(self.kept, self.child, code)


def test_three_restarts_a_minute_and_no_more(monkeypatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("baton.cli.deployment.running.monotonic", lambda: now_s[0])
    judged = Judged()
    judged.kept.was_ready = True
    for turn in range(3):
        judged.died(1)
        assert f"({turn + 1} of 3 times in a minute)" in judged.said[-1]
    now_s[0] += 61
    judged.died(-9)
    assert "registry: was ended by signal 9; it is started again (1 of 3" in judged.said[-1]
    for _ in range(2):
        judged.died(1)
    with pytest.raises(
        EngineError, match=r"4 times within 60 s; the last time it ended with exit code 1 \(it broke"
    ):
        judged.died(1)


def test_a_part_that_never_was_ready_is_not_started_again() -> None:
    with pytest.raises(EngineError, match=r"exit code 1 \(it broke\) before it was ready"):
        Judged().died(1)
    with pytest.raises(ConfigError, match="registry: it broke"):
        Judged().died(2)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def watched(folder: Path, *pids: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-I", guard.__file__, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    process.stdin.write("".join(f"{pid}\n" for pid in pids).encode())
    process.stdin.flush()
    return process


def until_ignored(pid: int, number: int) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while True:
        (mask,) = re.findall(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        if int(mask, 16) >> (number - 1) & 1:
            return
        assert time.monotonic() < limit_s
        time.sleep(0.02)


def test_the_guard_ends_what_its_parent_left(tmp_path: Path, sleeper) -> None:
    folder = tmp_path / "run"
    (folder / "deeper").mkdir(parents=True)
    process = watched(folder, sleeper.pid, 2**22 - 1)
    until_ignored(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGINT)  # what a terminal sends to all
    assert is_alive(sleeper.pid)
    assert folder.exists()
    process.stdin.close()
    assert process.wait(LIMIT_S) == 0
    assert sleeper.wait(LIMIT_S) == -signal.SIGINT
    assert not folder.exists()


def test_the_guard_kills_what_does_not_listen(tmp_path: Path) -> None:
    deaf = subprocess.Popen(["sh", "-c", "trap '' INT; echo ready; exec sleep 600"], stdout=subprocess.PIPE)
    assert deaf.stdout is not None
    with deaf.stdout as output:
        assert output.readline() == b"ready\n"
    script = Path(guard.__file__).read_text().replace("END_S_MAX = 20.0", "END_S_MAX = 0.5")
    (tmp_path / "guard.py").write_text(script)
    words = [sys.executable, "-I", str(tmp_path / "guard.py"), str(tmp_path / "run")]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        process.communicate(f"{deaf.pid}\n".encode(), LIMIT_S)
    assert deaf.wait(LIMIT_S) == -signal.SIGKILL
