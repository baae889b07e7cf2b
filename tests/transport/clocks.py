"""Clocks for tests of wrappers: one with a timer thread, and one that stands until it is advanced."""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from baton.transport.throttled import Clock, SystemClock

Action: TypeAlias = Callable[[], None]
_Due: TypeAlias = tuple[float, int, Action]


class TimerClock(Clock, Protocol):
    """A clock that runs actions at a time."""

    def call_at(self, when_s: float, action: Action) -> None:
        """Runs an action once, from any thread, and not before that time; it must not block."""


class SystemTimer(SystemClock):
    """The monotonic clock; one thread sleeps until the next action is due, from the first one on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_open = True

    def call_at(self, when_s: float, action: Action) -> None:
        """Runs an action on the thread; after `close`, never."""
        with self._changed:
            if not self._is_open:
                return
            heapq.heappush(self._due, (when_s, next(self._numbers), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="timer", daemon=True)
                self._thread.start()
            elif self._due[0][2] is action:
                self._changed.notify()

    def close(self) -> None:
        """Forgets what is not due yet and ends the thread."""
        with self._changed:
            self._is_open = False
            self._due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Action | None:
        """Sleeps until an action is due; None once closed."""
        with self._changed:
            while self._is_open:
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
            return None


class VirtualClock:
    """Stands still until `advance`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._due: list[_Due] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, action: Action) -> None:
        """Runs an action on the thread that advances, even if the time has passed already."""
        with self._lock:
            heapq.heappush(self._due, (when_s, next(self._numbers), action))

    def alarm(self) -> VirtualAlarm:
        return VirtualAlarm(self)

    def advance(self, to_s: float) -> None:
        """Moves to a time and runs what is due on the way, each action at its own time."""
        while (action := self._next(to_s)) is not None:
            action()

    def _next(self, to_s: float) -> Action | None:
        with self._lock:
            if self._due and self._due[0][0] <= to_s:
                when_s, _, action = heapq.heappop(self._due)
                self._now_s = max(self._now_s, when_s)
                return action
            self._now_s = max(self._now_s, to_s)
            return None


class VirtualAlarm:
    """An eventfd that a virtual clock makes readable."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_set = 0
        self._is_readable = False

    def set(self, when_s: float) -> None:
        with self._lock:
            self._num_set += 1
            number = self._num_set
            if self._is_readable:
                os.eventfd_read(self._fd)
            self._is_readable = False
        if when_s <= self._clock.now_s():
            self._fire(number)
        elif when_s < math.inf:
            self._clock.call_at(when_s, lambda: self._fire(number))

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        with self._lock:
            self._num_set += 1  # nothing that was set before fires any more
            os.close(self._fd)

    def _fire(self, number: int) -> None:
        with self._lock:
            if number == self._num_set:
                self._is_readable = True
                os.eventfd_write(self._fd, 1)
