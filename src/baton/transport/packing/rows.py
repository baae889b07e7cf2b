"""Spans as rows of one length, and the pattern in where they lie.

Theory. Spans of one step nearly always have one length, so they are a matrix of rows that lies at one set of
offsets in the source and at another in the target. Two patterns are worth telling apart:

- nested: offsets are an outer sum of a few arithmetic sequences at both ends at once (layers x pages x
  tokens with pages in order); the whole step is then one strided copy;
- anything else (pages as the allocator gave them out): one end, mostly staging, is still a plain sequence
  once the rows are sorted by it, and the other end is picked by an index.

Lengths differ where neighbouring pages happened to be joined or where the last page is not full; then rows
are cut to a common divisor, unless that is so small that an index of it would cost more than it saves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.plan.steps import Spans
from baton.plan.tokens import Ints

ALIGNMENT_MAX = 16
"""The widest element that is moved at once."""
CUT_BYTES_MIN = 256
CUT_ROWS_MAX = 1 << 16
LENGTHS_MAX = 8
LEVELS_MAX = 6


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of `source_bytes` that become `target_bytes`, where they lie, and the span that each is of."""

    source: Ints
    target: Ints
    source_bytes: int
    target_bytes: int
    span: Ints

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class Level:
    """One arithmetic sequence of a nested pattern, with its step in bytes at either end."""

    count: int
    source_step: int
    target_step: int


def equal_rows(spans: Spans, items: tuple[int, int] = (1, 1)) -> list[Rows]:
    """The spans as few sets of rows, each of one length; `items` are the element sizes at either end."""
    which = np.arange(len(spans), dtype=np.int64)
    # Nearly always so, and much cheaper to see than to sort out.
    if len(spans) and spans.length[0] and (spans.length == spans.length[0]).all():
        return [_cut(spans, which, int(spans.length[0]), items)]
    which = np.flatnonzero(spans.length)
    lengths = np.unique(spans.length[which])
    if len(lengths) > 1:
        unit = int(np.gcd.reduce(lengths))
        num_rows = spans.num_bytes // unit
        is_fine = unit >= CUT_BYTES_MIN and num_rows <= max(CUT_ROWS_MAX, 4 * len(spans))
        if is_fine or len(lengths) > LENGTHS_MAX:
            return [_cut(spans, which, unit, items)]
    return [_cut(spans, which[spans.length[which] == length], int(length), items) for length in lengths]


def _cut(spans: Spans, which: Ints, source_bytes: int, items: tuple[int, int]) -> Rows:
    """Rows of `source_bytes` from the spans that `which` names, in their order."""
    target_bytes = source_bytes // items[0] * items[1]
    counts = spans.length[which] // source_bytes
    if (counts == 1).all():
        return Rows(spans.source[which], spans.target[which], source_bytes, target_bytes, which)
    span = np.repeat(which, counts)
    nth = np.arange(len(span), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    source = spans.source[span] + nth * source_bytes
    target = spans.target[span] + nth * target_bytes
    return Rows(source, target, source_bytes, target_bytes, span)


def blocks(rows: Rows, bytes_max: int) -> list[Rows]:
    """The rows in order, in parts of at most `bytes_max` at their wider end, or of one row."""
    count = max(1, bytes_max // max(rows.source_bytes, rows.target_bytes))
    ends = (rows.source_bytes, rows.target_bytes)
    parts = [slice(first, first + count) for first in range(0, len(rows), count)]
    return [Rows(rows.source[part], rows.target[part], *ends, rows.span[part]) for part in parts]


def nested(source: Ints, target: Ints) -> tuple[Level, ...] | None:
    """The levels, outermost first, whose sums are the offsets at both ends in this order, or None.

    Found from the inside out: the first run of equal steps is as long as the innermost level, or goes on
    through outer levels that continue it, and those continue it everywhere or nowhere.
    """
    levels: list[Level] = []
    while len(source) > 1:
        steps = (int(source[1] - source[0]), int(target[1] - target[0]))
        count = min(_run_length(source, steps[0]), _run_length(target, steps[1]))
        # torch has no negative strides, and a target step of 0 would write one place twice.
        if steps[0] < 0 or steps[1] <= 0 or len(source) % count or len(levels) == LEVELS_MAX:
            return None
        nth = np.arange(count, dtype=np.int64)
        source, target = source.reshape(-1, count), target.reshape(-1, count)
        is_source, is_target = (
            bool((offsets == offsets[:, :1] + nth * step).all())
            for offsets, step in zip((source, target), steps, strict=True)
        )
        if not (is_source and is_target):
            return None
        levels.append(Level(count, *steps))
        source, target = source[:, 0], target[:, 0]
    return tuple(reversed(levels))


def _run_length(offsets: Ints, step: int) -> int:
    """How many offsets from the first on are `step` apart."""
    breaks = np.diff(offsets) != step
    return int(breaks.argmax()) + 1 if breaks.any() else len(offsets)


def common_step(offsets: Ints) -> int:
    """The distance between ascending offsets where it is the same everywhere, else 0."""
    step = int(offsets[1] - offsets[0])
    return step if step > 0 and _run_length(offsets, step) == len(offsets) else 0


def alignment(*offsets: Ints | int) -> int:
    """The largest power of two, at most ALIGNMENT_MAX, that divides every offset."""
    bits = ALIGNMENT_MAX
    for found in offsets:
        bits |= found if isinstance(found, int) else int(np.bitwise_or.reduce(found, initial=0))
    return bits & -bits
