"""Randomness by name: what one part of the world draws does not shift what another draws."""

from __future__ import annotations

import random


class Chance:
    """Streams of random numbers that all follow from one seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, random.Random] = {}

    def of(self, name: str) -> random.Random:
        """The stream of this name."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self.seed}/{name}")
        return found


def happens(chance: random.Random, probability: float) -> bool:
    """Whether something of this probability happens now."""
    return chance.random() < probability
