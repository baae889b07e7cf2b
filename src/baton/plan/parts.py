"""What one route contributes to one chunk, and the spans between the places where that lies.

Theory. Three things are kept apart by how often they change: a `PlanRoute` is found once for a plan, a
`PromptRoute` once for a prompt, a `Part` for every chunk. An end whose page tables are not given can be left
alone: what concerns the other end only is found without them.

Spans are found for one layer, as if it began at byte 0, and then laid over the layers of the chunk. K and V
nearly always lie alike, and so do the layers of the next chunk of the same tokens; `Known` keeps the spans of
one layer for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baton.plan.cache import Component
from baton.plan.ends import ONE_LAYER, End, PlanRoute, Tables
from baton.plan.lowering import Face, Lowered, Pieces, cut, join, lower, shape
from baton.plan.ownership import END
from baton.plan.prompt import Chunk, Prompt, entries_in, route_layers, route_strides, wanted
from baton.plan.ranges import Range, to_ids
from baton.plan.routes import Route
from baton.plan.steps import Spans
from baton.plan.tokens import Ints, Runs, Stride, runs

RUNS_MAX = 256
SPANS_MAX = 1 << 15


class Known:
    """What the parts of one prompt have in common, up to a limit beyond which it is found anew."""

    def __init__(self) -> None:
        self._strides: dict[Hashable, tuple[Stride, ...]] = {}
        self._runs: dict[tuple[Stride, ...], Runs] = {}
        self._spans: dict[Hashable, Spans] = {}
        self._num_spans = 0
        self._counts: dict[Hashable, int] = {}

    def strides(self, fixed: PlanRoute, prompt: Prompt) -> tuple[Stride, ...]:
        """The patterns whose common entries a route carries: what is wanted, both ends' shares, turns."""
        found = self._strides.get(fixed.token_class)
        if found is None:
            plan, entries = fixed.plan, wanted(fixed.plan, fixed.component, prompt)
            found = tuple(route_strides(plan, fixed.route, prompt, entries))
            self._strides[fixed.token_class] = found
        return found

    def runs(self, strides: tuple[Stride, ...]) -> Runs:
        """The entries that belong to every one of `strides`."""
        found = self._runs.get(strides)
        if found is None:
            if len(self._runs) >= RUNS_MAX:
                self._runs.clear()
            found = self._runs[strides] = runs(strides)
        return found

    def num_tokens(self, strides: tuple[Stride, ...]) -> int:
        """How many entries belong to every one of `strides`."""
        return self.count(strides, lambda: self.runs(strides).num_tokens)

    def count(self, key: Hashable, make: Callable[[], int]) -> int:
        """The number that `key` stands for, made if it is not there."""
        found = self._counts.get(key)
        if found is None:
            if len(self._counts) >= RUNS_MAX:
                self._counts.clear()
            found = self._counts[key] = make()
        return found

    def spans(self, key: Hashable, make: Callable[[], Spans]) -> Spans:
        """The spans that `key` stands for, made if they are not there."""
        found = self._spans.get(key)
        if found is None:
            found = make()
            self._keep(key, found)
        return found

    def _keep(self, key: Hashable, found: Spans) -> None:
        if self._num_spans + len(found) > SPANS_MAX:
            self._spans.clear()
            self._num_spans = 0
        if len(found) <= SPANS_MAX:
            self._spans[key] = found
            self._num_spans += len(found)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that a route carries, and where they begin at both ends."""

    ids: Sequence[int]
    source: Ints
    target: Ints


@dataclass(frozen=True)
class PromptRoute:
    """A route under one prompt: all that depends neither on a chunk nor on page tables."""

    fixed: PlanRoute
    prompt: Prompt
    known: Known

    @cached_property
    def strides(self) -> tuple[Stride, ...]:
        """The patterns whose common entries the route carries, for the whole prompt."""
        return self.known.strides(self.fixed, self.prompt)

    @cached_property
    def layers(self) -> Layers:
        """The layers that the route carries; what has no tokens is dealt over mirrors by layers."""
        fixed = self.fixed
        ends = (fixed.source.layer_offsets, fixed.target.layer_offsets)
        if fixed.component.extent.has_tokens or fixed.route.turns.period == 1:
            return Layers(fixed.layer_ids, *ends)
        ids = to_ids(route_layers(fixed.plan, fixed.route, self.prompt, (0, END)))
        at = np.searchsorted(fixed.layer_ids, ids)
        return Layers(ids, ends[0][at], ends[1][at])

    @cached_property
    def num_bytes(self) -> int:
        """The bytes on the wire that the route carries of the whole prompt."""
        return len(self.layers.ids) * self.known.num_tokens(self.strides) * self.fixed.token_bytes

    def part(self, tables: Tables, chunk: Chunk) -> Part | None:
        """What the route contributes to a chunk, if anything."""
        ids = self.layers.ids
        layers = (bisect_left(ids, chunk.layers[0]), bisect_left(ids, chunk.layers[1]))
        entries = entries_in(self.fixed.plan, self.fixed.component, self.prompt, chunk)
        if layers[0] >= layers[1] or entries[0] >= entries[1]:
            return None
        strides = (Stride(*entries), *self.strides[1:])
        found = self.known.runs(strides)
        return Part(self, tables, layers, strides, found) if len(found.starts) else None


@dataclass(frozen=True)
class Part:
    """What one route contributes to one chunk; `layers` counts along those that the route carries."""

    carried: PromptRoute
    tables: Tables
    layers: Range
    strides: tuple[Stride, ...]
    runs: Runs

    @property
    def fixed(self) -> PlanRoute:
        """The route with its ends."""
        return self.carried.fixed

    @property
    def route(self) -> Route:
        """The rule that the part follows."""
        return self.carried.fixed.route

    @property
    def component(self) -> Component:
        """The component that the route carries."""
        return self.carried.fixed.component

    @property
    def buffers(self) -> tuple[str, str]:
        """The buffers that the component lies in, at the source and at the target."""
        return self.fixed.source.at.buffer, self.fixed.target.at.buffer

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.layers[1] - self.layers[0]

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return self.carried.known.num_tokens(self.strides)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the part on the wire."""
        return self.num_layers * self.num_tokens * self.fixed.token_bytes

    @cached_property
    def num_spans(self) -> int:
        """Direct copies, before neighbouring pages are joined."""
        fixed = self.fixed
        key = (self.strides, fixed.extents, fixed.source.geometry, fixed.target.geometry)
        return self.num_layers * self.carried.known.count(key, self._num_spans)

    def _num_spans(self) -> int:
        found = shape(self._source, self._target, self.fixed.extents)
        return found.num_spans(self._pieces, self.fixed.extents, self._source.page_entries)

    def face(self, side: str) -> Face:
        """One layer at the `source`, at the `target`, or in `staging` (canonical order, the wire's dtype)."""
        match side:
            case "source":
                return self._source
            case "target":
                return self._target
            case _:
                return self._staging

    @cached_property
    def _source(self) -> Face:
        return self.fixed.source.face(self.tables.source, self.strides[1], self.runs)

    @cached_property
    def _target(self) -> Face:
        return self.fixed.target.face(self.tables.target, self.strides[2], self.runs)

    @cached_property
    def _staging(self) -> Face:
        strides = [self.fixed.wire_item_bytes]
        for extent in reversed(self.fixed.extents[1:]):
            strides.append(strides[-1] * extent)
        lengths = self.runs.stops - self.runs.starts
        return Face(
            item_bytes=strides[0],
            layer_offsets=ONE_LAYER,
            slots=np.cumsum(lengths) - lengths,
            token_stride=self.fixed.token_bytes,
            axes=(strides[-1], *reversed(strides[:-1])),
        )

    @cached_property
    def _pieces(self) -> Pieces:
        return cut(self._source, self._target, self.runs)

    def pages(self, side: str) -> Ints:
        """The part of one side's page table that the tokens lie in."""
        if side == "source":
            return self.fixed.source.pages(self.tables.source, self.strides[1], self.runs)
        return self.fixed.target.pages(self.tables.target, self.strides[2], self.runs)

    def num_pages(self, side: str) -> int:
        """How long one side's page table has to be."""
        if side == "source":
            return self.fixed.source.num_pages(self.strides[1], self.runs)
        return self.fixed.target.num_pages(self.strides[2], self.runs)

    def lower(self, giver: str, taker: str, base: int = 0) -> Lowered:
        """The spans from one of `source`, `target` and `staging` to another; in staging from `base` on."""
        key = (self.strides, self.fixed.extents, self._key(giver), self._key(taker))
        one = self.carried.known.spans(key, lambda: self._one_layer(giver, taker))
        layers = (self._layer_offsets(giver, base), self._layer_offsets(taker, base))
        return over_layers(one, *layers, (self._item_bytes(giver), self._item_bytes(taker)))

    def _item_bytes(self, side: str) -> int:
        return self.fixed.target.at.item_bytes if side == "target" else self.fixed.wire_item_bytes

    def _key(self, side: str) -> Hashable:
        if side == "staging":
            return self.fixed.wire_item_bytes
        end: End = getattr(self.fixed, side)
        # The side says which of the strides its slots are counted by.
        return (side, end.geometry, self.pages(side).tobytes())

    def _layer_offsets(self, side: str, base: int) -> Ints:
        if side == "staging":
            layer_bytes = self.num_tokens * self.fixed.token_bytes
            return np.arange(base, base + self.num_layers * layer_bytes, layer_bytes, dtype=np.int64)
        offsets: Ints = getattr(self.carried.layers, side)
        return offsets[self.layers[0] : self.layers[1]]

    def _one_layer(self, giver: str, taker: str) -> Spans:
        ends = (self.face(giver), self.face(taker))
        pieces = self._pieces if (giver, taker) == ("source", "target") else cut(*ends, self.runs)
        found = lower(*ends, self.fixed.extents, pieces)
        return joined(found, ends[0].item_bytes, ends[1].item_bytes)


def over_layers(one: Spans, giver: Ints, taker: Ints, items: tuple[int, int]) -> Lowered:
    """The spans of one layer repeated for layers that begin at these bytes of either end."""
    source = (giver[:, None] + one.source).ravel()
    target = (taker[:, None] + one.target).ravel()
    length = np.concatenate([one.length] * len(giver))
    reach = int(one.source[-1] + one.length[-1] - one.source[0])
    target_reach = int(one.target[-1] + one.length[-1] // items[0] * items[1] - one.target[0])
    # Layers that do not reach into each other are ascending as they are, and can meet at their borders alone.
    apart = giver[1:] - giver[:-1] - reach
    meets = (apart == 0) & (taker[1:] - taker[:-1] == target_reach)
    return Lowered(Spans(source, target, length), not ((apart < 0) | meets).any())


def joined(parts: Sequence[Lowered], source_item: int = 1, target_item: int = 1) -> Spans:
    """The spans of several parts as one set, neighbours made one."""
    if len(parts) == 1 and parts[0].is_joined:
        return parts[0].spans
    spans = [part.spans for part in parts]
    source = np.concatenate([part.source for part in spans])
    target = np.concatenate([part.target for part in spans])
    length = np.concatenate([part.length for part in spans])
    return join(Spans(source, target, length), source_item, target_item)
