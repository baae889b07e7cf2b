"""What a target turned away, counted by whichever thread did."""

from __future__ import annotations

import threading

from baton.transport.base import Counters


class Tally:
    """Counters that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_strangers = 0
        self._num_writes_refused = 0

    def add_stranger(self) -> None:
        """Somebody without a live invitation came."""
        with self._lock:
            self._num_strangers += 1

    def add_refused_write(self) -> None:
        """An invited peer tried to write what it may not."""
        with self._lock:
            self._num_writes_refused += 1

    def counters(self) -> Counters:
        """The counts so far."""
        with self._lock:
            return Counters(self._num_strangers, self._num_writes_refused)
