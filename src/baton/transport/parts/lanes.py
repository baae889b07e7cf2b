"""One thread that does what it is given, in order, and sleeps in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class Lane:
    """A thread with a queue of things to do."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, action: Callable[[], None]) -> None:
        """Appends something to do."""
        self._queue.put(action)

    def close(self) -> None:
        """Does what is queued, then ends the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            action()
