"""Half-open integer ranges, sorted disjoint lists of them, and periodic sets of tokens. Without numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

Range: TypeAlias = tuple[int, int]
Ranges: TypeAlias = tuple[Range, ...]


def merged(ranges: Iterable[Range]) -> Ranges:
    """The union of `ranges`, sorted, with neighbours joined."""
    joined: list[Range] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return tuple(joined)


def from_ids(ids: Iterable[int]) -> Ranges:
    """The ranges that hold exactly `ids`."""
    return merged((i, i + 1) for i in ids)


def to_ids(ranges: Ranges) -> list[int]:
    """Every integer in `ranges`, ascending."""
    return [i for start, stop in ranges for i in range(start, stop)]


def overlap(left: Range, right: Range) -> Range | None:
    """The common part of two ranges, or None."""
    start, stop = max(left[0], right[0]), min(left[1], right[1])
    return (start, stop) if start < stop else None


def intersection(left: Ranges, right: Ranges) -> Ranges:
    """The integers in both; each input is sorted and disjoint."""
    common_ranges: list[Range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        common = overlap(left[i], right[j])
        if common:
            common_ranges.append(common)
        if left[i][1] <= right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(common_ranges)


def size(ranges: Ranges) -> int:
    """How many integers `ranges` holds."""
    return sum(stop - start for start, stop in ranges)


def even_cuts(total: int, parts: int, *, extra_first: bool) -> Ranges:
    """`total` cut into `parts` contiguous ranges whose sizes differ by at most one."""
    base, extra = divmod(total, parts)
    sizes = [base + 1] * extra + [base] * (parts - extra)
    if not extra_first:
        sizes.reverse()
    return from_sizes(sizes)


def from_sizes(sizes: Iterable[int]) -> Ranges:
    """Contiguous ranges of the given sizes, beginning at 0."""
    cuts: list[Range] = []
    start = 0
    for length in sizes:
        cuts.append((start, start + length))
        start += length
    return tuple(cuts)


def text(ranges: Ranges) -> str:
    """`0-3,8` style, inclusive, for people."""
    return ",".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in ranges) or "none"


@dataclass(frozen=True, slots=True)
class Stride:
    """Tokens t of [start, stop) with (t - phase) mod period < block."""

    start: int
    stop: int
    phase: int = 0
    block: int = 1
    period: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether every token of the interval belongs."""
        return self.block >= self.period

    def num_below(self, token: int) -> int:
        """How many members precede one token."""
        below = 0
        for sign, at in ((1, min(max(token, self.start), self.stop)), (-1, self.start)):
            periods, rest = divmod(at - self.phase, self.period)
            below += sign * (periods * self.block + min(rest, self.block))
        return below
