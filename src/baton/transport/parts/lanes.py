"""Threads that do what they are given and sleep in between."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
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


class Waiters:
    """Threads for things that wait, as many as there were at once.

    They are kept, since who begins a thread in Python sleeps until it runs.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[Lane] = []

    @property
    def num_idle(self) -> int:
        """Threads that wait for nothing."""
        return len(self._idle)

    def put(self, action: Callable[[], None]) -> None:
        """Does something on a thread that does nothing else meanwhile; where it raises, that thread ends."""
        try:
            lane = self._idle.pop()
        except IndexError:
            lane = Lane(self._name)
        lane.put(partial(self._do, lane, action))

    def forget(self) -> None:
        """In a child of this process, which has none of the threads."""
        self._idle.clear()

    def _do(self, lane: Lane, action: Callable[[], None]) -> None:
        action()
        self._idle.append(lane)
