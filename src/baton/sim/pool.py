"""The pages of one rank: bytes, and who owns each page at this moment.

Owners are positive numbers: `tag` of a transfer at this instance. A page that nobody owns is filled with junk
when it is given back, so that whoever still reads it reads junk.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import numpy as np

from baton.errors import EngineError
from baton.plan.execution import Bytes
from baton.plan.ownership import Spec, buffers
from baton.plan.tokens import Ints
from baton.sim.catalogue import TOKENS_MAX
from baton.sim.content import SIDE, num_pages, page_bases, pages_needed, pages_of_bytes

FREE = 0
BALLAST = -1
JUNK = 0xA5


class Pool:
    """A rank's buffers, and the owner of every page of every group."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.memory: dict[str, Bytes] = {
            name: np.full(size, JUNK, dtype=np.uint8) for name, size in buffers(spec, rank, SIDE).items()
        }
        self.owner = np.zeros(num_pages(spec), dtype=np.int64)
        self.num_writes = {name: np.zeros(len(raw), dtype=np.int64) for name, raw in self.memory.items()}
        self._free = {group: list(range(spec.storage.pages_of(group))) for group in spec.cache.groups}

    def can_take(self, wanted: Mapping[str, int]) -> bool:
        """Whether so many pages of each group are free."""
        return all(len(self._free[group]) >= count for group, count in wanted.items())

    def take(self, wanted: Mapping[str, int], tag: int, chance: random.Random) -> dict[str, Ints]:
        """Pages for an owner, scattered or in order."""
        found: dict[str, Ints] = {}
        bases = page_bases(self.spec)
        for group, count in sorted(wanted.items()):
            free = self._free[group]
            if chance.random() < 0.5:
                chance.shuffle(free)
            ids = [free.pop() for _ in range(count)]
            found[group] = np.array(ids, dtype=np.int64)
            pages = found[group] + bases[group]
            if (self.owner[pages] != FREE).any():
                raise EngineError(f"a free page of group {group} on rank {self.rank} has an owner")
            self.owner[pages] = tag
            self._reset_counts(pages)
        return found

    def give_back(self, group: str, ids: Iterable[int], tag: int) -> None:
        """Frees pages of an owner and scribbles over them."""
        base = page_bases(self.spec)[group]
        for page in ids:
            if self.owner[base + page] != tag:
                raise EngineError(
                    f"page {page} of group {group} on rank {self.rank} is owned by "
                    f"{self.owner[base + page]}, not by {tag} who gives it back"
                )
            self.owner[base + page] = FREE
            self._free[group].append(page)
            for name, owners in pages_of_bytes(self.spec, self.rank).items():
                self.memory[name][owners == base + page] = JUNK

    def fill(self, share: float, chance: random.Random) -> None:
        """Takes a share of the pages away for good, leaving room for one prompt: work of others."""
        for group, free in sorted(self._free.items()):
            total = self.spec.storage.pages_of(group)
            spare = total - min(int(total * share), total - _room(self.spec, group))
            chance.shuffle(free)
            gone, self._free[group] = free[spare:], free[:spare]
            self.owner[np.array(gone, dtype=np.int64) + page_bases(self.spec)[group]] = BALLAST

    def num_free(self) -> int:
        """Free pages of all groups."""
        return sum(len(free) for free in self._free.values())

    def owned(self) -> list[int]:
        """Owners that hold a page, in order."""
        return sorted(set(self.owner[self.owner > FREE].tolist()))

    def owners_of(self, name: str, index: Ints) -> Ints:
        """Who owns these bytes of a buffer."""
        return np.asarray(self.owner[pages_of_bytes(self.spec, self.rank)[name][index]])

    def _reset_counts(self, pages: Ints) -> None:
        for name, owners in pages_of_bytes(self.spec, self.rank).items():
            self.num_writes[name][np.isin(owners, pages)] = 0


def _room(spec: Spec, group: str) -> int:
    return max(pages_needed(spec, rank, TOKENS_MAX).get(group, 0) for rank in range(spec.layout.num_ranks))
