"""Virtual time: a heap of things to do, done one after another in one thread."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Entry:
    """One thing to do; without `act` it was cancelled."""

    act: Callable[..., None] | None
    args: tuple[Any, ...]

    def cancel(self) -> None:
        """Has it not done; harmless when it was."""
        self.act = None


class Schedule:
    """What happens when; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, Entry]] = []
        self._num_added = 0

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> Entry:
        """Has something done at a time, or now if that is past."""
        entry = Entry(act, args)
        self._num_added += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._num_added, entry))
        return entry

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> Entry:
        """Has something done so much later."""
        return self.at(self.now + delay_s, act, *args)

    def step(self) -> bool:
        """Does the next thing; false if there is none."""
        while self._heap:
            time_s, _, entry = heapq.heappop(self._heap)
            if entry.act is None:
                continue
            self.now = time_s
            self.num_done += 1
            entry.act(*entry.args)
            return True
        return False
