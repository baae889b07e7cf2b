"""Processes that fork from a cradle, as their ancestor sees them."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

from baton.engine.rank.birth import FATE
from baton.errors import EngineError

_LIBRARIES = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH", "CUDA", "HF_")
_AT_IMPORT = ("LD_", "PYTHON", *_LIBRARIES)
"""What begins so is read while libraries are imported: who starts with another value needs another cradle."""
_CRADLES_MAX = 2
END_S_MAX = 1.0
_KILLED = -signal.SIGKILL
"""The exit code of who went with the cradle."""


def ended(name: str, code: int | None, errors: IO[bytes]) -> EngineError:
    """That a process ended, with its last words."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    words = f"its last words: {lines[-1]}" if lines else "it left no message"
    return EngineError(f"{name} ended (exit code {code}); {words}")


class Kin:
    """A forked process; what is asked of it is as with `subprocess.Popen`."""

    def __init__(self, cradle: Cradle, fate: int) -> None:
        self._cradle = cradle  # it ends when nobody needs it, and takes everybody with it
        self._fate = fate
        self._lock = threading.Lock()
        self.returncode: int | None = None
        found = self._told()
        if found is None:
            raise cradle.lost()
        self.pid = found
        self._handle = os.pidfd_open(self.pid)

    def __del__(self) -> None:
        """Lets go of what shows its fate."""
        for descriptor in (self._fate, getattr(self, "_handle", -1)):
            with suppress(OSError):
                os.close(descriptor)

    def poll(self) -> int | None:
        """Its exit code if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout_s: float) -> int:
        """Its exit code; raises TimeoutExpired."""
        poller = select.poll()
        poller.register(self._fate, select.POLLIN)
        if self.returncode is None and not poller.poll(timeout_s * 1e3):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        with self._lock:
            if self.returncode is None:
                told = self._told()
                self.returncode = _KILLED if told is None else told
            return self.returncode

    def kill(self) -> None:
        """Ends it at once, if it has not ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _told(self) -> int | None:
        raw = os.read(self._fate, FATE.size)
        return FATE.unpack(raw)[0] if raw else None


class Cradle:
    """A cradle of one environment, as its parent sees it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "baton.engine.rank.cradle", str(theirs.fileno()), str(os.getpid())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """Whether ranks can still fork from it."""
        return self._process.poll() is None

    def __del__(self) -> None:
        """Nobody needs it."""
        self.close()

    def close(self) -> None:
        """Ends it, even while it imports, and whoever forked from it with it."""
        self._control.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        self._errors.close()

    def bear(self, pipe: int, errors: int) -> Kin:
        """One more process; it has copies of both descriptors."""
        fate, theirs = os.pipe()
        try:
            with suppress(ConnectionError):  # it is gone, which its silence tells
                socket.send_fds(self._control, [b"\0"], [pipe, errors, theirs])
        finally:
            os.close(theirs)
        return Kin(self, fate)

    def lost(self) -> EngineError:
        """That nothing can fork from it, with its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        return ended("the process that ranks fork from", self._process.returncode, self._errors)


class Nursery:
    """The cradles of this process, one for each environment."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cradles: dict[frozenset[tuple[str, str]], Cradle] = {}

    def cradle(self, environment: dict[str, str]) -> Cradle:
        """One for processes of this environment."""
        key = frozenset(each for each in environment.items() if each[0].startswith(_AT_IMPORT))
        with self._lock:
            found = self._cradles.pop(key, None)
            if found is None or not found.is_alive:
                found = Cradle(environment)
            self._cradles[key] = found
            while len(self._cradles) > _CRADLES_MAX:
                del self._cradles[next(iter(self._cradles))]
            return found

    def close(self) -> None:
        """Ends them all, so that nothing outlives this process even for a moment."""
        with self._lock:
            for cradle in self._cradles.values():
                cradle.close()
            self._cradles.clear()


NURSERY = Nursery()
atexit.register(NURSERY.close)
