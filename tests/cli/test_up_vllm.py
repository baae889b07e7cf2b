"""`baton up --engine vllm`: command lines, and a program in vLLM's place that is watched and ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.stages import is_alive
from tests.serve.parts import ask, until

from baton.cli import main, start
from baton.cli.deployment import make_vllm_servers, router_service, vllm_services
from baton.cli.options import DeploymentOptions
from baton.cli.parser import parse
from baton.cli.vllm_servers import parse_sizes, plan_servers
from baton.errors import ConfigError

LIMIT_S = 120.0
PROGRAM = """#!{python}
import http.server, json, os, subprocess, sys
options = dict(zip(sys.argv, sys.argv[1:]))
if "--broken" in sys.argv:
    print("first trouble\\nsecond trouble", file=sys.stderr)
    sys.exit(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        card = {{"id": sys.argv[2], "max_model_len": 64}}
        is_known = self.headers.get("Authorization") == "Bearer " + os.environ["VLLM_API_KEY"]
        self.send_response(200 if is_known or self.path == "/health" else 401)
        self.end_headers()
        self.wfile.write(json.dumps({{"data": [card]}}).encode())
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler)
engine = subprocess.Popen(["sleep", "600"])
print("engine", engine.pid, flush=True)
with open(os.path.join({folder!r}, options["--port"]), "w") as file:
    print(os.getpid(), engine.pid, file=file)
server.serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """In vLLM's place: it serves, and its engine is a process that outlives it."""
    (tmp_path / "pids").mkdir()
    path = tmp_path / "vllm"
    path.write_text(PROGRAM.format(python=sys.executable, folder=str(tmp_path / "pids")))
    path.chmod(0o755)
    return path


MISUSES = {
    "no decode": (["--prefill", "tp1"], "needs --decode"),
    "no layout of vLLM": (["--prefill", "cp2", "--decode", "tp1"], "'cp2' is not a layout of vLLM"),
    "tp twice": (["--prefill", "tp2", "--decode", "tp1.tp2"], "--decode 'tp1.tp2'"),
    "an option of our engine": (
        ["--prefill", "tp1", "--decode", "tp1", "--page-tokens", "16"],
        "--page-tokens is for Baton's own engine",
    ),
    "no policy": (["--prefill", "tp1", "--decode", "tp1", "--policy", "x"], "round_robin"),
    "an open quote": (
        ["--prefill", "tp1", "--decode", "tp1", "--prefill-args", "'x"],
        "No closing quotation",
    ),
    "no program": (["--prefill", "tp1", "--decode", "tp1", "--vllm", "/nowhere/vllm"], "/nowhere/vllm"),
    "too few GPUs": (["--prefill", "tp2", "--decode", "pp2"], "need 4 GPUs and there are 3"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_refused_before_anything_starts(misuse: str, program: Path, capfd, monkeypatch):
    words, told = MISUSES[misuse]
    monkeypatch.delenv("BATON_API_KEY", raising=False)
    monkeypatch.setenv("BATON_VLLM", str(program))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5" if "GPU" in misuse else "")
    monkeypatch.setattr(start, "DeploymentProcesses", None)
    command = ["baton", "up", "--engine", "vllm", "--model", "m", "--port", "0", *words]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert told in capfd.readouterr().err


def test_options_of_vllm_need_vllm(capfd, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["baton", "up", "--model", "m", "--prefill", "tp1", "--", "--max-model-len"]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert "give --engine vllm too" in capfd.readouterr().err


def test_servers_have_ports_and_devices_of_their_own():
    instances = [
        ("prefill", "prefill-0", "dp2.tp2"),
        ("decode", "decode-0", "pp2"),
        ("decode", "decode-1", "tp1"),
    ]
    servers = plan_servers(instances, list("abcdefgh"))
    assert [server.devices for server in servers] == [tuple("abcd"), tuple("ef"), ("g",)]
    ports = [
        port
        for each in servers
        for port in (each.port, *range(each.kv_port, each.kv_port + each.num_engines))
    ]
    assert len(set(ports)) == len(ports) == 7
    assert plan_servers(instances, [])[0].devices == ()
    assert parse_sizes("--decode", "pp2.tp4") == {"pp": 2, "tp": 4}
    with pytest.raises(ConfigError):
        parse_sizes("--decode", "tp0")


def test_command_lines():
    line = "--engine vllm --model m --prefill dp2.tp2 --decode pp2 --transport shm --verify"
    more = ("--vllm", sys.executable, "--decode-args", "--worker-cls w", "--", "--max-model-len", "2048")
    options = parse(DeploymentOptions, (*line.split(), *more))
    servers = plan_servers(options.layouts, list("abcdef"))
    prefill, decode = vllm_services(options, servers)
    words = dict(zip(prefill.arguments, prefill.arguments[1:], strict=False))
    assert prefill.arguments[:2] == ("serve", "m")
    assert (words["--data-parallel-size"], words["--tensor-parallel-size"]) == ("2", "2")
    assert words["--max-model-len"] == "2048"
    assert prefill.env == {"CUDA_VISIBLE_DEVICES": "a,b,c,d"}
    transfer = json.loads(words["--kv-transfer-config"])
    assert transfer["kv_role"] == "kv_producer"
    assert transfer["kv_port"] == servers[0].kv_port
    extra = {"transport": "shm", "verify": True}
    assert transfer["kv_connector_extra_config"] == {**extra, "ungranted_share_max": 1.0}
    words = dict(zip(decode.arguments, decode.arguments[1:], strict=False))
    assert (words["--pipeline-parallel-size"], words["--worker-cls"]) == ("2", "w")
    transfer = json.loads(words["--kv-transfer-config"])
    assert (transfer["kv_role"], transfer["kv_connector_extra_config"]) == ("kv_consumer", extra)
    route = router_service(options, None, servers).arguments
    source = f"127.0.0.1:{servers[0].kv_port}"
    assert route[:5] == (
        "route",
        "--prefill",
        f"{servers[0].url},source={source},dp=2",
        "--decode",
        servers[1].url,
    )
    assert route[5:7] == ("--engine", "vllm")
    assert "--queue-timeout" not in route


def test_the_queue_timeout_is_the_routers(program: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = f"--engine vllm --vllm {program} --model m --prefill tp1 --decode tp1 --queue-timeout 9"
    options = parse(DeploymentOptions, line.split())
    servers = make_vllm_servers(options)
    assert "--queue-timeout 9.0" in " ".join(router_service(options, None, servers).arguments)
    for service in vllm_services(options, servers):
        assert "queue" not in " ".join(service.arguments), "vLLM has no such option"


@pytest.fixture
def up(program: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    short = tempfile.mkdtemp()  # a long one is not used: the paths of Unix sockets are short
    (tmp_path / "temporary").symlink_to(short)
    environment = {**os.environ, "TMPDIR": short, "BATON_VLLM": str(program)}
    for name in ("BATON_SECRET", "BATON_API_KEY", "VLLM_API_KEY"):
        environment.pop(name, None)
    environment["CUDA_VISIBLE_DEVICES"] = ""
    words = ["--engine", "vllm", "--model", "m", "--prefill", "tp1", "--decode", "tp1", "--port", "0"]
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", "up", *words], stdout=out, stderr=err, env=environment
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(short)


def wait_url(folder: Path) -> str:
    def found() -> re.Match[str] | None:
        return re.search(r"^serving m at (\S+)", (folder / "out").read_text(), re.MULTILINE)

    match = until(found, (folder / "err").read_text, LIMIT_S)
    return str(match[1])


def pids(folder: Path) -> list[int]:
    return [int(word) for file in (folder / "pids").iterdir() for word in file.read_text().split()]


def check_gone(folder: Path) -> None:
    until(lambda: not any(map(is_alive, pids(folder))), lambda: f"{pids(folder)} have ended", LIMIT_S)
    until(lambda: not list((folder / "temporary").iterdir()), "the folder is removed", LIMIT_S)


def test_servers_are_watched_and_nothing_is_left(up: subprocess.Popen[bytes], tmp_path: Path):
    url = wait_url(tmp_path)
    assert list((tmp_path / "temporary").iterdir()), "the folder of the deployment is elsewhere"
    states = [each["state"] for each in ask(url, "/server_info").json["instances"]]
    assert states == ["able", "able"]
    before = pids(tmp_path)
    assert len(before) == 4
    os.kill(before[0], signal.SIGKILL)
    until(lambda: not is_alive(before[1]), "the engine of the killed server is ended", LIMIT_S)
    until(lambda: len(set(pids(tmp_path)) - set(before)) == 2, "the server is started again", LIMIT_S)
    errors = (tmp_path / "err").read_text()
    assert "was ended by signal 9; restarting it" in errors
    assert f"| engine {before[1]}" in errors, "the last lines of the server are missing"
    up.terminate()
    assert up.wait(LIMIT_S) == 0
    check_gone(tmp_path)


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_deployment(up: subprocess.Popen[bytes], tmp_path: Path):
    wait_url(tmp_path)
    up.kill()
    up.wait()
    check_gone(tmp_path)


def test_a_server_that_cannot_start_is_reported_with_its_last_lines(program: Path, tmp_path: Path):
    words = ["--engine", "vllm", "--model", "m", "--prefill", "tp1", "--decode", "tp1", "--port", "0"]
    environment = {**os.environ, "BATON_VLLM": str(program), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("BATON_API_KEY", None)
    done = subprocess.run(
        [sys.executable, "-m", "baton", "up", *words, "--decode-args", "--broken"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "decode-0: | first trouble" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("baton: decode-0 ended with exit code 1 (second trouble)")
    until(lambda: not any(map(is_alive, pids(tmp_path))), "all have ended", LIMIT_S)
