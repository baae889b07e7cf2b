"""Starts the processes of RemoteEnds: forks of one that has imported what an end needs.

Such an interpreter takes 0.4 s of a core to start, and the suite wants some five hundred; a fork takes next
to nothing.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class Child:
    """A forked process, as the one that asked for it sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._handle, number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended by then."""
        return bool(select.select([self._handle], [], [], timeout_s)[0])

    def close(self) -> None:
        os.close(self._handle)


class Nursery:
    """One process for each that runs checks; it ends when that one does."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.transport.child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                start_new_session=True,
            )
        atexit.register(self._end)

    def start(self, pipe: socket.socket, *asked: Any) -> Child:
        """A child that serves an end through this pipe."""
        socket.send_fds(self._control, [json.dumps(asked).encode()], [pipe.fileno()])
        return Child(int(self._control.recv(64)))

    def _end(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def nursery() -> Nursery:
    return Nursery()
