"""Processes of our own to measure: each is known by the line it prints, and ended by its pid."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from baton.engine.fork_server import interrupt_with
from baton.errors import EngineError

START_S_MAX = 300.0
END_S_MAX = 45.0
LOOK_S = 0.1
TAIL_LINES = 12


def free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def baton(*words: str) -> list[str]:
    """The command line of one of our own verbs."""
    return [sys.executable, "-m", "baton", *words]


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class Child:
    """One process; its output goes to a file."""

    def __init__(self, name: str, words: Sequence[str], folder: Path) -> None:
        self.name = name
        self._output = folder / f"{name}.log"
        with self._output.open("wb") as file:
            self._process = subprocess.Popen(
                list(words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=partial(interrupt_with, os.getpid()),  # noqa: PLW1509  (two system calls, no locks)
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def text(self) -> str:
        """All that it has said."""
        return self._output.read_text(errors="replace")

    def cpu_s(self) -> float:
        """Processor time of all of its threads so far; 0 where the system does not say."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def check(self) -> None:
        """Raises if it has ended."""
        code = self._process.poll()
        if code is not None:
            tail = " / ".join(self.text().splitlines()[-TAIL_LINES:])
            raise EngineError(f"{self.name} ended with {code} before it was ready: {tail}")

    def wait_word(self, words: str) -> str:
        """The URL behind these words, once the process has printed them."""
        until_s = monotonic() + START_S_MAX
        while monotonic() < until_s:
            for line in self.text().splitlines():
                before, found, rest = line.partition(words)
                if found and not before.strip():
                    return rest.split()[0]
            self.check()
            sleep(LOOK_S)
        raise EngineError(f"{self.name} did not print {words!r} within {START_S_MAX:g} s")

    def wait_health(self, url: str) -> None:
        """Returns once /health is 200."""
        until_s = monotonic() + START_S_MAX
        while monotonic() < until_s:
            if _is_healthy(url):
                return
            self.check()
            sleep(LOOK_S)
        raise EngineError(f"{self.name} at {url} was not ready within {START_S_MAX:g} s")

    def end(self) -> None:
        """Asks it to end, and ends it where it does not."""
        for number, wait_s in ((signal.SIGTERM, END_S_MAX), (signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
            if self._process.poll() is not None:
                return
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)


class Nursery:
    """The processes of one measurement, ended with it, the last one first."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="baton-bench-")
        self.folder = Path(self._folder.name)
        self.children: list[Child] = []
        self.secret = secrets.token_hex(32)
        self.secret_file = self.folder / "secret"
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(self.secret)

    def start(self, name: str, words: Sequence[str]) -> Child:
        """Starts one more."""
        child = Child(f"{name}-{len(self.children)}", words, self.folder)
        self.children.append(child)
        return child

    def registry(self) -> str:
        """A registry of our own; its URL."""
        words = baton("registry", "--port", "0", "--secret-file", str(self.secret_file))
        return self.start("registry", words).wait_word("registry at ")

    def close(self) -> None:
        """Ends all."""
        for child in reversed(self.children):
            child.end()
        self.children.clear()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
