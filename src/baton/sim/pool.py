"""The pages of one rank: their bytes, and the owner of each page at this moment.

An owner is the positive `tag` of an attempt. A page is overwritten with junk when it is given back, so that a
copy which still reads it copies junk.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from baton.errors import EngineError
from baton.plan.execution import Bytes
from baton.plan.ownership import Spec, buffers, page_spaces, space_sizes
from baton.plan.tokens import Ints
from baton.sim.content import SIDE, page_bases, pages_needed, pages_of_bytes
from baton.sim.families import TOKENS_MAX

FREE = 0
BALLAST = -1
GAP = -2
"""Bytes of a buffer that belong to no page."""
JUNK = 0xA5


class PagePool:
    """A rank's buffers, and the owner of every page of every page space."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.memory: dict[str, Bytes] = {
            name: np.full(size, JUNK, dtype=np.uint8) for name, size in buffers(spec, rank, SIDE).items()
        }
        self.spaces = page_spaces(spec, rank)
        sizes = space_sizes(spec, rank)
        # The last one is for bytes of no page, which have the number -1.
        self.owner = np.zeros(sum(sizes.values()) + 1, dtype=np.int64)
        self.owner[-1] = GAP
        self.num_pages = dict(sizes)
        """By page space, without those that other work has taken away."""
        self.num_writes = {name: np.zeros(len(raw), dtype=np.int64) for name, raw in self.memory.items()}
        self._free = {space: list(range(size)) for space, size in sizes.items()}

    def can_take(self, wanted: Mapping[str, int]) -> bool:
        together = Counter[str]()
        for group, count in wanted.items():
            together[self.spaces[group]] += count
        return all(len(self._free[space]) >= count for space, count in together.items())

    def take(self, wanted: Mapping[str, int], tag: int, rng: random.Random) -> dict[str, Ints]:
        """Allocates pages for an owner, scattered or in order."""
        tables: dict[str, Ints] = {}
        bases = page_bases(self.spec, self.rank)
        for group, count in sorted(wanted.items()):
            free = self._free[self.spaces[group]]
            if rng.random() < 0.5:
                rng.shuffle(free)
            ids = [free.pop() for _ in range(count)]
            tables[group] = np.array(ids, dtype=np.int64)
            pages = tables[group] + bases[group]
            if (self.owner[pages] != FREE).any():
                raise EngineError(f"a free page of group {group} on rank {self.rank} has an owner")
            self.owner[pages] = tag
            self._reset_counts(pages)
        return tables

    def give_back(self, group: str, ids: Iterable[int], tag: int) -> None:
        """Frees pages of an owner and overwrites them with junk."""
        base = page_bases(self.spec, self.rank)[group]
        for page in ids:
            if self.owner[base + page] != tag:
                raise EngineError(
                    f"page {page} of group {group} on rank {self.rank} is owned by "
                    f"{self.owner[base + page]}, not by {tag} which gives it back"
                )
            self.owner[base + page] = FREE
            self._free[self.spaces[group]].append(page)
            for name, owners in pages_of_bytes(self.spec, self.rank).items():
                self.memory[name][owners == base + page] = JUNK

    def fill(self, share: float, rng: random.Random) -> None:
        """Takes a share of the pages away for good, as other work would; room for one prompt stays."""
        bases = page_bases(self.spec, self.rank)
        for space, free in sorted(self._free.items()):
            total = space_sizes(self.spec, self.rank)[space]
            room = sum(_room(self.spec, group) for group, other in self.spaces.items() if other == space)
            spare = total - min(int(total * share), total - room)
            rng.shuffle(free)
            gone, self._free[space] = free[spare:], free[:spare]
            self.num_pages[space] -= len(gone)
            self.owner[np.array(gone, dtype=np.int64) + bases[space]] = BALLAST

    def owners(self) -> list[int]:
        """The owners that hold a page, sorted."""
        return sorted(set(self.owner[self.owner > FREE].tolist()))

    def num_dirty_bytes(self) -> int:
        """Bytes of free pages that were written after they were given back, and of gaps between pages."""
        is_clean = (self.owner == FREE) | (self.owner == GAP)
        return sum(
            int(np.count_nonzero(self.memory[name][is_clean[pages]] != JUNK))
            for name, pages in pages_of_bytes(self.spec, self.rank).items()
        )

    def owners_of(self, name: str, index: Ints) -> Ints:
        """The owners of these bytes of a buffer."""
        return np.asarray(self.owner[pages_of_bytes(self.spec, self.rank)[name][index]])

    def _reset_counts(self, pages: Ints) -> None:
        for name, owners in pages_of_bytes(self.spec, self.rank).items():
            self.num_writes[name][np.isin(owners, pages)] = 0


def _room(spec: Spec, group: str) -> int:
    return max(pages_needed(spec, rank, TOKENS_MAX).get(group, 0) for rank in range(spec.layout.num_ranks))
