"""What a target knows has landed.

Chunks are rectangles of layers x tokens, cut by the source as it likes. For every pair of ranks the plan says
which cells matter (`Need`). A pair is complete when each needed cell landed exactly once: overlap is an error
when it happens, and since overlaps are out, counting the area is enough to know that nothing is missing.
Neighbours are joined as they come, so that chunks in any sensible order leave few rectangles to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from baton.errors import RemoteProtocolError
from baton.protocol.machine import replace

Range: TypeAlias = tuple[int, int]
Pair: TypeAlias = tuple[int, int]
"""Source rank, target rank."""


@dataclass(frozen=True, slots=True)
class Need:
    """Of these layers, every token from `start` on."""

    layers: Range
    start: int

    def box(self, num_tokens: int) -> Rectangle:
        """The cells of a prompt that it means."""
        return Rectangle(self.layers, (self.start, num_tokens))


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A chunk: layers x tokens."""

    layers: Range
    tokens: Range

    def common(self, other: Rectangle) -> Rectangle | None:
        """What both cover."""
        layers = (max(self.layers[0], other.layers[0]), min(self.layers[1], other.layers[1]))
        tokens = (max(self.tokens[0], other.tokens[0]), min(self.tokens[1], other.tokens[1]))
        if layers[0] >= layers[1] or tokens[0] >= tokens[1]:
            return None
        return Rectangle(layers, tokens)

    def joined(self, other: Rectangle) -> Rectangle | None:
        """Both as one, if they are neighbours along a whole side."""
        if self.layers == other.layers and (tokens := _joined(self.tokens, other.tokens)):
            return Rectangle(self.layers, tokens)
        if self.tokens == other.tokens and (layers := _joined(self.layers, other.layers)):
            return Rectangle(layers, self.tokens)
        return None

    def without(self, other: Rectangle) -> tuple[Rectangle, ...]:
        """What the other does not cover, in up to four parts."""
        common = self.common(other)
        if common is None:
            return (self,)
        parts = (
            Rectangle((self.layers[0], common.layers[0]), self.tokens),
            Rectangle(common.layers, (self.tokens[0], common.tokens[0])),
            Rectangle(common.layers, (common.tokens[1], self.tokens[1])),
            Rectangle((common.layers[1], self.layers[1]), self.tokens),
        )
        return tuple(part for part in parts if part.area)

    @property
    def area(self) -> int:
        """Cells; none if either range is empty."""
        return max(0, self.layers[1] - self.layers[0]) * max(0, self.tokens[1] - self.tokens[0])


class Ledger(msgspec.Struct, frozen=True):
    """Needs, what landed of them, and how many cells are missing, by pair."""

    num_tokens: int
    needs: Mapping[Pair, tuple[Need, ...]]
    landed: Mapping[Pair, tuple[Rectangle, ...]]
    missing: Mapping[Pair, int]

    @staticmethod
    def empty(num_tokens: int, needs: Mapping[Pair, tuple[Need, ...]]) -> Ledger:
        """Nothing has landed yet."""
        areas = {pair: sum(need.box(num_tokens).area for need in wanted) for pair, wanted in needs.items()}
        return Ledger(num_tokens, needs, {}, {pair: area for pair, area in areas.items() if area})

    @property
    def is_full(self) -> bool:
        """Whether every needed cell of every pair landed."""
        return not self.missing

    def lacks(self, source_rank: int) -> tuple[Pair, ...]:
        """The pairs of a source rank that miss something."""
        return tuple(sorted(pair for pair in self.missing if pair[0] == source_rank))

    def entered(self, pair: Pair, chunk: Rectangle) -> Ledger:
        """The ledger with one chunk more; raises if it is out of bounds or some needed cell landed before."""
        if (
            not 0 <= chunk.tokens[0] < chunk.tokens[1] <= self.num_tokens
            or chunk.layers[0] >= chunk.layers[1]
        ):
            raise RemoteProtocolError(f"chunk {chunk.layers} x {chunk.tokens} is not of this prompt")
        wanted = self._wanted(pair, chunk)
        before = self.landed.get(pair, ())
        for part in wanted:
            if any(part.common(other) for other in before):
                raise RemoteProtocolError(
                    f"ranks {pair}: layers {part.layers} x tokens {part.tokens} came twice"
                )
        if not wanted:
            return self
        missing = dict(self.missing)
        left = missing.pop(pair) - sum(part.area for part in wanted)
        if left:
            missing[pair] = left
        for part in wanted:
            before = _with(before, part)
        return replace(self, landed={**self.landed, pair: before}, missing=missing)

    def _wanted(self, pair: Pair, chunk: Rectangle) -> list[Rectangle]:
        needed = (need.box(self.num_tokens) for need in self.needs.get(pair, ()))
        return [part for part in (chunk.common(need) for need in needed) if part is not None]


def join_boxes(boxes: Iterable[Rectangle]) -> tuple[Rectangle, ...]:
    """Disjoint rectangles, joined where they are neighbours along a whole side."""
    joined: tuple[Rectangle, ...] = ()
    for box in boxes:
        joined = _with(joined, box)
    return joined


def _joined(first: Range, second: Range) -> Range | None:
    if first[1] == second[0] or second[1] == first[0]:
        return min(first[0], second[0]), max(first[1], second[1])
    return None


def _with(boxes: tuple[Rectangle, ...], part: Rectangle) -> tuple[Rectangle, ...]:
    """Disjoint rectangles and one more, joined while that can be done."""
    for index, box in enumerate(boxes):
        if (both := box.joined(part)) is not None:
            return _with(boxes[:index] + boxes[index + 1 :], both)
    return (*boxes, part)
