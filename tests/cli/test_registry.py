"""`baton registry` as a real process: its one line, its signals and its errors."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.session.registry_world import SECRET, RegistryProcess, member, registry, run

from baton.session.registry import RegistryClient, RegistryConfig


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_line_with_the_url_and_a_clean_end(number: int) -> None:
    async def body(process: RegistryProcess) -> None:
        async with RegistryClient(process.url, SECRET) as client:
            await client.register(member(layout="tp1")).wait()
            async for _ in client.watch():  # and an open watch holds nobody up
                process.process.send_signal(number)
                assert await asyncio.to_thread(process.process.wait, 10) == 0
                break

    with RegistryProcess() as process:
        assert process.line == f"registry at http://127.0.0.1:{process.port}"
        run(lambda: body(process))
        assert process.process.communicate() == ("", "")


def test_the_secret_can_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"the secret of the file\n")
    file.chmod(0o600)

    async def body(process: RegistryProcess) -> None:
        async with RegistryClient(process.url, b"the secret of the file") as client:
            await client.register(member(layout="tp1")).wait()

    with RegistryProcess(0, "--secret-file", str(file)) as process:
        run(lambda: body(process))
        assert process.end(signal.SIGTERM) == (0, "")


def fails(*options: str, secret: str | None = SECRET.decode()) -> tuple[int, str]:
    environment = {key: value for key, value in os.environ.items() if key != "BATON_SECRET"}
    environment |= {} if secret is None else {"BATON_SECRET": secret}
    words = [sys.executable, "-m", "baton", "registry", *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.returncode, done.stderr


def test_a_port_in_use_is_one_line_and_exit_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = fails("--port", str(port))
    assert code == 1
    assert line.startswith(f"baton: cannot listen on 127.0.0.1:{port}: ")
    assert "name another port" in line


@pytest.mark.parametrize(
    ("options", "secret", "reason"),
    [
        ([], None, "BATON_SECRET"),
        ([], "short", "BATON_SECRET"),
        (["--secret-file", "/nothing/there"], SECRET.decode(), "/nothing/there"),
        (["--port", "70000"], SECRET.decode(), "65535"),
        (["--host", "no.such.host.invalid", "--port", "0"], SECRET.decode(), "no.such.host.invalid"),
    ],
)
def test_misuse_is_one_line_and_exit_2(options: list[str], secret: str | None, reason: str) -> None:
    code, line = fails(*options, secret=secret)
    assert code == 2
    assert reason in line


PAGE = (Path(__file__).parents[2] / "docs/registry.md").read_text()


def example(language: str, url: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return block.replace("http://127.0.0.1:8400", url)


def test_the_shell_example_of_the_page_runs(tmp_path: Path) -> None:
    missing = [name for name in ("bash", "curl", "openssl") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here")
    (tmp_path / "secret").write_bytes(SECRET)

    async def body() -> None:
        # With a short beat the one that watches soon notices that nobody reads any more.
        async with registry(config=RegistryConfig(beat_s=0.1)) as server:
            shell = await asyncio.create_subprocess_exec(
                "bash", "-c", example("bash", server.url), cwd=tmp_path, stdout=subprocess.PIPE
            )
            output, _ = await shell.communicate()
        lines = [line for line in output.decode().splitlines() if line]
        assert lines[0] == '{"status":"ok"}'
        assert lines[1] == '{"is_new":true}'
        for line in lines[2:4]:
            assert '"ranks":[0]' in line
            assert '"missing":[{"instance":"p0","ranks":[1]' in line
        assert [line.split(":")[0] for line in lines[4:7]] == ["id", "event", "data"]
        assert lines[7:] == ['{"is_removed":true}']

    run(body)


def test_the_python_example_of_the_page_runs() -> None:
    with RegistryProcess() as process:
        environment = {**os.environ, "BATON_SECRET": SECRET.decode()}
        words = [sys.executable, "-c", example("python", process.url)]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=300, check=False, env=environment
        )
    assert done.stderr == ""
    (answer,) = done.stdout.splitlines()
    assert answer.startswith("False (Missing(instance='prefill-0', ranks=(1,)")
