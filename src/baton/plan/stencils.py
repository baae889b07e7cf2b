"""Spans with their page ids left open: cut once for a chunk of prompts of one length, filled in for each.

What a part moves depends on the page tables in one way only: a span lies at `page id x stride + rest`, and
which entry of the table that is and what the rest is are the same for every prompt of a length. Filling a
stencil in is a few operations over its spans, where finding the spans anew takes many small steps. Large
chunks are left to those: there the copies take longer than either, and stencils would take the memory.

Layers lie alike too, each at an offset of its own. So a sheet is made for all layers of some tokens, of the
spans of one layer, and a group of layers is cut from it wherever an engine chooses to cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

import numpy as np

from baton.plan.ends import End, PageTables, Tables
from baton.plan.lowering import Face, Pieces, Stretches, cut, join, stretches
from baton.plan.parts import Part
from baton.plan.ranges import Range
from baton.plan.steps import Spans
from baton.plan.tokens import Ints

SPANS_MAX = 1 << 11
"""Of one stencil."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """One end of spans: which entry of the rank's page table each lies in, and where inside of that page."""

    end: End
    entries: Ints
    rest: Ints
    num_pages: int
    """How long the page table has to be."""

    def at(self, tables: PageTables) -> Ints:
        """Byte offsets under page tables; raises ConfigError where they are too short."""
        table = self.end.table(tables, self.num_pages)
        return np.asarray(table[self.entries] * self.end.at.stride("page") + self.rest, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Stencil:
    """The spans between two buffers of a pair of ranks, part by part."""

    edges: tuple[tuple[Edge, Edge], ...]
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    def fill(self, giver: PageTables, taker: PageTables) -> Spans:
        """The spans under page tables, neighbours made one."""
        if len(self.edges) == 1:
            first, second = self.edges[0]
            return join(Spans(first.at(giver), second.at(taker), self.length))
        source = np.concatenate([first.at(giver) for first, _ in self.edges])
        target = np.concatenate([second.at(taker) for _, second in self.edges])
        return join(Spans(source, target, self.length))


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """What a part moves of each of its layers: the spans of one that begins at byte 0, and the layers."""

    edges: tuple[Edge, Edge]
    length: Ints
    ids: Sequence[int]
    starts: tuple[Ints, Ints]
    """Where each of the layers begins, at either end."""
    component: str
    layer_bytes: int

    @staticmethod
    def of(part: Part, giver: str, taker: str) -> Strip:
        """Pieces x what is left of the axes, for either end, and the lengths."""
        faces = (part.face(giver), part.face(taker))
        extents = part.fixed.extents
        found = stretches(*faces, extents, cut(*faces, part.runs))
        lengths = []
        for each in found:
            repeats = int(np.prod([extents[axis] for axis in each.axes], dtype=np.int64))
            lengths.append(np.repeat(each.pieces.count * (each.elements * faces[0].item_bytes), repeats))
        edges, starts = [], []
        for side, face, is_giver in ((giver, faces[0], True), (taker, faces[1], False)):
            end: End = getattr(part.fixed, side)
            edges.append(Edge(end, *_one_layer(face, extents, found, is_giver), part.num_pages(side)))
            starts.append(getattr(part.carried.layers, side)[part.layers[0] : part.layers[1]])
        return Strip(
            (edges[0], edges[1]),
            np.concatenate(lengths),
            part.carried.layers.ids[part.layers[0] : part.layers[1]],
            (starts[0], starts[1]),
            part.component.name,
            part.num_bytes // part.num_layers,
        )

    def inside(self, layers: Range) -> Range:
        """Which of its layers lie in a range."""
        return bisect_left(self.ids, layers[0]), bisect_left(self.ids, layers[1])

    def over(self, layers: Range) -> tuple[Edge, Edge]:
        """The ends of all spans of some of its layers."""
        edges = []
        for edge, starts in zip(self.edges, self.starts, strict=True):
            at = starts[layers[0] : layers[1]]
            rest = (at[:, None] + edge.rest).ravel()
            edges.append(Edge(edge.end, np.concatenate([edge.entries] * len(at)), rest, edge.num_pages))
        return edges[0], edges[1]

    def is_alike(self, other: Strip) -> bool:
        """Whether both become the same spans, whatever the layers and the tables."""
        if self.ids != other.ids or not np.array_equal(self.length, other.length):
            return False
        pairs = zip(self.edges, other.edges, strict=True)
        starts = zip(self.starts, other.starts, strict=True)
        return all(np.array_equal(one, two) for one, two in starts) and all(
            (one.end.rank, one.end.group, one.end.at.stride("page"))
            == (two.end.rank, two.end.group, two.end.at.stride("page"))
            and np.array_equal(one.entries, two.entries)
            and np.array_equal(one.rest, two.rest)
            for one, two in pairs
        )


def _one_layer(
    face: Face, extents: tuple[int, ...], found: Sequence[Stretches], is_giver: bool
) -> tuple[Ints, Ints]:
    """Entries of the page table and offsets inside of the page, as if the layer began at byte 0."""
    entries, offsets = [], []
    for each in found:
        pages, slots = np.divmod(_slots(each.pieces, is_giver), face.page_entries)
        inner = [np.arange(extents[axis], dtype=np.int64) * face.axes[axis] for axis in each.axes]
        at = reduce(np.add.outer, inner, slots * face.token_stride).ravel()
        entries.append(np.repeat(pages, len(at) // max(1, len(pages))))
        offsets.append(at)
    return np.concatenate(entries), np.concatenate(offsets)


def _slots(pieces: Pieces, is_giver: bool) -> Ints:
    return pieces.source if is_giver else pieces.target


@dataclass(frozen=True, slots=True, eq=False)
class Cutting:
    """What a pair moves of a chunk between buffers: stencils by pair of buffers, and bytes by component."""

    stencils: tuple[tuple[tuple[str, str], Stencil], ...]
    num_bytes: dict[str, int]

    def fill(self, tables: Tables, giver: str, taker: str) -> list[tuple[tuple[str, str], Spans]]:
        """Spans by pair of buffers; where buffers lie alike they are found once."""
        ends = (getattr(tables, giver), getattr(tables, taker))
        filled: dict[int, Spans] = {}
        for _, each in self.stencils:
            if id(each) not in filled:
                filled[id(each)] = each.fill(*ends)
        return [(buffers, filled[id(each)]) for buffers, each in self.stencils]

    def ranges(self, tables: PageTables) -> dict[str, tuple[Ints, Ints]]:
        """Starts and lengths by buffer, of a cutting from one end to itself."""
        filled: dict[int, tuple[Ints, Ints]] = {}
        for _, each in self.stencils:
            if id(each) not in filled:
                starts = np.concatenate([edge.at(tables) for edge, _ in each.edges])
                spans = join(Spans(starts, starts, each.length))
                filled[id(each)] = (spans.source, spans.length)
        return {buffers[0]: filled[id(each)] for buffers, each in self.stencils}


Strips: TypeAlias = tuple[tuple[str, str], tuple[Strip, ...]]
"""Of a pair of buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class Sheet:
    """What a pair of ranks moves of all layers of some tokens."""

    strips: tuple[Strips, ...]
    twins: tuple[int, ...]
    """For each pair of buffers the first that lies like it."""

    @staticmethod
    def of(parts: Sequence[Part], giver: str, taker: str) -> Sheet | None:
        """Of parts that go from buffer to buffer; None where a single layer has too many spans."""
        if any(part.num_spans > SPANS_MAX * part.num_layers for part in parts):
            return None
        together: dict[tuple[str, str], list[Strip]] = {}
        for part in parts:
            named = dict(zip(("source", "target"), part.buffers, strict=True))
            strip = Strip.of(part, giver, taker)
            together.setdefault((named[giver], named[taker]), []).append(strip)
        strips = tuple((buffers, tuple(found)) for buffers, found in together.items())
        every = [found for _, found in strips]
        twins = (next(i for i, other in enumerate(every) if _are_alike(one, other)) for one in every)
        return Sheet(strips, tuple(twins))

    @property
    def num_spans(self) -> int:
        """Of one layer."""
        return sum(len(strip.length) for _, strips in self.strips for strip in strips)

    def cut(self, layers: Range) -> Cutting | None:
        """A group of layers; None where a stencil would be large."""
        made: dict[int, Stencil] = {}
        stencils: list[tuple[tuple[str, str], Stencil]] = []
        num_bytes: dict[str, int] = {}
        for index, (buffers, strips) in enumerate(self.strips):
            chosen = [(strip, strip.inside(layers)) for strip in strips]
            chosen = [(strip, inside) for strip, inside in chosen if inside[0] < inside[1]]
            if sum(len(strip.length) * (last - first) for strip, (first, last) in chosen) > SPANS_MAX:
                return None
            for strip, (first, last) in chosen:
                num_bytes[strip.component] = strip.layer_bytes * (last - first)
            if chosen:
                twin = self.twins[index]
                made[index] = made[twin] if twin < index else _stencil(chosen)
                stencils.append((buffers, made[index]))
        return Cutting(tuple(stencils), num_bytes)


def _stencil(chosen: Sequence[tuple[Strip, Range]]) -> Stencil:
    edges = tuple(strip.over(inside) for strip, inside in chosen)
    lengths = [strip.length for strip, (first, last) in chosen for _ in range(first, last)]
    return Stencil(edges, np.concatenate(lengths))


def _are_alike(one: Sequence[Strip], other: Sequence[Strip]) -> bool:
    return len(one) == len(other) and all(
        strip.is_alike(each) for strip, each in zip(one, other, strict=True)
    )
