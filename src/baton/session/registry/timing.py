"""When things are due: expiry times, and waits between attempts."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=tuple[object, ...])

_SLACK = 64


class Expiries(Generic[Key]):
    """Keys with a time each: a heap that skips old entries, and sweeps them when they are many."""

    def __init__(self) -> None:
        self._at: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._num_set = 0

    def set(self, key: Key, at: float) -> None:
        """The key is due at this time and at no other."""
        self._num_set += 1  # so that the heap never has to compare two keys
        self._at[key] = (at, self._num_set)
        heapq.heappush(self._heap, (at, self._num_set, key))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            self._heap = [(at, number, key) for key, (at, number) in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        """The key is not due any more, if it ever was."""
        self._at.pop(key, None)

    def pop_due(self, now: float) -> Iterator[Key]:
        """Takes out what is due, in order of time."""
        while (at := self.next()) is not None and at <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            yield key

    def next(self) -> float | None:
        """The earliest time, if there is any."""
        while self._heap:
            at, number, key = self._heap[0]
            if self._at.get(key) == (at, number):
                return at
            heapq.heappop(self._heap)
        return None


class Backoff:
    """Waits that double up to a most, each cut by chance so that many callers do not come back together."""

    def __init__(self, first_s: float, most_s: float, chance: Callable[[], float] = random.random) -> None:
        self._first_s = min(first_s, most_s)
        self._most_s = most_s
        self._chance = chance
        self._next_s = self._first_s

    def next(self) -> float:
        """The next wait: between half of it and the whole."""
        wait_s = self._next_s
        self._next_s = min(2 * wait_s, self._most_s)
        return wait_s * (1 + self._chance()) / 2

    def reset(self) -> None:
        """It worked: the next trouble begins with the first wait."""
        self._next_s = self._first_s
