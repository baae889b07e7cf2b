"""What a wrapper waits with: the system's clock, or one that stands until it is told to move.

An action that is due is done by a thread, which the kernel wakes up to 50 us late, and which takes another 50
to wake somebody else. An alarm is a file descriptor that the kernel itself makes readable, so that whoever
sleeps on it is woken within 15 to 40 us of its time.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

Action: TypeAlias = Callable[[], None]
_Due: TypeAlias = tuple[float, int, Action]


_TIMER_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm(Protocol):
    """A file descriptor that is readable from a certain time on."""

    def set(self, when_s: float) -> None:
        """Forgets the time that was set, readable or not, for another; infinite is never."""

    def fileno(self) -> int:
        """The descriptor."""

    def close(self) -> None:
        """Gives the descriptor back."""


class Time(Protocol):
    """A clock, and things to do when it shows a certain time."""

    def now_s(self) -> float:
        """Seconds since some moment; never goes back."""

    def call_at(self, when_s: float, action: Action) -> None:
        """Acts once, from any thread, and not before that time; the action may not block."""

    def alarm(self) -> Alarm:
        """A new alarm."""


class SystemTime:
    """The monotonic clock; one thread sleeps until the next action is due, from the first one on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_open = True

    def now_s(self) -> float:
        """The monotonic clock."""
        return time.monotonic()

    def call_at(self, when_s: float, action: Action) -> None:
        """Acts on the thread; after `close`, never."""
        with self._changed:
            if not self._is_open:
                return
            heapq.heappush(self._due, (when_s, next(self._numbers), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif self._due[0][2] is action:
                self._changed.notify()

    def alarm(self) -> KernelAlarm:
        """A timer of the kernel."""
        return KernelAlarm()

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


class KernelAlarm:
    """A timerfd on the monotonic clock; Python has none before 3.13."""

    def __init__(self) -> None:
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # the values of TFD_NONBLOCK and TFD_CLOEXEC
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, when_s: float) -> None:
        """Rings at this time, at once if it has passed."""
        when_ns = 0 if when_s == math.inf else max(1, math.ceil(when_s * 1e9))
        # Two timespecs: the interval, none, and the first time; zero turns the timer off.
        setting = (ctypes.c_long * 4)(0, 0, when_ns // 10**9, when_ns % 10**9)
        if _libc.timerfd_settime(self._fd, _TIMER_ABSOLUTE, setting, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        """The timer."""
        return self._fd

    def close(self) -> None:
        """Gives the timer back."""
        os.close(self._fd)


class VirtualTime:
    """Stands still until `advance`; for tests and simulation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now_s = 0.0
        self._due: list[_Due] = []
        self._numbers = itertools.count()

    def now_s(self) -> float:
        """Seconds advanced so far."""
        return self._now_s

    def call_at(self, when_s: float, action: Action) -> None:
        """Acts on the thread that advances, also when the time has passed already."""
        with self._lock:
            heapq.heappush(self._due, (when_s, next(self._numbers), action))

    def alarm(self) -> VirtualAlarm:
        """An alarm that rings when this time is advanced."""
        return VirtualAlarm(self)

    def advance(self, to_s: float) -> None:
        """Moves to a time, doing what is due on the way, each thing at its own time."""
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
    """An eventfd that a virtual time makes readable."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_set = 0
        self._has_rung = False

    def set(self, when_s: float) -> None:
        """Rings when this time is reached, at once if it has passed."""
        with self._lock:
            self._num_set += 1
            number = self._num_set
            if self._has_rung:
                os.eventfd_read(self._fd)
            self._has_rung = False
        if when_s <= self._time.now_s():
            self._ring(number)
        elif when_s < math.inf:
            self._time.call_at(when_s, lambda: self._ring(number))

    def fileno(self) -> int:
        """The eventfd."""
        return self._fd

    def close(self) -> None:
        """Gives the eventfd back."""
        with self._lock:
            self._num_set += 1  # nothing that was set before rings any more
            os.close(self._fd)

    def _ring(self, number: int) -> None:
        with self._lock:
            if number == self._num_set:
                self._has_rung = True
                os.eventfd_write(self._fd, 1)
