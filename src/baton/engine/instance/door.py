"""How requests come into an instance: one after another, as long as it runs and not too many wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

from baton.engine.instance.load import Gauge
from baton.errors import EngineError, FullError

RETRY_S_MIN = 1.0


class Door:
    """Counts who came in, and says when it is over; any thread may call."""

    def __init__(self, name: str, queue_max: int) -> None:
        self._name = name
        self._queue_max = queue_max
        self._lock = threading.Lock()
        self._num_come = 0
        self._callbacks: list[Callable[[], None]] = []
        self._why_shut = ""
        self._is_over = False

    def enter(self, gauge: Gauge, come_in: Callable[[], None]) -> None:
        """Lets a request in; raises EngineError where the instance has ended, FullError where it is full."""
        with self._lock:
            if self._why_shut:
                raise EngineError(f"{self._name} is not running: {self._why_shut}")
            num_ahead = gauge.queue.num_ahead(self._num_come)
            if num_ahead >= self._queue_max > 0:
                wait_s = max(RETRY_S_MIN, gauge.load.wait_s)
                raise FullError(
                    f"{self._name} is full: {num_ahead} requests wait, at most {self._queue_max} may; "
                    f"ask again in {wait_s:.0f} s",
                    wait_s,
                )
            self._num_come += 1
            come_in()

    def shut(self, why: str) -> None:
        """From here on nobody comes in."""
        with self._lock:
            self._why_shut = why

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls back when it is over, at once if it is."""
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
                return
        callback()

    def end(self) -> None:
        """Everybody inside has heard of the end; those who asked for it hear it now."""
        with self._lock:
            self._is_over = True
        for callback in self._callbacks:
            callback()
