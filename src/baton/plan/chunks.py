"""A plan for one prompt: the part of each chunk that a pair of ranks moves, as spans.

Theory. Copies wait while a rank binds, so every intermediate result is cached by what it depends on: a
`PlacedRoute` by plan, a `PromptRoute` by plan and prompt length, a `RouteChunk` by chunk of such prompts.
None of them depends on page tables. Neither do the spans of one layer while page ids are left open
(`lowering`): K and V, the next layers of the same tokens and other pairs of ranks share one template. Only
page ids are filled in for each request, and the spans of one layer are repeated over the layers of the chunk.

In staging the components of a chunk lie one after another, each in canonical order: layer, token, unit, dims.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.lowering import (
    LayerEnd,
    LayerOffsets,
    Lowered,
    SpanTemplate,
    count_spans,
    join,
    make_template,
    merge,
    over_layers,
    stack,
)
from baton.plan.ownership import END, Spec, box, placements
from baton.plan.ranges import Stride, to_ids
from baton.plan.routes import (
    Chunk,
    Plan,
    Prompt,
    Route,
    check_held,
    entries_in,
    route_layers,
    route_strides,
    wanted,
)
from baton.plan.steps import CONVERT, DIRECT, PACK, STAGING, Copy, Pack, PackCost, Spans, Unpack
from baton.plan.storage import Placement
from baton.plan.tokens import Ints, Runs, count_below, runs

PLANS_MAX = 64
BOUND_PLANS_MAX = 256
KEPT_MAX = 1 << 10
RUNS_MAX = 256
TEMPLATE_SPANS_MAX = 1 << 14
"""Spans of all templates that one bound plan keeps; a larger template is made again for every chunk."""
LAYER_SPANS_MAX = 1 << 14
"""Spans that one bound plan keeps with page ids filled in."""
SMALL_SPANS_MAX = 256
"""Up to this many spans a template of all layers of a chunk is kept, beside that of one."""

Value = TypeVar("Value")

Pair: TypeAlias = tuple[int, int]
"""A source rank and a target rank."""

PageTables: TypeAlias = Mapping[int, Mapping[str, Ints]]
"""Page ids by rank and group."""

Gathers: TypeAlias = dict[str, tuple[str, Spans]]
"""By component: a buffer (or staging), and the spans that gather a chunk from it in canonical order."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The page tables of both sides, for every rank that takes part."""

    source: PageTables
    target: PageTables


class PlanKey:
    """A plan as the key of a cache, by identity: comparing two plans walks over all their routes."""

    __slots__ = ("plan",)

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __hash__(self) -> int:
        return id(self.plan)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlanKey) and other.plan is self.plan


# Routes with their ends: once for a plan.


@dataclass(frozen=True)
class RouteEnd:
    """One rank's end of a route; `layer_offsets` says where the first unit of each layer begins."""

    side: str
    rank: int
    group: str
    at: Placement
    axes: tuple[int, ...]
    layer_offsets: Ints

    @cached_property
    def geometry(self) -> Hashable:
        """Equal where one layer lies alike, whatever the tokens and the pages."""
        at = self.at
        # The side says which of the strides the slots are counted by.
        token_stride = at.strides.get("token", 0)
        return (self.side, at.item_bytes, token_stride, at.page_entries, at.stride("page"), self.axes)

    @property
    def paging(self) -> Hashable:
        """Equal where the same entries of the same table give pages at the same places."""
        return (self.group, self.at.item_bytes, self.at.page_entries, self.at.stride("page"))

    def layer(self, owned: Stride, token_runs: Runs) -> LayerEnd:
        """One layer that begins at byte 0."""
        return LayerEnd(
            item_bytes=self.at.item_bytes,
            slots=count_below(owned, token_runs.starts),
            token_stride=self.at.strides.get("token", 0),
            axes=self.axes,
            page_entries=self.at.page_entries,
            page_stride=self.at.stride("page"),
        )

    def table(self, tables: PageTables, num_pages: int) -> Ints:
        """The page table; raises ConfigError where it is missing or too short."""
        try:
            table = tables[self.rank][self.group]
        except KeyError:
            raise ConfigError(
                f"no page table for group {self.group!r} of {self.side} rank {self.rank}"
            ) from None
        if num_pages > len(table):
            raise ConfigError(
                f"the page table for group {self.group!r} of {self.side} rank {self.rank} has {len(table)} "
                f"pages, {num_pages} are needed"
            )
        return table


@dataclass(frozen=True)
class PlacedRoute:
    """A route with its two ends."""

    plan: Plan
    route: Route

    @cached_property
    def component(self) -> Component:
        """The component that the route carries."""
        return self.plan.target.cache.by_name[self.route.component]

    @cached_property
    def token_class(self) -> Hashable:
        """Equal for routes that carry the same tokens of any prompt."""
        route, component = self.route, self.component
        return (component.group, component.extent, route.source_share, route.target_share, route.turns)

    @cached_property
    def layer_ids(self) -> list[int]:
        """The route's layers one by one."""
        return to_ids(self.route.layers)

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Units, then the dims inside one."""
        units = self.route.units[1] - self.route.units[0]
        return (units, *(dim.size for dim in self.component.dims))

    @cached_property
    def dtypes(self) -> tuple[str, str]:
        """Element types at the source and at the target."""
        name, source, target = self.component.name, self.plan.source, self.plan.target
        return (
            source.storage.dtype_of(source.cache.by_name[name]),
            target.storage.dtype_of(target.cache.by_name[name]),
        )

    @cached_property
    def is_converted(self) -> bool:
        """Whether the element type changes on the way."""
        return self.dtypes[0] != self.dtypes[1]

    @cached_property
    def wire_item_bytes(self) -> int:
        """Bytes of one element on the wire."""
        return item_bytes(self.dtypes[0])

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one entry of one layer on the wire."""
        return prod(self.extents) * self.wire_item_bytes

    @cached_property
    def source(self) -> RouteEnd:
        """The source rank's end."""
        return self._end(self.plan.source, "source", self.route.source)

    @cached_property
    def target(self) -> RouteEnd:
        """The target rank's end."""
        return self._end(self.plan.target, "target", self.route.target)

    def _end(self, spec: Spec, side: str, rank: int) -> RouteEnd:
        component = spec.cache.by_name[self.component.name]
        held, at = box(spec, component, rank, side), placements(spec, rank, side)[component.name]
        first_unit = (self.route.units[0] - held.units[0]) * at.stride("unit")
        local = np.searchsorted(to_ids(held.layers), self.layer_ids)
        return RouteEnd(
            side=side,
            rank=rank,
            group=component.group,
            at=at,
            axes=(at.stride("unit"), *(at.stride(dim.name) for dim in component.dims)),
            layer_offsets=np.asarray(at.layer_starts(local) + first_unit, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True)
class _PairIndex:
    """The routes of a plan by pair, and the pairs of every rank, all in the plan's order."""

    routes: dict[Pair, list[PlacedRoute]]
    of_source: dict[int, list[Pair]]
    of_target: dict[int, list[Pair]]


@lru_cache(maxsize=PLANS_MAX)
def _pair_index(key: PlanKey) -> _PairIndex:
    index = _PairIndex({}, {}, {})
    for route in key.plan.routes:
        pair = (route.source, route.target)
        if pair not in index.routes:
            index.routes[pair] = []
            index.of_source.setdefault(route.source, []).append(pair)
            index.of_target.setdefault(route.target, []).append(pair)
        index.routes[pair].append(PlacedRoute(key.plan, route))
    return index


def pairs_alike(plan: Plan) -> tuple[tuple[Pair, ...], ...]:
    """Every pair of ranks that a plan names, grouped by pairs that bind to the same spans.

    In a large mesh most pairs differ in nothing but their numbers: both ends keep their components at the
    same places, and the routes take the same local layers, units, shares and turns. Given the same page
    tables, what one of them moves is what each of them moves.
    """
    return _pairs_alike(PlanKey(plan))


@lru_cache(maxsize=PLANS_MAX)
def _pairs_alike(plan_key: PlanKey) -> tuple[tuple[Pair, ...], ...]:
    plan = plan_key.plan
    known: dict[Hashable, Hashable] = {}

    def local(spec: Spec, side: str, rank: int, route: Route) -> Hashable:
        """Where a route's elements lie, without the rank's number."""
        key = (side, rank, route.component, route.layers, route.units)
        if key not in known:
            held = box(spec, spec.cache.by_name[route.component], rank, side)
            at = placements(spec, rank, side)[route.component]
            position = {layer: i for i, layer in enumerate(to_ids(held.layers))}
            layers = tuple(position[layer] for layer in to_ids(route.layers))
            units = (route.units[0] - held.units[0], route.units[1] - route.units[0])
            strides = tuple(at.strides.items())
            known[key] = (at.buffer, at.offset, strides, at.layer_offsets, layers, units)
        return known[key]

    by_pair: dict[Pair, list[Hashable]] = {}
    for route in plan.routes:
        ends = (
            local(plan.source, "source", route.source, route),
            local(plan.target, "target", route.target, route),
        )
        traits = (route.component, route.source_share, route.target_share, route.turns, ends)
        by_pair.setdefault((route.source, route.target), []).append(traits)
    alike: dict[Hashable, list[Pair]] = {}
    for pair, routes in by_pair.items():
        alike.setdefault(tuple(routes), []).append(pair)
    return tuple(tuple(pairs) for pairs in alike.values())


# Routes under a prompt, and what they carry of a chunk: once for all prompts of a length.


@dataclass(frozen=True, eq=False)
class _Entries:
    """The entries in all of `strides`: those wanted or in the chunk, both shares, and turns."""

    strides: tuple[Stride, ...]
    runs: Runs

    @cached_property
    def num_tokens(self) -> int:
        return self.runs.num_tokens


class _BoundedCache(Generic[Value]):
    """Values by key; when their sizes together would exceed a limit, all of them are dropped."""

    def __init__(self, size_max: int) -> None:
        self._size_max = size_max
        self._size = 0
        self._values: dict[Hashable, Value] = {}

    def get(
        self, key: Hashable, make: Callable[[], Value], measure: Callable[[Value], int] | None = None
    ) -> Value:
        """What `key` stands for, made if it is not there; every value has size 1 unless it is measured."""
        value = self._values.get(key)
        if value is None:
            value = make()
            size = 1 if measure is None else measure(value)
            if self._size + size > self._size_max:
                self._values.clear()
                self._size = 0
            if size <= self._size_max:
                self._values[key] = value
                self._size += size
        return value


class _Memo:
    """Values shared by the routes of one bound plan."""

    def __init__(self) -> None:
        self._strides: dict[Hashable, tuple[Stride, ...]] = {}
        self._entries = _BoundedCache[_Entries](RUNS_MAX)
        self._templates = _BoundedCache[SpanTemplate](TEMPLATE_SPANS_MAX)
        self._layer_spans = _BoundedCache[Spans](LAYER_SPANS_MAX)
        self.span_counts = _BoundedCache[int](RUNS_MAX)

    def strides(self, placed: PlacedRoute, prompt: Prompt) -> tuple[Stride, ...]:
        """The patterns whose common entries a route carries of the whole prompt."""
        known = self._strides.get(placed.token_class)
        if known is None:
            entries = wanted(placed.plan, placed.component, prompt)
            known = tuple(route_strides(placed.plan, placed.route, prompt, entries))
            self._strides[placed.token_class] = known
        return known

    def entries(self, strides: tuple[Stride, ...]) -> _Entries:
        """The common entries; the same object for the same strides."""
        return self._entries.get(strides, lambda: _Entries(strides, runs(strides)))

    def template(self, key: Hashable, make: Callable[[], SpanTemplate]) -> SpanTemplate:
        """The template that `key` stands for."""
        return self._templates.get(key, make, len)

    def layer_spans(self, template: SpanTemplate, *tables: Ints | None) -> Spans:
        """A template filled with page ids and joined: the next layers of the same tokens need it again."""
        key = (template, *(None if table is None else table.tobytes() for table in tables))
        return self._layer_spans.get(key, lambda: join(template.fill(*tables), *template.item_bytes), len)


@dataclass(frozen=True)
class PromptRoute:
    """A route for one prompt: everything that depends on neither chunks nor page tables."""

    placed: PlacedRoute
    prompt: Prompt
    memo: _Memo

    @cached_property
    def strides(self) -> tuple[Stride, ...]:
        """The patterns whose common entries the route carries of the whole prompt."""
        return self.memo.strides(self.placed, self.prompt)

    @cached_property
    def layers(self) -> tuple[Sequence[int], Ints, Ints]:
        """The layers that the route carries, and where they begin at the source and at the target.

        What has no tokens is dealt over mirrors by layers.
        """
        placed = self.placed
        ends = (placed.source.layer_offsets, placed.target.layer_offsets)
        if placed.component.extent.has_tokens or placed.route.turns.period == 1:
            return (placed.layer_ids, *ends)
        ids = to_ids(route_layers(placed.plan, placed.route, self.prompt, (0, END)))
        index = np.searchsorted(placed.layer_ids, ids)
        return (ids, ends[0][index], ends[1][index])

    @cached_property
    def num_bytes(self) -> int:
        """The bytes on the wire that the route carries of the whole prompt."""
        num_tokens = self.memo.entries(self.strides).num_tokens
        return len(self.layers[0]) * num_tokens * self.placed.token_bytes

    @property
    def first_token(self) -> int:
        """The first token without which the route is not complete; a state needs the last one."""
        has_tokens = self.placed.component.extent.has_tokens
        return self.strides[0].start if has_tokens else self.prompt.num_tokens - 1

    def cut(self, chunk: Chunk) -> RouteChunk | None:
        """What the route carries of a chunk, if anything."""
        ids, *offsets = self.layers
        first, last = bisect_left(ids, chunk.layers[0]), bisect_left(ids, chunk.layers[1])
        start, stop = entries_in(self.placed.plan, self.placed.component, self.prompt, chunk)
        if first >= last or start >= stop:
            return None
        entries = self.memo.entries((Stride(start, stop), *self.strides[1:]))
        if not len(entries.runs.starts):
            return None
        layers = LayerOffsets.of(*(at[first:last] for at in offsets))
        return RouteChunk(self.placed, self.memo, entries, layers)


@dataclass(frozen=True, eq=False)
class RouteChunk:
    """The part of one chunk that one route carries."""

    placed: PlacedRoute
    memo: _Memo
    entries: _Entries
    layers: LayerOffsets

    @property
    def component(self) -> str:
        """The name of the component that the route carries."""
        return self.placed.route.component

    @cached_property
    def num_bytes(self) -> int:
        """Bytes on the wire."""
        return len(self.layers.source) * self.entries.num_tokens * self.placed.token_bytes

    @property
    def num_spans(self) -> int:
        """Direct copies, before neighbours are joined."""
        ends = (self.placed.source.geometry, self.placed.target.geometry)
        key = (self.entries, self.placed.extents, ends)
        return len(self.layers.source) * self.memo.span_counts.get(key, self._count_spans)

    def _count_spans(self) -> int:
        ends = (self._layer_end("source"), self._layer_end("target"))
        return count_spans(*ends, self.placed.extents, self.entries.runs)

    def end(self, side: str) -> RouteEnd:
        """The route's end at the `source` or at the `target`."""
        return self.placed.source if side == "source" else self.placed.target

    def buffer(self, side: str) -> str:
        """The buffer that the component lies in at one side."""
        return self.end(side).at.buffer

    def owned(self, side: str) -> Stride:
        """The entries that the rank of one side owns; its slots count them."""
        return self.entries.strides[1 if side == "source" else 2]

    @cached_property
    def num_pages(self) -> dict[str, int]:
        """How long the page table of either side has to be."""
        last = int(self.entries.runs.stops[-1])
        return {
            side: -(-self.owned(side).num_below(last) // self.end(side).at.page_entries)
            for side in ("source", "target")
        }

    def staged_spans(self, tables: Tables, from_side: str, to_side: str, base: int = 0) -> Spans:
        """The spans between `source` or `target` and `staging`, there from `base` on; neighbours joined."""
        template = self.template(from_side, to_side)
        layer = self.memo.layer_spans(template, self.table(tables, from_side), self.table(tables, to_side))
        lowered = over_layers(layer, self.offsets(from_side, to_side, base), template.item_bytes)
        return merge([lowered], self._item_bytes(from_side), self._item_bytes(to_side))

    def _item_bytes(self, side: str) -> int:
        return self.placed.target.at.item_bytes if side == "target" else self.placed.wire_item_bytes

    def table(self, tables: Tables, side: str) -> Ints | None:
        """The page table of one side; staging has none."""
        if side == STAGING:
            return None
        by_rank = tables.source if side == "source" else tables.target
        return self.end(side).table(by_rank, self.num_pages[side])

    def offsets(self, from_side: str, to_side: str, base: int = 0) -> LayerOffsets:
        """Where the layers begin, from one of `source`, `target` and `staging` to another."""
        if (from_side, to_side) == ("source", "target"):
            return self.layers
        ends = {"source": self.layers.source, "target": self.layers.target}
        if STAGING in (from_side, to_side):
            layer_bytes = self.entries.num_tokens * self.placed.token_bytes
            ends[STAGING] = np.arange(base, base + self.num_bytes, layer_bytes, dtype=np.int64)
        return LayerOffsets.of(ends[from_side], ends[to_side])

    def template(self, from_side: str, to_side: str) -> SpanTemplate:
        """The spans of one layer, page ids left open."""
        key = (self.entries, self.placed.extents, self._geometry(from_side), self._geometry(to_side))
        return self.memo.template(key, lambda: self._make_template(from_side, to_side))

    def _geometry(self, side: str) -> Hashable:
        return self.placed.wire_item_bytes if side == STAGING else self.end(side).geometry

    def _make_template(self, from_side: str, to_side: str) -> SpanTemplate:
        source = self._layer_end(from_side)
        target = source if to_side == from_side else self._layer_end(to_side)
        return make_template(source, target, self.placed.extents, self.entries.runs)

    def _layer_end(self, side: str) -> LayerEnd:
        """One layer at the `source`, at the `target`, or in `staging` (canonical order, the wire's dtype)."""
        token_runs = self.entries.runs
        if side != STAGING:
            return self.end(side).layer(self.owned(side), token_runs)
        strides = [self.placed.wire_item_bytes]
        for extent in reversed(self.placed.extents[1:]):
            strides.append(strides[-1] * extent)
        lengths = token_runs.stops - token_runs.starts
        return LayerEnd(
            item_bytes=strides[0],
            slots=np.cumsum(lengths) - lengths,
            token_stride=self.placed.token_bytes,
            axes=tuple(reversed(strides)),
        )

    def alike(self, from_side: str, to_side: str) -> Hashable:
        """Equal for routes of one pair of ranks that lower to the same spans."""
        offsets = self.offsets(from_side, to_side)
        ends = tuple(
            (self.end(side).group, self.end(side).geometry, at.tobytes())
            for side, at in ((from_side, offsets.source), (to_side, offsets.target))
        )
        return (self.entries, self.placed.extents, ends)


@dataclass(frozen=True, eq=False)
class RouteStack:
    """Routes at fixed distances from each other in the same pages, lowered as one: fused K and V."""

    parts: tuple[RouteChunk, ...]
    from_side: str
    to_side: str

    @staticmethod
    def of(parts: Sequence[RouteChunk], from_side: str, to_side: str) -> list[RouteStack]:
        """Routes between one pair of buffers, as few stacks as possible."""
        stacks: list[list[RouteChunk]] = []
        for part in parts:
            for stacked in stacks:
                if _can_stack(stacked[0], part):
                    stacked.append(part)
                    break
            else:
                stacks.append([part])
        return [RouteStack(tuple(stacked), from_side, to_side) for stacked in stacks]

    @cached_property
    def _layers(self) -> LayerOffsets:
        return self.parts[0].offsets(self.from_side, self.to_side)

    @cached_property
    def _is_small(self) -> bool:
        return sum(part.num_spans for part in self.parts) <= SMALL_SPANS_MAX

    def lower(self, tables: Tables) -> Lowered:
        """The spans under page tables."""
        first = self.parts[0]
        page_tables = (first.table(tables, self.from_side), first.table(tables, self.to_side))
        if self._is_small:
            # One pass over the spans of all layers is cheaper than several over those of one.
            every = first.memo.template((self, "layers"), lambda: self._template().over(self._layers))
            return Lowered(every.fill(*page_tables))
        template = self._template()
        return over_layers(first.memo.layer_spans(template, *page_tables), self._layers, template.item_bytes)

    def _template(self) -> SpanTemplate:
        if len(self.parts) == 1:
            return self.parts[0].template(self.from_side, self.to_side)
        return self.parts[0].memo.template((self, "layer"), self._stack)

    def _stack(self) -> SpanTemplate:
        templates = [part.template(self.from_side, self.to_side) for part in self.parts]
        offsets = [part.offsets(self.from_side, self.to_side) for part in self.parts]
        first = offsets[0]
        gaps = [(at.source[0] - first.source[0], at.target[0] - first.target[0]) for at in offsets]
        return stack(templates, gaps)


def _can_stack(first: RouteChunk, part: RouteChunk) -> bool:
    """Whether one page table serves both, and their layers are equally far apart."""
    if part.entries is not first.entries or len(part.layers.source) != len(first.layers.source):
        return False
    ends = zip(
        (first.placed.source, first.placed.target), (part.placed.source, part.placed.target), strict=True
    )
    return all(base.paging == other.paging for base, other in ends) and all(
        np.ptp(other - base) == 0
        for base, other in (
            (first.layers.source, part.layers.source),
            (first.layers.target, part.layers.target),
        )
    )


def check_mode(routes: Iterable[PlacedRoute], mode: str) -> None:
    """Raises ConfigError where routes cannot move in a mode."""
    if mode not in (DIRECT, CONVERT, PACK):
        raise ConfigError(f"unknown mode {mode!r}; use {DIRECT}, {CONVERT} or {PACK}")
    for placed in routes:
        if mode == DIRECT and placed.is_converted:
            source, target = placed.dtypes
            raise ConfigError(
                f"component {placed.component.name} is {source} at the source and {target} at the target, "
                f"so it cannot go {DIRECT}; use {CONVERT} or {PACK}"
            )
        if mode == PACK and placed.plan.source.storage.granule > 1:
            granule = placed.plan.source.storage.granule
            raise ConfigError(f"granules of {granule} tokens are never taken apart; use {DIRECT}")


_BufferGroup: TypeAlias = tuple[tuple[str, str], list[RouteStack], int]


class PairChunk:
    """The part of one chunk that one pair of ranks moves."""

    def __init__(self, pair: Pair, parts: tuple[RouteChunk, ...]) -> None:
        self.pair = pair
        self.parts = parts
        self.num_bytes = {part.component: part.num_bytes for part in parts}
        self._groups: dict[tuple[str, str], tuple[_BufferGroup, ...]] = {}
        self._staged: dict[str, list[tuple[RouteChunk, int]]] = {}

    def mode(self, cost: PackCost) -> str:
        """The cheapest mode for these copies; tokens that only move together are never taken apart."""
        num_spans = sum(part.num_spans for part in self.parts)
        is_granular = self.parts[0].placed.plan.source.storage.granule > 1
        if not is_granular and cost.prefers_packing(num_spans, sum(self.num_bytes.values())):
            return PACK
        return CONVERT if any(part.placed.is_converted for part in self.parts) else DIRECT

    def staged(self, mode: str) -> list[tuple[RouteChunk, int]]:
        """What passes through staging, with where it begins there; raises ConfigError on a wrong mode."""
        staged = self._staged.get(mode)
        if staged is None:
            check_mode([part.placed for part in self.parts], mode)
            staged, base = [], 0
            for part in self.parts:
                if mode == PACK or part.placed.is_converted:
                    staged.append((part, base))
                    base += part.num_bytes
            self._staged[mode] = staged
        return staged

    def staging_bytes(self, mode: str) -> int:
        """The staging that the chunk needs at the target."""
        return sum(part.num_bytes for part, _ in self.staged(mode))

    def packs(self, tables: Tables) -> list[Pack]:
        """From the source's buffers into its own staging."""
        return [
            Pack(
                *self.pair,
                part.component,
                part.buffer("source"),
                part.staged_spans(tables, "source", STAGING, base),
            )
            for part, base in self.staged(PACK)
        ]

    def copies(self, tables: Tables, mode: str) -> list[Copy]:
        """From the source's memory to the target's; through staging what is packed or changes its dtype."""
        if mode == PACK:
            return [Copy(*self.pair, STAGING, STAGING, _one_span(0, 0, self.staging_bytes(PACK)))]
        staged = self.staged(mode)
        copies = [
            Copy(*self.pair, *buffers, spans)
            for buffers, spans in self.unstaged_spans(tables, "source", "target")
        ]
        copies += [
            Copy(
                *self.pair, part.buffer("source"), STAGING, part.staged_spans(tables, "source", STAGING, base)
            )
            for part, base in staged
        ]
        return copies

    def unpacks(self, tables: Tables, mode: str) -> list[Unpack]:
        """From the target's staging to its buffers, in the target's dtype."""
        return [
            Unpack(
                *self.pair,
                part.component,
                part.buffer("target"),
                part.staged_spans(tables, STAGING, "target", base),
                part.placed.dtypes,
            )
            for part, base in self.staged(mode)
        ]

    def gathers(self, tables: Tables, side: str, mode: str) -> Gathers:
        """By component: where the wire's bytes are read at one side, in canonical order.

        At the target that is staging for what passed through it.
        """
        staged = {part.component: base for part, base in self.staged(mode)} if side == "target" else {}
        return {
            part.component: (STAGING, _one_span(staged[part.component], 0, part.num_bytes))
            if part.component in staged
            else (part.buffer(side), part.staged_spans(tables, side, STAGING))
            for part in self.parts
        }

    def unstaged_spans(
        self, tables: Tables, from_side: str, to_side: str
    ) -> list[tuple[tuple[str, str], Spans]]:
        """What keeps its element type from one of `source` and `target` to another, by pair of buffers."""
        filled: list[tuple[tuple[str, str], Spans]] = []
        for buffers, stacks, first in self._by_buffers(from_side, to_side):
            if first < len(filled):
                spans = filled[first][1]
            else:
                spans = merge([stacked.lower(tables) for stacked in stacks])
            filled.append((buffers, spans))
        return filled

    def _by_buffers(self, from_side: str, to_side: str) -> tuple[_BufferGroup, ...]:
        """What shares a pair of buffers, and the first pair of buffers whose spans are the same."""
        known = self._groups.get((from_side, to_side))
        if known is None:
            together: dict[tuple[str, str], list[RouteChunk]] = {}
            for part in self.parts:
                if not part.placed.is_converted:
                    together.setdefault((part.buffer(from_side), part.buffer(to_side)), []).append(part)
            keys = [tuple(part.alike(from_side, to_side) for part in parts) for parts in together.values()]
            known = tuple(
                (buffers, RouteStack.of(parts, from_side, to_side), keys.index(key))
                for (buffers, parts), key in zip(together.items(), keys, strict=True)
            )
            self._groups[from_side, to_side] = known
        return known


def _one_span(source: int, target: int, length: int) -> Spans:
    return Spans(*(np.array([value], dtype=np.int64) for value in (source, target, length)))


class BoundPlan:
    """A plan under one prompt; made by `bound_plan`, which keeps the latest."""

    def __init__(self, plan: Plan, prompt: Prompt) -> None:
        check_held(plan.target, prompt)
        self.plan = plan
        self.prompt = prompt
        self._whole = Chunk((0, END), (0, prompt.num_tokens))
        self._index = _pair_index(PlanKey(plan))
        self._routes: dict[Pair, tuple[PromptRoute, ...]] = {}
        self._memo = _Memo()
        self._kept = _BoundedCache[Any](KEPT_MAX)

    @property
    def pairs(self) -> Iterable[Pair]:
        """Every pair that the plan names."""
        return self._index.routes

    def pairs_of_source(self, rank: int) -> Sequence[Pair]:
        """The pairs in which a rank is the source."""
        return self._index.of_source.get(rank, ())

    def pairs_of_target(self, rank: int) -> Sequence[Pair]:
        """The pairs in which a rank is the target."""
        return self._index.of_target.get(rank, ())

    def routes(self, pair: Pair) -> tuple[PromptRoute, ...]:
        """The routes of a pair; none where the plan does not name it."""
        known = self._routes.get(pair)
        if known is None:
            placed = self._index.routes.get(pair, ())
            known = tuple(PromptRoute(route, self.prompt, self._memo) for route in placed)
            self._routes[pair] = known
        return known

    def chunk(self, pair: Pair, chunk: Chunk) -> PairChunk:
        """What a pair moves of a chunk; raises ConfigError where that is no chunk of this prompt."""
        key = (pair, chunk.layers, chunk.tokens)
        known: PairChunk = self.kept(key, lambda: self._cut(pair, chunk))
        return known

    def _cut(self, pair: Pair, chunk: Chunk) -> PairChunk:
        (first, last), (start, stop) = chunk.layers, chunk.tokens
        if not (0 <= first < last and 0 <= start < stop <= self.prompt.num_tokens):
            raise ConfigError(
                f"layers {first} to {last}, tokens {start} to {stop} are no chunk of a prompt of "
                f"{self.prompt.num_tokens} tokens; both ranges have to hold something"
            )
        parts = (route.cut(chunk) for route in self.routes(pair))
        return PairChunk(pair, tuple(part for part in parts if part is not None))

    def whole(self, pair: Pair) -> PairChunk:
        """What a pair moves of the whole prompt."""
        return self.chunk(pair, self._whole)

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `key` stands for, made if it is not there; it must not depend on page tables."""
        return self._kept.get(key, make)


def bound_plan(plan: Plan, prompt: Prompt) -> BoundPlan:
    """A plan under a prompt; the same object for the same two."""
    return _bound_plan(PlanKey(plan), prompt.num_tokens, tuple(sorted(prompt.held.items())), prompt.offset)


@lru_cache(maxsize=BOUND_PLANS_MAX)
def _bound_plan(key: PlanKey, num_tokens: int, held: tuple[tuple[str, int], ...], offset: int) -> BoundPlan:
    return BoundPlan(key.plan, Prompt(num_tokens, dict(held), offset))
