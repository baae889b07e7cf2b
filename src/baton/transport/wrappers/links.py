"""A link as arithmetic: parcels cross it in order, at its speed, and are there a latency later."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False)
class Parcel:
    """Something of a size that crosses a link."""

    num_bytes: int
    ready_s: float = math.inf
    """When it could have started to cross."""
    crossed_s: float = math.inf
    """When its last byte is on the link; known once it is the first in the queue."""
    has_arrived: bool = False
    """Whether it is there in fact, and waits for its time alone."""
    is_dropped: bool = False


T = TypeVar("T", bound=Parcel)


class Link(Generic[T]):
    """Takes parcels and says when they are due; times are the caller's, and it holds no lock and no clock."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = -math.inf
        self._queue: deque[T] = deque()
        self._crossed: deque[T] = deque()

    def put(self, parcel: T, ready_s: float) -> None:
        """Appends a parcel that may cross from this time on."""
        parcel.ready_s = ready_s
        self._queue.append(parcel)
        if len(self._queue) == 1:
            self._begin_next()

    def drop(self, parcel: T, now_s: float) -> None:
        """Gives a parcel up, so that what is behind it moves up into the time that it has not used."""
        self._cross(now_s)
        parcel.is_dropped = True
        if self._queue and self._queue[0] is parcel:
            self._free_s = max(self._free_s, now_s)
            self._begin_next()

    def take_due(self, now_s: float) -> list[T]:
        """The parcels whose time has come, each once."""
        self._cross(now_s)
        due: list[T] = []
        while self._crossed and self._crossed[0].crossed_s + self._latency_s <= now_s:
            parcel = self._crossed.popleft()
            if not parcel.is_dropped:
                due.append(parcel)
        return due

    def next_due_s(self) -> float:
        """When the first of those is due that have arrived; infinite while there is none."""
        for parcel in self._crossed:
            if parcel.has_arrived and not parcel.is_dropped:
                return parcel.crossed_s + self._latency_s
        free_s = self._free_s
        for parcel in self._queue:
            if not parcel.is_dropped:
                free_s = self._time_across(parcel, free_s)
                if parcel.has_arrived:
                    return free_s + self._latency_s
        return math.inf

    def _cross(self, now_s: float) -> None:
        while self._queue and self._queue[0].crossed_s <= now_s:
            parcel = self._queue.popleft()
            self._free_s = parcel.crossed_s
            self._crossed.append(parcel)
            self._begin_next()

    def _begin_next(self) -> None:
        while self._queue and self._queue[0].is_dropped:
            self._queue.popleft()
        if self._queue:
            self._queue[0].crossed_s = self._time_across(self._queue[0], self._free_s)

    def _time_across(self, parcel: Parcel, free_s: float) -> float:
        return max(free_s, parcel.ready_s) + parcel.num_bytes / self._bytes_per_s
