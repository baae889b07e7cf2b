"""From boxes to spans: where a route's elements lie on both ends, as few contiguous copies as there are.

Theory. A face is one end of a copy: a rank's pool behind a page table, or staging memory, which is a pool
with one endless page. Along a route both faces are walked in the same logical order (layer, tokens, unit,
dims), so a stretch of memory is one copy exactly as long as every axis inside it has the same extent at
both ends and its strides follow on without a gap. Three things decide that:

- inside a token: axes are absorbed from the innermost one outwards while both strides equal what is
  absorbed so far;
- between tokens: a run of consecutive tokens is cut where either end leaves a page, into pieces; if the
  token axis can be absorbed a piece is one stretch, otherwise each token is one;
- a whole page: if the piece fills the page at both ends, axes outside the token axis (units, in HND) may
  follow on.

What is left over is an outer sum of offsets: layers x pieces x remaining axes, by numpy. A last pass joins
neighbours that meet by luck of the page tables or across components and layers of one pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import itemgetter

import numpy as np

from baton.plan.steps import Spans
from baton.plan.tokens import Ints, Runs

FEW = 32
"""Up to this many spans plain integers are faster than arrays, whose sorting also lets other threads in."""


@dataclass(frozen=True, slots=True)
class Face:
    """One end of a copy of one component; `table` is None where memory has no pages."""

    item_bytes: int
    layer_offsets: Ints
    slots: Ints
    token_stride: int
    axes: tuple[int, ...]
    page_entries: int = 0
    page_stride: int = 0
    table: Ints | None = None

    def offsets(self, slots: Ints) -> Ints:
        """Byte offsets of slots within a layer."""
        if self.table is None:
            return slots * self.token_stride
        pages, rest = np.divmod(slots, self.page_entries)
        return np.asarray(self.table[pages] * self.page_stride + rest * self.token_stride, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Consecutive tokens that lie in one page at both ends: first slots and counts."""

    source: Ints
    target: Ints
    count: Ints

    def where(self, keep: np.ndarray) -> Pieces:
        """The pieces that a mask selects."""
        return Pieces(self.source[keep], self.target[keep], self.count[keep])

    def single_tokens(self) -> Pieces:
        """Every token a piece of its own."""
        first = np.repeat(np.cumsum(self.count) - self.count, self.count)
        step = np.arange(len(first), dtype=np.int64) - first
        ones = np.ones(len(first), dtype=np.int64)
        return Pieces(
            np.repeat(self.source, self.count) + step, np.repeat(self.target, self.count) + step, ones
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """How a route lowers, whatever the page tables: elements of a stretch, and the axes left over."""

    is_token_joined: bool
    elements: int
    rest: tuple[int, ...]
    page_elements: int
    page_rest: tuple[int, ...]

    def num_spans(self, pieces: Pieces, extents: tuple[int, ...], page_entries: int) -> int:
        """Spans of one layer before neighbouring pages are joined."""
        per_piece = int(np.prod([extents[axis] for axis in self.rest], dtype=np.int64))
        per_page = int(np.prod([extents[axis] for axis in self.page_rest], dtype=np.int64))
        if not self.is_token_joined:
            return int(pieces.count.sum()) * per_piece
        num_pages = int(np.count_nonzero(pieces.count == page_entries)) if page_entries else 0
        return num_pages * per_page + (len(pieces.count) - num_pages) * per_piece


def cut(source: Face, target: Face, runs: Runs) -> Pieces:
    """Runs cut where either end leaves a page."""
    lengths = runs.stops - runs.starts
    first = np.cumsum(lengths) - lengths
    marks = [
        first,
        *(_page_marks(face, first, lengths) for face in (source, target) if face.table is not None),
    ]
    at = np.sort(np.concatenate(marks))
    at = at[np.append(True, at[1:] != at[:-1])]
    run = np.searchsorted(first, at, side="right") - 1
    inside = at - first[run]
    count = np.diff(at, append=lengths.sum())
    return Pieces(source.slots[run] + inside, target.slots[run] + inside, count)


def _page_marks(face: Face, first: Ints, lengths: Ints) -> Ints:
    """Positions along the runs at which a new page begins."""
    page = face.page_entries
    before = face.slots // page
    crossings = (face.slots + lengths - 1) // page - before
    run = np.repeat(np.arange(len(first)), crossings)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(crossings) - crossings, crossings) + 1
    return np.asarray(first[run] + (before[run] + nth) * page - face.slots[run], dtype=np.int64)


def shape(source: Face, target: Face, extents: tuple[int, ...]) -> Shape:
    """What can be joined along the axes of a token, the token axis and a whole page."""
    axes = tuple(axis for axis, extent in enumerate(extents) if extent > 1)
    elements, rest = _absorb(source, target, extents, axes, 1)
    is_joined = (source.token_stride, target.token_stride) == (
        elements * source.item_bytes,
        elements * target.item_bytes,
    )
    if not is_joined or source.page_entries != target.page_entries:
        return Shape(is_joined, elements, rest, elements, rest)
    page_elements, page_rest = _absorb(source, target, extents, rest, elements * source.page_entries)
    return Shape(True, elements, rest, page_elements, page_rest)


def _absorb(
    source: Face, target: Face, extents: tuple[int, ...], axes: tuple[int, ...], elements: int
) -> tuple[int, tuple[int, ...]]:
    """Joins axes that follow on from `elements` at both ends; returns what is joined and what is left."""
    left = list(axes)
    while True:
        follows = [
            axis
            for axis in left
            if source.axes[axis] == elements * source.item_bytes
            and target.axes[axis] == elements * target.item_bytes
        ]
        if not follows:
            return elements, tuple(left)
        elements *= extents[follows[0]]
        left.remove(follows[0])


@dataclass(frozen=True, slots=True)
class Lowered:
    """Spans of one component of one route; joined: known to be sorted and to have no neighbours."""

    spans: Spans
    is_joined: bool = False


@dataclass(frozen=True, slots=True)
class Stretches:
    """Pieces of a token run that are one stretch of memory at either end for each place along `axes`."""

    axes: tuple[int, ...]
    elements: int
    """Of one token."""
    pieces: Pieces


def stretches(source: Face, target: Face, extents: tuple[int, ...], pieces: Pieces) -> list[Stretches]:
    """How pieces fall into stretches; whole pages may reach further than parts of one."""
    found = shape(source, target, extents)
    if not found.is_token_joined:
        return [Stretches(found.rest, found.elements, pieces.single_tokens())]
    if found.page_rest == found.rest:
        return [Stretches(found.rest, found.elements, pieces)]
    is_page = pieces.count == source.page_entries
    per_token = found.page_elements // source.page_entries
    return [
        Stretches(found.page_rest, per_token, pieces.where(is_page)),
        Stretches(found.rest, found.elements, pieces.where(~is_page)),
    ]


def lower(source: Face, target: Face, extents: tuple[int, ...], pieces: Pieces) -> list[Lowered]:
    """The spans of one component of one route; to be joined with what shares its buffers."""
    return [
        _spans(source, target, (extents, each.axes, each.elements), each.pieces)
        for each in stretches(source, target, extents, pieces)
    ]


def _spans(
    source: Face, target: Face, rest: tuple[tuple[int, ...], tuple[int, ...], int], pieces: Pieces
) -> Lowered:
    """The outer sum layers x pieces x remaining axes."""
    extents, axes, elements_per_token = rest
    source_at, target_at = source.offsets(pieces.source), target.offsets(pieces.target)
    length = pieces.count * (elements_per_token * source.item_bytes)
    within = join(Spans(source_at, target_at, length), source.item_bytes, target.item_bytes)
    sides = []
    for face, at in ((source, within.source), (target, within.target)):
        inner = [np.arange(extents[axis], dtype=np.int64) * face.axes[axis] for axis in axes]
        sides.append(reduce(np.add.outer, inner, np.add.outer(face.layer_offsets, at)).ravel())
    repeats = len(sides[0]) // max(1, len(within) * len(source.layer_offsets))
    lengths = np.tile(np.repeat(within.length, repeats), len(source.layer_offsets))
    is_joined = repeats == 1 and _has_gaps(source.layer_offsets, within)
    return Lowered(Spans(sides[0], sides[1], lengths), is_joined)


def _has_gaps(layer_offsets: Ints, within: Spans) -> bool:
    """Whether layers lie one after another at the source with room between them."""
    if not len(within):
        return True
    reach = within.source[-1] + within.length[-1] - within.source[0]
    return bool((np.diff(layer_offsets) > reach).all())


def join(spans: Spans, source_item: int = 1, target_item: int = 1) -> Spans:
    """Neighbours at both ends made one; the spans come back ascending by source offset."""
    if len(spans) < 2:
        return spans
    if len(spans) <= FEW:
        return _join_few(spans, source_item, target_item)
    source, target, length = spans.source, spans.target, spans.length
    if np.any(source[1:] < source[:-1]):
        order = np.argsort(source, kind="stable")
        source, target, length = source[order], target[order], length[order]
    reached = length if source_item == target_item else length // source_item * target_item
    is_new = (source[:-1] + length[:-1] != source[1:]) | (target[:-1] + reached[:-1] != target[1:])
    if is_new.all():
        return Spans(source, target, length)
    starts = np.concatenate([[0], np.flatnonzero(is_new) + 1])
    return Spans(source[starts], target[starts], np.add.reduceat(length, starts))


def _join_few(spans: Spans, source_item: int, target_item: int) -> Spans:
    """The same with plain integers."""
    rows = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    found: list[list[int]] = []
    source_end = target_end = -1
    for source, target, length in sorted(rows, key=itemgetter(0)):
        if (source, target) == (source_end, target_end):
            found[-1][2] += length
        else:
            found.append([source, target, length])
        source_end, target_end = source + length, target + length // source_item * target_item
    return Spans(*(np.array(column, dtype=np.int64) for column in zip(*found, strict=True)))
