"""Which rows a cp rank computes, and which tokens of a sequence it keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.engine.steps import Work
from baton.plan.layout import Scheme, Split
from baton.plan.ranges import Range, Ranges, even_cuts
from baton.plan.tokens import Ints, Stride

_END = 1 << 40


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a batch lie over the cp ranks: cut between them, or all on each."""

    count: int
    cuts: Ranges
    is_dealt: bool

    @property
    def sizes(self) -> list[int]:
        """Rows of each cp rank."""
        return [last - first for first, last in self.cuts]


def deal_rows(count: int, num_ranks: int) -> Rows:
    """Rows are dealt where every cp rank gets at least two; the same answer on all ranks."""
    is_dealt = num_ranks > 1 and count >= 2 * num_ranks
    cuts = even_cuts(count, num_ranks, extra_first=True) if is_dealt else ((0, count),) * num_ranks
    return Rows(count, cuts, is_dealt)


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which tokens one cp rank keeps, and in which of its slots."""

    scheme: Scheme
    index: int
    count: int
    page_tokens: int

    @property
    def is_whole(self) -> bool:
        """Whether every rank keeps every token."""
        return self.scheme.num_shares(self.count) == 1

    def kept(self, work: Work, wanted: Range) -> tuple[Ints, Ints]:
        """The kept tokens of a range of positions, and their slots."""
        positions = np.arange(*wanted, dtype=np.int64)
        if self.is_whole:
            return positions, positions
        if not isinstance(self.scheme, Split):
            return _members(self.scheme.share(self.index, self.count, _END, self.page_tokens), positions)
        share = self.scheme.share(self.index, self.count, work.prompt_tokens, self.page_tokens)
        found, slots = _members(share, positions)
        if self.index < self.count - 1:
            return found, slots
        # What is generated after a split prompt follows the last rank's own part of it.
        later = positions[positions >= work.prompt_tokens]
        after = later - work.prompt_tokens + share.num_below(work.prompt_tokens)
        return np.concatenate((found, later)), np.concatenate((slots, after))


def _members(stride: Stride, positions: Ints) -> tuple[Ints, Ints]:
    inside = (positions >= stride.start) & (positions < stride.stop)
    if not stride.is_whole:
        inside &= (positions - stride.phase) % stride.period < stride.block
    found = positions[inside]
    return found, stride.count(found)
