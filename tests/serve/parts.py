"""One part of a deployment: a `baton` command as a process, with a port, an output and an end."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from tests.faults.stages import is_alive

from baton.cli.deployment import serve_modules
from baton.fork_server import FORK_SERVERS, ForkedProcess, SpawnRequest, die_with
from baton.settings import Tls, rank_environment

if TYPE_CHECKING:
    from tests.serve.hosts import Host

START_S_MAX = 180.0
"""For a process that loads torch and a model while seven others do the same on two cores."""
END_S_MAX = 60.0
ANSWER_S_MAX = 120.0


def until(
    holds: Callable[[], Any],
    what: str | Callable[[], object],
    timeout_s: float = START_S_MAX,
    every_s: float = 0.1,
) -> Any:
    """Waits for a condition of other processes, and returns what it found; `what` it is, or how it stands."""
    limit_s = monotonic() + timeout_s
    while not (found := holds()):
        if monotonic() > limit_s:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what() if callable(what) else what}")
        time.sleep(every_s)
    return found


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back over HTTP."""

    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        """The body, where it is JSON."""
        return json.loads(self.body)

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()


def ask(
    url: str,
    path: str,
    body: Any = None,
    key: str | None = None,
    method: str | None = None,
    *,
    wait_s: float = ANSWER_S_MAX,
    tls: Tls | None = None,
) -> Answer:
    """One request on a connection of its own: GET, or POST of `body` as JSON (bytes go as they are)."""
    where = urlsplit(url)
    host, port = str(where.hostname), where.port
    connection = http.client.HTTPConnection(host, port, timeout=wait_s)
    if where.scheme == "https":
        context = None if tls is None else tls.dialling()
        connection = http.client.HTTPSConnection(host, port, timeout=wait_s, context=context)
    raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    if raw is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(), dict(response.getheaders()))
    finally:
        connection.close()


def children(pid: int) -> list[int]:
    """Pids of a process's living children."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in thread.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(child for child in found if is_alive(child))


def is_rank(pid: int) -> bool:
    """Whether it is a living rank process, by its name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("baton rank") and is_alive(pid)
    except (FileNotFoundError, ProcessLookupError):
        return False


class Part:
    """A command of Baton that serves HTTP; its output goes to a file, and no test outlives it unseen."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        port: int,
        folder: Path,
        module: str = "baton",
        *,
        tls: Tls | None = None,
        host: Host | None = None,
    ) -> None:
        self.name = name
        self.words = [sys.executable, "-m", module, *words, "--port", str(port)]
        self.tls = tls
        self.host = host
        """Where it runs, if not on this machine's loopback."""
        if tls is not None:
            self.words += ["--tls-cert", tls.certificate, "--tls-key", tls.key, "--tls-ca", tls.authority]
        if host is not None:
            self.words += ["--host", host.address]
        self.port = port
        address = "127.0.0.1" if host is None else host.address
        self.url = f"{'http' if tls is None else 'https'}://{address}:{port}"
        self.log = folder / f"{name}.log"
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.environment.pop("BATON_SECRET", None)
        self.environment.pop("BATON_API_KEY", None)
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.num_starts = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *raised: object) -> None:
        self.end()

    def start(self) -> Self:
        """Starts it, also again on the same port; `wait` waits until it is able to serve."""
        assert not self.is_alive, f"{self.name} runs already"
        self.num_starts += 1
        begin = partial(die_with, os.getpid()) if self.host is None else self.host.enter
        with self.log.open("ab") as log:
            if self.host is None and self.words[2:4] == ["baton", "serve"]:
                # As `baton up` starts it: most of the time of a start would be imports.
                request = SpawnRequest(
                    f"baton {self.name}", "baton.__main__", tuple(self.words[3:]), self.environment
                )
                server = FORK_SERVERS.get(rank_environment(1), serve_modules(self.option("model")))
                self.process = server.run(request, log.fileno())
                return self
            self.process = subprocess.Popen(
                self.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                preexec_fn=begin,  # noqa: PLW1509 - a few system calls, no lock taken
                start_new_session=True,
            )
        return self

    def wait(self, timeout_s: float = START_S_MAX) -> Self:
        """Until it has said where it is, and its /health is 200."""
        until(lambda: self._settled(self.said), f"{self.name} says where it is", timeout_s)
        until(lambda: self._settled(lambda: self.is_healthy), f"{self.name} is healthy", timeout_s)
        return self

    def _settled(self, holds: Callable[[], Any]) -> Any:
        assert self.is_alive, f"{self.name} ended with {self.code}\n{self.told()}"
        return holds()

    @property
    def pid(self) -> int:
        """Of the process itself."""
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def code(self) -> int | None:
        """How it ended."""
        return None if self.process is None else self.process.poll()

    @property
    def is_healthy(self) -> bool:
        """Whether /health answers 200 now, and a router has what it needs to hand over."""
        try:
            reply = self.ask("/health")
            return reply.status == 200 and b'"degraded"' not in reply.body
        except (OSError, http.client.HTTPException):
            return False

    def option(self, name: str) -> str:
        """What it was started with."""
        return self.words[self.words.index(f"--{name}") + 1]

    @property
    def rank_pids(self) -> list[int]:
        """Of its rank processes."""
        return [pid for cradle in children(self.pid) for pid in children(cradle) if is_rank(pid)]

    def ask(self, path: str, body: Any = None, key: str | None = None, method: str | None = None) -> Answer:
        """One request to it, from a client on its host."""
        if self.host is None:
            return ask(self.url, path, body, key, method, tls=self.tls)
        assert method is None, "GET, or POST where there is a body"
        answer = self.host.ask(self.url, path, body, key)
        if not answer.status:
            raise OSError(answer.text)
        return answer

    def metric(self, name: str, key: str | None = None) -> float:
        """The sum of all samples of a metric, whatever their labels."""
        lines = self.ask("/metrics", key=key).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{.*\}})? ", line))

    def said(self) -> str:
        """The line with its URL, once it is there."""
        lines = [line for line in self.output.splitlines() if line.rstrip("/").endswith(self.url)]
        return lines[self.num_starts - 1] if len(lines) >= self.num_starts else ""

    @property
    def output(self) -> str:
        """All that it wrote, to both streams."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def told(self, num_lines: int = 60) -> str:
        """The end of its output, for a failure."""
        lines = [line for line in self.output.splitlines() if "GET /health" not in line][-num_lines:]
        return f"--- {self.name} ({' '.join(self.words[3:])})\n" + "\n".join(lines)

    def send(self, number: int = signal.SIGTERM) -> None:
        """A signal to it alone."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.send(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(END_S_MAX)

    def end(self, number: int = signal.SIGTERM) -> int | None:
        """A signal and the exit code; one that does not end within a minute is killed."""
        if self.process is None:
            return None
        if self.is_alive:
            self.send(number)
        try:
            return self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.returncode
