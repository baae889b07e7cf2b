"""Fences that need no device: ready now, or when some thread says so.

The seam for CUDA is the protocol in base.py: a fence over an event calls back from a thread that blocks in
the event's own wait, or hands the event to a transport that lets its copy stream wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class ReadyFence:
    """A fence that is ready from the start."""

    def is_ready(self) -> bool:
        """Always."""
        return True

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now."""
        callback()


NOW = ReadyFence()


class HostFence:
    """A fence that some thread of this process sets."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._callbacks: list[Callable[[], None]] = []

    def set(self) -> None:
        """Lets everything go that waits for this fence."""
        with self._lock:
            self._is_set = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_ready(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back now if set, else from the thread that sets it."""
        with self._lock:
            if not self._is_set:
                self._callbacks.append(callback)
                return
        callback()
