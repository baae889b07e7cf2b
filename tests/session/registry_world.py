"""What tests of the registry share: members, a server in the same loop, and signed requests by hand."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import msgspec
from yarl import URL

from baton.session.registry import Member, RegistryConfig, RegistryServer, Role
from baton.session.registry.messages import sign

SECRET = b"a secret for tests only"
LIMIT_S = 300.0


def member(instance: str = "p0", rank: int = 0, epoch: int = 1, layout: str = "tp2", **more: Any) -> Member:
    fields: dict[str, Any] = {
        "role": Role.PREFILL,
        "coordinator": "10.0.0.1:7000",
        "fingerprint": "f00d",
        "transport": "tcp",
    }
    return Member(instance=instance, rank=rank, epoch=epoch, layout=layout, **{**fields, **more})


def run(body: Callable[[], Awaitable[None]]) -> None:
    """Runs a test's coroutine with a limit, so that what hangs fails."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await body()

    asyncio.run(limited())


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition that other tasks bring about; the test's limit is the only one."""
    while not holds():
        await asyncio.sleep(0.01)


@asynccontextmanager
async def registry(
    secret: bytes | None = SECRET, config: RegistryConfig | None = None, port: int = 0
) -> AsyncIterator[RegistryServer]:
    server = RegistryServer(secret, config=config)
    await server.start(port=port)
    try:
        yield server
    finally:
        await server.close()


class RegistryProcess:
    """`baton registry` as its users run it."""

    def __init__(self, port: int = 0, *options: str) -> None:
        words = [sys.executable, "-m", "baton", "registry", "--port", str(port), *options]
        environment = {**os.environ, "BATON_SECRET": SECRET.decode()}
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        self.url = self.line.rpartition(" ")[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal; the exit code and what was written to stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, errors


class Answer:
    """A status, a body and the headers of an answer."""

    def __init__(self, status: int, body: bytes, headers: Any) -> None:
        self.status = status
        self.body = body
        self.headers = headers

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


async def ask(server: RegistryServer, method: str, target: str, body: bytes = b"", **more: Any) -> Answer:
    """One request; signed now, unless `header` says otherwise (None: without)."""
    header = more.get("header", "")
    if header == "":
        header = sign(SECRET, (method, target, body), time.time(), secrets.token_hex(16))
    headers = {} if header is None else {"Authorization": header}
    async with aiohttp.ClientSession() as session:
        url = URL(server.url + target, encoded=True)
        async with session.request(method, url, data=body or None, headers=headers) as response:
            return Answer(response.status, await response.read(), response.headers)


async def put(server: RegistryServer, value: Member) -> Answer:
    target = f"/v1/members/{value.instance}/{value.rank}"
    return await ask(server, "PUT", target, msgspec.json.encode(value))
