"""`baton registry` as a real process: its one line, its signals and its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.session.registry_world import SECRET, RegistryProcess, member, run

from baton.session.registry import RegistryClient


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
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=environment)
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
