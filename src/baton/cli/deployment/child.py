"""A part of a deployment as a process: what it says is read, and it does not outlive its parent."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from baton.engine.fork_server import interrupt_with

NUM_LINES_KEPT = 20
LINE_BYTES_MAX = 1 << 16


class Child:
    """One process of `baton VERB`."""

    def __init__(self, process: asyncio.subprocess.Process, say: Callable[[str], None]) -> None:
        self.process = process
        self._say = say
        self._lines: deque[str] = deque(maxlen=NUM_LINES_KEPT)
        self._reading = asyncio.create_task(self._read())

    @staticmethod
    async def start(words: list[str], environment: Mapping[str, str], say: Callable[[str], None]) -> Child:
        """Starts it; `say` is given every line that it prints."""
        parent = os.getpid()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton", *words),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=LINE_BYTES_MAX,
            preexec_fn=lambda: interrupt_with(parent),
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children in order
        )
        return Child(process, say)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet, as far as is known."""
        return self.process.returncode is None

    async def ended(self) -> int:
        """Its exit code, once everything that it said was read."""
        code = await self.process.wait()
        await asyncio.shield(self._reading)
        return code

    def signal(self, number: int) -> None:
        """Sends a signal, if it is still there."""
        if self.is_running:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def last_words(self) -> str:
        """The last line that it printed."""
        return self._lines[-1] if self._lines else "it left no message"

    async def _read(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None, "it was asked for"
        while True:
            try:
                raw = await pipe.readline()
            except ValueError:
                continue  # a line that is too long is left out
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                self._say(line)
