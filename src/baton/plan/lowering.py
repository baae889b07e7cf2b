"""From boxes to spans: where a route's elements lie at both ends, as few contiguous copies as possible.

Theory. A `LayerEnd` is one end of a copy of one layer: a rank's pool behind a page table, or staging memory,
which has no pages. Both ends are walked in the same logical order (tokens, unit, dims), so a stretch of
memory is one copy exactly as long as every axis inside it has the same extent at both ends and its strides
follow on without a gap. Three things decide that:

- inside a token: axes are absorbed from the innermost one outwards while both strides equal what is
  absorbed so far;
- between tokens: a run of consecutive tokens is cut where either end leaves a page, into pieces; if the
  token axis can be absorbed a piece is one stretch, otherwise each token is one;
- a whole page: if the piece fills the page at both ends, axes outside the token axis (units, in HND) may
  follow on.

What is left over is an outer sum of offsets: pieces x remaining axes. None of it depends on page ids: a span
lies at `page id x stride + offset`, and which entry of the page table that is, and the offset, are the same
for all prompts of a length. So the result is a `SpanTemplate` of one layer, made once. Filling in the page
ids and laying the spans over the layers of a chunk takes a few numpy operations; a last pass joins
neighbours that meet by luck of the page tables or across components and layers of one pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import itemgetter

import numpy as np

from baton.plan.steps import Spans
from baton.plan.tokens import Ints, Runs

FEW = 32
"""Up to this many spans plain integers are faster than arrays, whose sorting also lets other threads run."""


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """One layer at one end of a copy; `slots` holds the first slot of every run of tokens.

    `page_entries` is 0 where memory has no pages.
    """

    item_bytes: int
    slots: Ints
    token_stride: int
    axes: tuple[int, ...]
    page_entries: int = 0
    page_stride: int = 0


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Consecutive tokens that lie in one page at both ends: first slots and counts."""

    source: Ints
    target: Ints
    count: Ints

    def where(self, keep: np.ndarray) -> _Pieces:
        return _Pieces(self.source[keep], self.target[keep], self.count[keep])

    def single_tokens(self) -> _Pieces:
        first = np.repeat(np.cumsum(self.count) - self.count, self.count)
        step = np.arange(len(first), dtype=np.int64) - first
        ones = np.ones(len(first), dtype=np.int64)
        return _Pieces(
            np.repeat(self.source, self.count) + step, np.repeat(self.target, self.count) + step, ones
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Elements of a stretch and the axes left over, for part of a page and for a whole one."""

    is_token_joined: bool
    elements: int
    rest: tuple[int, ...]
    page_elements: int
    page_rest: tuple[int, ...]


def _cut(source: LayerEnd, target: LayerEnd, runs: Runs) -> _Pieces:
    """Runs cut where either end leaves a page."""
    lengths = runs.stops - runs.starts
    first = np.cumsum(lengths) - lengths
    marks = [first, *(_page_marks(end, first, lengths) for end in (source, target) if end.page_entries)]
    at = np.sort(np.concatenate(marks))
    at = at[np.append(True, at[1:] != at[:-1])]
    run = np.searchsorted(first, at, side="right") - 1
    inside = at - first[run]
    count = np.diff(at, append=lengths.sum())
    return _Pieces(source.slots[run] + inside, target.slots[run] + inside, count)


def _page_marks(end: LayerEnd, first: Ints, lengths: Ints) -> Ints:
    """Positions along the runs at which a new page begins."""
    page = end.page_entries
    before = end.slots // page
    crossings = (end.slots + lengths - 1) // page - before
    run = np.repeat(np.arange(len(first)), crossings)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(crossings) - crossings, crossings) + 1
    return np.asarray(first[run] + (before[run] + nth) * page - end.slots[run], dtype=np.int64)


def _shape(source: LayerEnd, target: LayerEnd, extents: tuple[int, ...]) -> _Shape:
    """What can be joined along the axes of a token, the token axis and a whole page."""
    axes = tuple(axis for axis, extent in enumerate(extents) if extent > 1)
    elements, rest = _absorb(source, target, extents, axes, 1)
    is_joined = (source.token_stride, target.token_stride) == (
        elements * source.item_bytes,
        elements * target.item_bytes,
    )
    if not is_joined or source.page_entries != target.page_entries:
        return _Shape(is_joined, elements, rest, elements, rest)
    page_elements, page_rest = _absorb(source, target, extents, rest, elements * source.page_entries)
    return _Shape(True, elements, rest, page_elements, page_rest)


def _absorb(
    source: LayerEnd, target: LayerEnd, extents: tuple[int, ...], axes: tuple[int, ...], elements: int
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


def count_spans(source: LayerEnd, target: LayerEnd, extents: tuple[int, ...], runs: Runs) -> int:
    """The spans of one layer before neighbours are joined: the length of its template, without making it."""
    shape, count = _shape(source, target, extents), _cut(source, target, runs).count
    per_piece = prod(extents[axis] for axis in shape.rest)
    if not shape.is_token_joined:
        return int(count.sum()) * per_piece
    num_pages = int(np.count_nonzero(count == source.page_entries)) if source.page_entries else 0
    per_page = prod(extents[axis] for axis in shape.page_rest)
    return num_pages * per_page + (len(count) - num_pages) * per_piece


@dataclass(frozen=True, slots=True, eq=False)
class LayerOffsets:
    """Where layers begin at both ends."""

    source: Ints
    target: Ints
    source_step_min: int
    """The least distance from one layer to the next at the source."""

    @staticmethod
    def of(source: Ints, target: Ints) -> LayerOffsets:
        """The offsets of at least one layer."""
        steps = source[1:] - source[:-1]
        return LayerOffsets(source, target, int(steps.min()) if len(steps) else 0)


@dataclass(frozen=True, slots=True, eq=False)
class TemplateEnd:
    """Where the spans of one layer lie at one end; `pages` indexes the page table, None: no pages."""

    pages: Ints | None
    offsets: Ints
    page_stride: int

    def fill(self, table: Ints | None) -> Ints:
        """Byte offsets under a page table, as if the layer began at byte 0."""
        if self.pages is None:
            return self.offsets
        assert table is not None, "memory with pages has a page table"
        filled: Ints = table[self.pages] * self.page_stride + self.offsets
        return filled

    def over(self, layer_offsets: Ints) -> TemplateEnd:
        """The same of layers that begin at these bytes."""
        pages = None if self.pages is None else np.tile(self.pages, len(layer_offsets))
        return TemplateEnd(pages, (layer_offsets[:, None] + self.offsets).ravel(), self.page_stride)


@dataclass(frozen=True, slots=True, eq=False)
class SpanTemplate:
    """The spans of one layer that begins at byte 0, page ids left open."""

    source: TemplateEnd
    target: TemplateEnd
    length: Ints
    item_bytes: tuple[int, int]

    def __len__(self) -> int:
        return len(self.length)

    def fill(self, source_table: Ints | None, target_table: Ints | None) -> Spans:
        """The spans under page tables, in no order, neighbours not joined."""
        source = self.source.fill(source_table)
        is_one_end = self.target is self.source
        return Spans(source, source if is_one_end else self.target.fill(target_table), self.length)

    def over(self, offsets: LayerOffsets) -> SpanTemplate:
        """A template of all layers, as if they were one."""
        source = self.source.over(offsets.source)
        target = source if self.target is self.source else self.target.over(offsets.target)
        return SpanTemplate(source, target, np.tile(self.length, len(offsets.source)), self.item_bytes)


def make_template(source: LayerEnd, target: LayerEnd, extents: tuple[int, ...], runs: Runs) -> SpanTemplate:
    """The spans of one layer; whole pages may be longer stretches than parts of one."""
    shape, pieces = _shape(source, target, extents), _cut(source, target, runs)
    if not shape.is_token_joined:
        stretches = [(shape.rest, shape.elements, pieces.single_tokens())]
    elif shape.page_rest == shape.rest:
        stretches = [(shape.rest, shape.elements, pieces)]
    else:
        is_page = pieces.count == source.page_entries
        per_token = shape.page_elements // source.page_entries
        stretches = [
            (shape.page_rest, per_token, pieces.where(is_page)),
            (shape.rest, shape.elements, pieces.where(~is_page)),
        ]
    lengths = [
        np.repeat(part.count * (elements * source.item_bytes), prod(extents[axis] for axis in axes))
        for axes, elements, part in stretches
    ]
    source_end = _template_end(source, extents, [(axes, part.source) for axes, _, part in stretches])
    target_end = source_end
    if target is not source:
        target_end = _template_end(target, extents, [(axes, part.target) for axes, _, part in stretches])
    return SpanTemplate(
        source_end, target_end, np.concatenate(lengths), (source.item_bytes, target.item_bytes)
    )


def _template_end(
    end: LayerEnd, extents: tuple[int, ...], stretches: Sequence[tuple[tuple[int, ...], Ints]]
) -> TemplateEnd:
    """The outer sum of slots x remaining axes, cut into pages and offsets inside of them."""
    pages, offsets = [], []
    for axes, slots in stretches:
        page, slot = np.divmod(slots, end.page_entries) if end.page_entries else (slots, slots)
        inner = [np.arange(extents[axis], dtype=np.int64) * end.axes[axis] for axis in axes]
        offsets.append(reduce(np.add.outer, inner, slot * end.token_stride).ravel())
        pages.append(np.repeat(page, prod(extents[axis] for axis in axes)))
    has_pages = bool(end.page_entries)
    return TemplateEnd(np.concatenate(pages) if has_pages else None, np.concatenate(offsets), end.page_stride)


def stack(templates: Sequence[SpanTemplate], gaps: Sequence[tuple[int, int]]) -> SpanTemplate:
    """Templates of one layer as one; each lies these many bytes after the first at either end."""
    source = _stack_ends([template.source for template in templates], [gap for gap, _ in gaps])
    target = source
    if templates[0].target is not templates[0].source:
        target = _stack_ends([template.target for template in templates], [gap for _, gap in gaps])
    length = np.concatenate([template.length for template in templates])
    return SpanTemplate(source, target, length, templates[0].item_bytes)


def _stack_ends(ends: Sequence[TemplateEnd], gaps: Sequence[int]) -> TemplateEnd:
    pages = np.concatenate([end.pages for end in ends if end.pages is not None])
    offsets = np.concatenate([end.offsets + gap for end, gap in zip(ends, gaps, strict=True)])
    return TemplateEnd(pages, offsets, ends[0].page_stride)


@dataclass(frozen=True, slots=True)
class Lowered:
    """Spans; joined: known to be ascending and to have no neighbours."""

    spans: Spans
    is_joined: bool = False


def over_layers(layer: Spans, offsets: LayerOffsets, item_bytes: tuple[int, int]) -> Lowered:
    """The joined spans of one layer, repeated for every layer."""
    num_layers, is_one_end = len(offsets.source), layer.target is layer.source
    source = _over(layer.source, offsets.source)
    target = source if is_one_end else _over(layer.target, offsets.target)
    if num_layers == 1:
        return Lowered(Spans(source, target, layer.length), True)
    spans = Spans(source, target, np.concatenate([layer.length] * num_layers))
    # Layers that do not reach into each other are ascending as they are, and can meet at their borders alone.
    reach = int(layer.source[-1] + layer.length[-1] - layer.source[0])
    if reach != offsets.source_step_min:
        return Lowered(spans, reach < offsets.source_step_min)
    target_reach = layer.target[-1] + layer.length[-1] // item_bytes[0] * item_bytes[1] - layer.target[0]
    meets = (np.diff(offsets.source) == reach) & (np.diff(offsets.target) == target_reach)
    return Lowered(spans, not meets.any())


def _over(starts: Ints, layer_offsets: Ints) -> Ints:
    return starts + layer_offsets if len(layer_offsets) == 1 else (layer_offsets[:, None] + starts).ravel()


def merge(parts: Sequence[Lowered], source_item: int = 1, target_item: int = 1) -> Spans:
    """The spans of several parts as one set, neighbours joined."""
    if len(parts) == 1 and parts[0].is_joined:
        return parts[0].spans
    if len(parts) == 1:
        return join(parts[0].spans, source_item, target_item)
    spans = [part.spans for part in parts]
    source = np.concatenate([part.source for part in spans])
    target = np.concatenate([part.target for part in spans])
    length = np.concatenate([part.length for part in spans])
    return join(Spans(source, target, length), source_item, target_item)


def join(spans: Spans, source_item: int = 1, target_item: int = 1) -> Spans:
    """Neighbours at both ends joined; the spans come back ascending by source offset.

    Spans from one end to itself, with one array for both, come back with one array.
    """
    if len(spans) < 2:
        return spans
    if len(spans) <= FEW:
        return _join_few(spans, source_item, target_item)
    source, target, length = spans.source, spans.target, spans.length
    is_one_end = target is source
    # Methods: the functions of numpy cost as much again on a small chunk.
    if (source[1:] < source[:-1]).any():
        order = source.argsort(kind="stable")
        source, length = source[order], length[order]
        target = source if is_one_end else target[order]
    is_new = source[:-1] + length[:-1] != source[1:]
    if not is_one_end:
        reached = length if source_item == target_item else length // source_item * target_item
        is_new |= target[:-1] + reached[:-1] != target[1:]
    if is_new.all():
        return Spans(source, target, length)
    starts = np.concatenate([[0], is_new.nonzero()[0] + 1])
    source = source[starts]
    target = source if is_one_end else target[starts]
    return Spans(source, target, np.add.reduceat(length, starts))


def _join_few(spans: Spans, source_item: int, target_item: int) -> Spans:
    """The same with plain integers."""
    rows = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    joined: list[list[int]] = []
    source_end = target_end = -1
    for source, target, length in sorted(rows, key=itemgetter(0)):
        if (source, target) == (source_end, target_end):
            joined[-1][2] += length
        else:
            joined.append([source, target, length])
        source_end, target_end = source + length, target + length // source_item * target_item
    columns = [np.array(column, dtype=np.int64) for column in zip(*joined, strict=True)]
    if spans.target is spans.source:
        columns[1] = columns[0]
    return Spans(*columns)
