"""Which tokens a rank owns, where it keeps them, and sets of tokens as periodic patterns.

Theory. Everything that selects tokens here (a context-parallel share, a mirror's share of the pages, a
window, a held prefix, a chunk) is the same thing: tokens t of an interval [start, stop) with (t - phase)
mod period < block. A hand-over's tokens are an intersection of a few of these, and an intersection of
periodic sets is periodic in the least common multiple, so it is found once, as runs of consecutive tokens,
without walking over tokens.

A rank stores what it owns densely in token order. The slot of a token is therefore the number of owned
tokens before it, which for a periodic set has the closed form `count_below`: whole periods times the block,
plus what of the last period is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.plan.ranges import Stride

Ints: TypeAlias = NDArray[np.int64]


def count_below(stride: Stride, tokens: Ints) -> Ints:
    """How many members precede each token, counting from `start`."""
    return _members_below(stride, tokens) - _members_below(stride, np.asarray(stride.start, dtype=np.int64))


def _members_below(stride: Stride, tokens: Ints) -> Ints:
    if stride.is_whole:
        return tokens
    periods, rest = np.divmod(tokens - stride.phase, stride.period)
    return np.asarray(periods * stride.block + np.minimum(rest, stride.block), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive tokens, sorted and disjoint: [starts[i], stops[i])."""

    starts: Ints
    stops: Ints

    @property
    def num_tokens(self) -> int:
        """How many tokens the runs hold together."""
        return int((self.stops - self.starts).sum())


def can_meet(left: Stride, right: Stride) -> bool:
    """Whether two patterns share a token for some length of the intervals."""
    if left.is_whole or right.is_whole:
        return True
    common = gcd(left.period, right.period)
    return (right.phase - left.phase) % common < left.block or (
        left.phase - right.phase
    ) % common < right.block


def runs(strides: Sequence[Stride]) -> Runs:
    """The tokens that belong to every one of `strides`."""
    start = max(stride.start for stride in strides)
    stop = min(stride.stop for stride in strides)
    common = _whole(start, stop)
    for stride in strides:
        if not stride.is_whole:
            common = _meet(common, _expand(stride, start, stop))
    return common


def _whole(start: int, stop: int) -> Runs:
    bounds = [(start, stop)] if start < stop else []
    pairs = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    return Runs(pairs[:, 0], pairs[:, 1])


def _expand(stride: Stride, start: int, stop: int) -> Runs:
    """The pattern's runs that touch [start, stop), clipped to it."""
    first = start - (start - stride.phase) % stride.period
    starts = np.arange(first, max(stop, first), stride.period, dtype=np.int64)
    stops = np.minimum(starts + stride.block, stop)
    starts = np.maximum(starts, start)
    keep = starts < stops
    return Runs(starts[keep], stops[keep])


def _meet(left: Runs, right: Runs) -> Runs:
    """The common runs of two sorted lists of runs."""
    first = np.searchsorted(right.stops, left.starts, side="right")
    last = np.searchsorted(right.starts, left.stops, side="left")
    counts = np.maximum(last - first, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    other = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    starts = np.maximum(left.starts[owner], right.starts[other])
    stops = np.minimum(left.stops[owner], right.stops[other])
    return Runs(starts, stops)


TokenItem: TypeAlias = tuple[int, int] | tuple[int, int, int, int]
TokenSet: TypeAlias = tuple[TokenItem, ...]


def token_set(strides: Sequence[Stride]) -> TokenSet:
    """The common tokens as a short list of (start, stop) and (start, stop, block, period)."""
    start = max(stride.start for stride in strides)
    stop = min(stride.stop for stride in strides)
    if start >= stop:
        return ()
    period = lcm(*(stride.period for stride in strides if not stride.is_whole))
    if period == 1:
        return ((start, stop),)
    # Two periods tell all: a run that `start` cuts short has no copy of itself one period on.
    common = runs([*strides, Stride(start, min(stop, start + 2 * period))])
    pairs = list(zip(common.starts.tolist(), common.stops.tolist(), strict=True))
    repeats = {a for a, _ in pairs}
    items: list[TokenItem] = []
    for a, b in pairs:
        if a >= start + period:
            break
        items.append((a, stop, b - a, period) if a + period in repeats else (a, b))
    return tuple(items)


def set_runs(items: Iterable[TokenItem]) -> Runs:
    """The runs that a token set's items spell out, sorted by start."""
    parts: list[Runs] = []
    for item in items:
        start, stop = item[0], item[1]
        block, period = (item[2], item[3]) if len(item) == 4 else (1, 1)
        parts.append(runs([Stride(start, stop, start, block, period)]))
    starts = np.concatenate([part.starts for part in parts])
    stops = np.concatenate([part.stops for part in parts])
    order = np.argsort(starts, kind="stable")
    return Runs(starts[order], stops[order])
