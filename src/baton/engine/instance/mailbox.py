"""Calls from other threads to one that sleeps in `multiprocessing.connection.wait`."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress


class Mailbox:
    """A queue with a file descriptor that wakes its reader."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """Readable when somebody called."""
        return self._reader

    def post(self, call: Callable[[], None]) -> None:
        """Has the reader make a call; any thread."""
        self._calls.append(call)
        self.wake()

    def wake(self) -> None:
        """Wakes the reader, if there still is one; a pipe that is full has woken it already."""
        with self._lock, suppress(BlockingIOError):
            if not self._is_closed:
                os.write(self._writer, b"\0")

    def clear(self) -> None:
        """For the reader: it is awake."""
        os.read(self._reader, 4096)

    def run(self) -> None:
        """For the reader: makes the calls."""
        while self._calls:
            self._calls.popleft()()

    def close(self) -> None:
        """Gives the descriptors back."""
        with self._lock:
            self._is_closed = True
            os.close(self._reader)
            os.close(self._writer)
