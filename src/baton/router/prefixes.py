"""Which beginnings of prompts an instance has seen lately.

A prompt is cut into blocks of bytes, and each block is named by a hash of itself and the name of the block
before it: two prompts share a name exactly where they are equal up to there (but for a collision, which costs
a poor choice and nothing else; the seed is random, so none can be made on purpose). An instance's names are
kept in the order of their last use, and the oldest go first.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from baton.router.asked import Prompt

BLOCK_BYTES = 256
NUM_BLOCKS_MAX = 4096
"""Of one prompt; what lies behind is not looked at."""
NUM_NAMES_MAX = 32_768
"""Of one instance."""


class Prefixes:
    """The index: bounded for each instance, and instances are dropped when they go or start anew."""

    def __init__(self, num_names_max: int = NUM_NAMES_MAX, block_bytes: int = BLOCK_BYTES) -> None:
        self._num_names_max = num_names_max
        self._block_bytes = block_bytes
        self._seed = secrets.randbits(64)
        self._seen: dict[str, OrderedDict[int, None]] = {}

    def names(self, prompt: Prompt) -> tuple[int, ...]:
        """The names of a prompt's whole blocks, first to last."""
        name = xxhash.xxh3_64_intdigest(prompt.seed, self._seed) if prompt.seed else self._seed
        raw, size = prompt.raw, self._block_bytes
        num_blocks = min(len(raw) // size, NUM_BLOCKS_MAX)
        found = []
        for start in range(0, num_blocks * size, size):
            name = xxhash.xxh3_64_intdigest(raw[start : start + size], name)
            found.append(name)
        return tuple(found)

    def matched_bytes(self, instance: str, names: Sequence[int]) -> int:
        """How much of a prompt's beginning the instance has seen."""
        seen = self._seen.get(instance)
        if not seen:
            return 0
        for index, name in enumerate(names):
            if name not in seen:
                return index * self._block_bytes
        return len(names) * self._block_bytes

    def add(self, instance: str, names: Sequence[int]) -> None:
        """The instance is given a prompt; its first block is the last to be forgotten."""
        seen = self._seen.setdefault(instance, OrderedDict())
        for name in reversed(names[: self._num_names_max]):
            seen[name] = None
            seen.move_to_end(name)
        while len(seen) > self._num_names_max:
            seen.popitem(last=False)

    def drop(self, instance: str) -> None:
        """The instance has gone, or started anew with an empty cache."""
        self._seen.pop(instance, None)

    def num_names(self, instance: str) -> int:
        """How many blocks are kept for it."""
        return len(self._seen.get(instance, ()))
