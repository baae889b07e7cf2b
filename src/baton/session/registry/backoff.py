"""How long to wait before the next try."""

from __future__ import annotations

import random
from collections.abc import Callable


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
