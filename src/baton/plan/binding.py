"""A plan, a prompt, page tables and a chunk become steps.

Most pairs of ranks need a Copy alone. Where the dtype differs the bytes land in the target's staging and an
Unpack converts them; where the copies would be many and small (by `PackCost`) a Pack gathers them first.
The choice looks at shapes, not at page tables, so both ends come to the same one on their own.

Staging holds the parts of a pair one after another, each in canonical order: layer, token, unit, dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from baton.errors import ConfigError
from baton.plan.cache import Component
from baton.plan.lowering import Face, Lowered, Pieces, cut, join, lower, shape
from baton.plan.ownership import Spec, box, placements, share_stride
from baton.plan.packing import PackCost
from baton.plan.prompt import Chunk, Prompt, check_held, entries_in, num_entries, route_layers, route_strides
from baton.plan.ranges import to_ids
from baton.plan.routes import Plan, Route
from baton.plan.steps import STAGING, Copy, Pack, Spans, Step, Unpack
from baton.plan.tokens import Ints, Runs, Stride, runs

PageTables: TypeAlias = Mapping[int, Mapping[str, Ints]]
"""Page ids by rank and group."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The page tables of both sides, for every rank that takes part."""

    source: PageTables
    target: PageTables


@dataclass(frozen=True)
class Part:
    """What one route contributes to one chunk."""

    plan: Plan
    prompt: Prompt
    tables: Tables
    route: Route
    layers: Ints
    runs: Runs

    @cached_property
    def component(self) -> Component:
        """The component that the route carries."""
        return self.plan.target.cache.by_name[self.route.component]

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Units, then the dims inside one."""
        units = self.route.units[1] - self.route.units[0]
        return (units, *(dim.size for dim in self.component.dims))

    @cached_property
    def source(self) -> Face:
        """The source rank's end."""
        return self._face(self.plan.source, self.route.source, "source")

    @cached_property
    def target(self) -> Face:
        """The target rank's end."""
        return self._face(self.plan.target, self.route.target, "target")

    def _face(self, spec: Spec, rank: int, side: str) -> Face:
        component = spec.cache.by_name[self.component.name]
        share = self.route.source_share if side == "source" else self.route.target_share
        held, at = box(spec, component, rank, side), placements(spec, rank, side)[component.name]
        first_unit = self.route.units[0] - held.units[0]
        local = np.searchsorted(np.array(to_ids(held.layers)), self.layers)
        stride = share_stride(spec, component, share, num_entries(self.plan, component, self.prompt))
        table = _table(
            self.tables.source if side == "source" else self.tables.target, rank, component.group, side
        )
        return Face(
            item_bytes=at.item_bytes,
            layer_offsets=at.offset + first_unit * at.stride("unit") + local * at.stride("layer"),
            slots=stride.count(self.runs.starts),
            token_stride=at.strides.get("token", 0),
            axes=(at.stride("unit"), *(at.stride(dim.name) for dim in component.dims)),
            page_entries=at.page_entries,
            page_stride=at.stride("page"),
            table=table,
        )

    def staging(self, base: int) -> Face:
        """Staging memory from `base` on, in canonical order and the wire's dtype."""
        item = self.source.item_bytes
        strides = [item]
        for extent in reversed(self.extents[1:]):
            strides.append(strides[-1] * extent)
        token_stride = strides[-1] * self.extents[0]
        lengths = self.runs.stops - self.runs.starts
        num_layers = len(self.layers)
        return Face(
            item_bytes=item,
            layer_offsets=base + np.arange(num_layers, dtype=np.int64) * (token_stride * int(lengths.sum())),
            slots=np.cumsum(lengths) - lengths,
            token_stride=token_stride,
            axes=(strides[-1], *reversed(strides[:-1])),
        )

    @cached_property
    def pieces(self) -> Pieces:
        """Tokens cut at the pages of both ends."""
        return cut(self.source, self.target, self.runs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the part on the wire."""
        return len(self.layers) * self.runs.num_tokens * int(np.prod(self.extents)) * self.source.item_bytes

    @property
    def num_spans(self) -> int:
        """Direct copies, before neighbouring pages are joined."""
        found = shape(self.source, self.target, self.extents)
        return len(self.layers) * found.num_spans(self.pieces, self.extents, self.source.page_entries)

    @property
    def dtypes(self) -> tuple[str, str]:
        """Element types at the source and at the target."""
        name = self.component.name
        source, target = self.plan.source, self.plan.target
        return (
            source.storage.dtype_of(source.cache.by_name[name]),
            target.storage.dtype_of(target.cache.by_name[name]),
        )

    @property
    def buffers(self) -> tuple[str, str]:
        """The buffers that the component lies in, at the source and at the target."""
        name = self.component.name
        return (
            placements(self.plan.source, self.route.source, "source")[name].buffer,
            placements(self.plan.target, self.route.target, "target")[name].buffer,
        )


def _table(tables: PageTables, rank: int, group: str, side: str) -> Ints:
    try:
        return tables[rank][group]
    except KeyError:
        raise ConfigError(f"no page table for group {group!r} of {side} rank {rank}") from None


def bind(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk, cost: PackCost | None = None
) -> list[Step]:
    """The steps that move one chunk of one prompt between every pair of ranks that the plan names."""
    steps: list[Step] = []
    for parts in parts_by_pair(plan, prompt, tables, chunk).values():
        steps.extend(_packed(parts) if is_packed(parts, cost or PackCost()) else unpacked(parts))
    return steps


def parts_by_pair(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk
) -> dict[tuple[int, int], list[Part]]:
    """What a chunk consists of, by source and target rank."""
    check_held(plan.target, prompt)
    pairs: dict[tuple[int, int], list[Part]] = {}
    for part in _parts(plan, prompt, tables, chunk):
        pairs.setdefault((part.route.source, part.route.target), []).append(part)
    return pairs


def is_packed(parts: list[Part], cost: PackCost) -> bool:
    """Whether a pair's copies are gathered into one; tokens that only move together are never taken apart."""
    if parts[0].plan.source.storage.granule > 1:
        return False
    num_spans = sum(part.num_spans for part in parts)
    return cost.prefers_packing(num_spans, sum(part.num_bytes for part in parts))


def _parts(plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk) -> Iterator[Part]:
    known: dict[tuple[Stride, ...], Runs] = {}
    for route in plan.routes:
        component = plan.target.cache.by_name[route.component]
        layers = route_layers(plan, route, prompt, chunk.layers)
        entries = entries_in(plan, component, prompt, chunk)
        if not layers or entries[0] >= entries[1]:
            continue
        strides = tuple(route_strides(plan, route, prompt, entries))
        if strides not in known:
            known[strides] = runs(strides)
        if len(known[strides].starts):
            ids = np.array(to_ids(layers), dtype=np.int64)
            yield Part(plan, prompt, tables, route, ids, known[strides])


def unpacked(parts: list[Part]) -> Iterator[Step]:
    """A pair's steps without packing: plain copies, and conversion at the target where the dtype differs."""
    yield from _direct([part for part in parts if part.dtypes[0] == part.dtypes[1]])
    yield from _converted([part for part in parts if part.dtypes[0] != part.dtypes[1]])


def _direct(parts: list[Part]) -> Iterator[Step]:
    together: dict[tuple[str, str], list[Lowered]] = {}
    for part in parts:
        spans = lower(part.source, part.target, part.extents, part.pieces)
        together.setdefault(part.buffers, []).extend(spans)
    ends = (parts[0].route.source, parts[0].route.target) if parts else (0, 0)
    for buffers, spans in together.items():
        yield Copy(*ends, *buffers, _joined(spans))


def _converted(parts: list[Part]) -> Iterator[Step]:
    base = 0
    for part in parts:
        staging = part.staging(base)
        base += part.num_bytes
        spans = _joined(lower(part.source, staging, part.extents, cut(part.source, staging, part.runs)))
        yield Copy(part.route.source, part.route.target, part.buffers[0], STAGING, spans)
        yield _unpack(part, staging)


def _packed(parts: list[Part]) -> Iterator[Step]:
    route = parts[0].route
    faces, base = [], 0
    for part in parts:
        faces.append(part.staging(base))
        base += part.num_bytes
    for part, staging in zip(parts, faces, strict=True):
        spans = _joined(lower(part.source, staging, part.extents, cut(part.source, staging, part.runs)))
        yield Pack(route.source, route.target, part.component.name, part.buffers[0], spans)
    whole = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.array([base], dtype=np.int64))
    yield Copy(route.source, route.target, STAGING, STAGING, Spans(*whole))
    for part, staging in zip(parts, faces, strict=True):
        yield _unpack(part, staging)


def _unpack(part: Part, staging: Face) -> Unpack:
    spans = lower(staging, part.target, part.extents, cut(staging, part.target, part.runs))
    joined = _joined(spans, staging.item_bytes, part.target.item_bytes)
    route = part.route
    return Unpack(route.source, route.target, part.component.name, part.buffers[1], joined, part.dtypes)


def _joined(parts: list[Lowered], source_item: int = 1, target_item: int = 1) -> Spans:
    if len(parts) == 1 and parts[0].is_joined:
        return parts[0].spans
    spans = [part.spans for part in parts]
    source = np.concatenate([part.source for part in spans])
    target = np.concatenate([part.target for part in spans])
    length = np.concatenate([part.length for part in spans])
    return join(Spans(source, target, length), source_item, target_item)
