"""Child processes that do not outlive their parent."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from baton.engine.fork_server import die_with
from baton.errors import EngineError

ANSWER_S_MAX = 180.0
END_S_MAX = 10.0
MARK = b"baton "


class Child:
    """A process with a pipe each way; it hears of its parent's end by the pipe, and is killed by it."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self.process = subprocess.Popen(
            # Each process has work for one core; a pool of threads in every one only gets in the way.
            ["env", "OMP_NUM_THREADS=1", sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            preexec_fn=partial(die_with, os.getpid()),  # noqa: PLW1509 - two system calls, no lock taken
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
        )
        self._read = b""

    @property
    def pid(self) -> int:
        """Of the process itself: `env` becomes it."""
        return self.process.pid

    def tell(self, words: Any) -> None:
        """One line to the child."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(words).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def line(self, timeout_s: float = ANSWER_S_MAX) -> bytes:
        """The next line that it prints."""
        assert self.process.stdout is not None
        limit_s = monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.process.stdout, select.POLLIN)
        while b"\n" not in self._read:
            if not poller.poll(max(0.0, limit_s - monotonic()) * 1000):
                raise EngineError(f"{self.name} said nothing for {timeout_s:.0f} s; {self._last_words()}")
            part = os.read(self.process.stdout.fileno(), 1 << 20)
            if not part:
                raise self._lost()
            self._read += part
        found, _, self._read = self._read.partition(b"\n")
        return found

    def told(self, timeout_s: float = ANSWER_S_MAX) -> Any:
        """The next answer; libraries may print between answers."""
        limit_s = monotonic() + timeout_s
        while not (found := self.line(max(0.0, limit_s - monotonic()))).startswith(MARK):
            pass
        return json.loads(found.removeprefix(MARK))

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, to a process that may be gone."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """Ends it at once, stopped or not."""
        self.process.kill()
        self.process.wait(END_S_MAX)

    def await_end(self, timeout_s: float) -> bool:
        """Whether it ended by itself in time."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def hang_up(self) -> None:
        """Closes the pipe to it, on which it ends by itself."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Lets it end, and makes it if it does not."""
        self.hang_up()
        try:
            self.process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()

    def _lost(self) -> EngineError:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S_MAX)
        return EngineError(f"{self.name} ended (exit code {self.process.returncode}); {self._last_words()}")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"its last words: {lines[-1]}" if lines else "it left no message"
