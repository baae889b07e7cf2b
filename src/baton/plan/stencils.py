"""Spans with their page ids left open: cut once for a chunk of prompts of one length, filled in for each.

What a part moves depends on the page tables in one way only: a span lies at `page id x stride + rest`, and
which entry of the table that is and what the rest is are the same for every prompt of a length. Filling a
stencil in is a few operations over its spans, where finding the spans anew takes many small steps. Large
chunks are left to those: there the copies take longer than either, and stencils would take the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from baton.plan.ends import End, PageTables, Tables
from baton.plan.lowering import Face, Pieces, Stretches, cut, join, stretches
from baton.plan.parts import Part
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


def stencil(parts: Sequence[Part], giver: str, taker: str) -> Stencil | None:
    """The stencil of parts that share their buffers; None where it would be large."""
    if sum(part.num_spans for part in parts) > SPANS_MAX:
        return None
    edges, lengths = [], []
    for part in parts:
        first, second, length = _cut_out(part, giver, taker)
        edges.append((first, second))
        lengths.append(length)
    found = Stencil(tuple(edges), np.concatenate(lengths))
    return found if len(found) <= SPANS_MAX else None


def _cut_out(part: Part, giver: str, taker: str) -> tuple[Edge, Edge, Ints]:
    """Layers x pieces x what is left of the axes, for either end, and the lengths."""
    faces = (part.face(giver), part.face(taker))
    extents = part.fixed.extents
    found = stretches(*faces, extents, cut(*faces, part.runs))
    lengths = []
    for each in found:
        repeats = int(np.prod([extents[axis] for axis in each.axes], dtype=np.int64))
        lengths.append(np.repeat(each.pieces.count * (each.elements * faces[0].item_bytes), repeats))
    edges = []
    for side, face, is_giver in ((giver, faces[0], True), (taker, faces[1], False)):
        end: End = getattr(part.fixed, side)
        entries, rest = _one_layer(face, extents, found, is_giver)
        layers: Ints = getattr(part.carried.layers, side)[part.layers[0] : part.layers[1]]
        edges.append(
            Edge(
                end,
                np.tile(entries, len(layers)),
                (layers[:, None] + rest).ravel(),
                part.num_pages(side),
            )
        )
    return edges[0], edges[1], np.tile(np.concatenate(lengths), part.num_layers)


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


def cutting(parts: Sequence[Part], giver: str, taker: str) -> Cutting | None:
    """The cutting of parts that go from buffer to buffer; None where a stencil would be large."""
    together: dict[tuple[str, str], list[Part]] = {}
    for part in parts:
        named = dict(zip(("source", "target"), part.buffers, strict=True))
        together.setdefault((named[giver], named[taker]), []).append(part)
    found: list[tuple[tuple[str, str], Stencil]] = []
    for buffers, shared in together.items():
        one = stencil(shared, giver, taker)
        if one is None:
            return None
        alike = next((other for _, other in found if _is_alike(one, other)), one)
        found.append((buffers, alike))
    return Cutting(tuple(found), {part.component.name: part.num_bytes for part in parts})


def _is_alike(one: Stencil, other: Stencil) -> bool:
    """Whether two stencils become the same spans, whatever the tables."""
    if len(one.edges) != len(other.edges) or not np.array_equal(one.length, other.length):
        return False
    pairs = [pair for edges in zip(one.edges, other.edges, strict=True) for pair in zip(*edges, strict=True)]
    return all(
        (first.end.rank, first.end.group, first.end.at.stride("page"))
        == (second.end.rank, second.end.group, second.end.at.stride("page"))
        and np.array_equal(first.entries, second.entries)
        and np.array_equal(first.rest, second.rest)
        for first, second in pairs
    )
