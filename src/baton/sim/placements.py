"""Random memory of an engine that allocated its cache itself: gaps, interleaved components, overlaid groups.

The placements follow one of two patterns. Page by page, a frame holds what all layers keep in one page; layer
by layer, a slot holds all pages of one layer. Either way there is a region that several components share, in
any order and with gaps, and the groups of a cache have regions of their own or overlay each other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.ownership import Spec, cuts
from baton.plan.ranges import to_ids
from baton.plan.storage import DeclaredPlacement

ALIGNMENT = 4
GAPS = (0, 0, 4, 8, 20)


@dataclass(frozen=True, slots=True)
class _Held:
    """What the ranks of one shard hold of a component, and how one page of one layer lies."""

    component: Component
    layers: tuple[int, ...]
    strides: dict[str, int]
    num_bytes: int


def draw_placements(rng: random.Random, spec: Spec) -> Spec:
    """The same spec in declared memory; groups that overlay each other have all their pages in common."""
    is_overlaid = len(spec.cache.groups) > 1 and rng.random() < 0.7
    if is_overlaid:
        total = sum(spec.storage.pages_of(group) for group in spec.cache.groups)
        storage = spec.storage.with_pages(dict.fromkeys(spec.cache.groups, total))
        spec = replace(spec, storage=storage)
    is_by_page = rng.random() < 0.5
    declared: list[DeclaredPlacement] = []
    num_shards = spec.layout.size("tp")
    for stage in range(spec.layout.size("pp")):
        sizes = {
            tuple(b - a for a, b in (cuts(spec, part, "pool").units[tp] for part in spec.cache.components))
            for tp in range(num_shards)
        }
        shards: Sequence[int | None] = range(num_shards)
        if len(sizes) == 1 and rng.random() < 0.5:
            shards = (None,)
        for tp in shards:
            held = [_draw_held(rng, spec, part, stage, tp) for part in spec.cache.components]
            held = [part for part in held if part.layers]
            if not held:
                continue
            declared += _lay_out(rng, spec, held, (stage, tp), is_overlaid=is_overlaid, is_by_page=is_by_page)
    return replace(spec, storage=spec.storage.with_placements(declared))


def _draw_held(rng: random.Random, spec: Spec, component: Component, stage: int, tp: int | None) -> _Held:
    """Axes of one page in any order, with gaps; tokens that only move together lie as on every other side."""
    pieces, storage = cuts(spec, component, "pool"), spec.storage
    first, last = pieces.units[tp or 0]
    item = item_bytes(storage.dtype_of(component))
    axes = [(dim.name, dim.size) for dim in component.dims]
    outer = [("unit", last - first)]
    if component.extent.has_tokens and storage.granule == 1:
        outer.append(("token", storage.page_tokens))
    elif component.extent.has_tokens:
        axes.insert(0, ("token", storage.page_tokens))
    if storage.granule == 1:
        axes += outer
        rng.shuffle(axes)
        padded = {name for name, _ in axes}
    else:
        axes = [*outer, *axes]
        padded = {"unit"}
    strides, reach = {}, item
    for name, count in reversed(axes):
        if name in padded and count > 1 and rng.random() < 0.3:
            reach += rng.choice((1, 2)) * item
        strides[name] = reach
        reach *= count
    return _Held(component, tuple(to_ids(pieces.layers[stage])), strides, -(-reach // ALIGNMENT) * ALIGNMENT)


def _lay_out(
    rng: random.Random,
    spec: Spec,
    held: list[_Held],
    shard: tuple[int, int | None],
    *,
    is_overlaid: bool,
    is_by_page: bool,
) -> list[DeclaredPlacement]:
    """Placements of everything that one shard holds, in one or two buffers."""
    groups = sorted({part.component.group for part in held})
    regions = [groups] if is_overlaid else [[group] for group in groups]
    ends: dict[str, int] = {}
    placed: list[tuple[_Held, str, int, list[int]]] = []
    for region in regions:
        buffer = "raw" if is_overlaid else rng.choice(("raw", "raw.1"))
        start = ends.get(buffer, 0) + rng.choice(GAPS)
        num_pages = max(spec.storage.pages_of(group) for group in region)
        inside = {
            group: _draw_order(rng, [part for part in held if part.component.group == group], is_by_page)
            for group in region
        }
        # By page, all that a group keeps lies in one frame; by layer, each layer has one among its slots.
        frame = max(size for slots in inside.values() for size, _ in slots) + rng.choice(GAPS)
        slot = frame * num_pages + rng.choice(GAPS)
        for group, slots in inside.items():
            parts = {part.component.name: part for part in held if part.component.group == group}
            offsets: dict[str, dict[int, int]] = {name: {} for name in parts}
            for i, (_, entries) in enumerate(slots):
                for name, layer, offset in entries:
                    offsets[name][layer] = start + i * slot + offset
            placed += [
                (part, buffer, frame, [offsets[name][layer] for layer in part.layers])
                for name, part in parts.items()
            ]
        ends[buffer] = start + slot * max(len(slots) for slots in inside.values())
    tails = {buffer: rng.choice(GAPS) for buffer in ends}
    return [
        _declare(rng, part, shard, (buffer, ends[buffer] + tails[buffer]), page_stride, offsets)
        for part, buffer, page_stride, offsets in placed
    ]


_Slot = tuple[int, list[tuple[str, int, int]]]
"""Bytes of one page of a slot, and what is in it: component, layer, offset."""


def _draw_order(rng: random.Random, parts: list[_Held], is_by_page: bool) -> list[_Slot]:
    """The slots of one group: one with everything, or one for each layer, by layer id or in any order."""
    layers = sorted({layer for part in parts for layer in part.layers})
    if rng.random() < 0.4:
        rng.shuffle(layers)
    gaps = [rng.choice(GAPS) for _ in parts]
    slots: list[_Slot] = []
    reach = 0
    entries: list[tuple[str, int, int]] = []
    for layer in layers:
        if not is_by_page:
            reach, entries = 0, []
        for part, gap in zip(parts, gaps, strict=True):
            if layer in part.layers:
                entries.append((part.component.name, layer, reach))
                reach += part.num_bytes + gap
        if not is_by_page:
            slots.append((reach, entries))
    return [(reach, entries)] if is_by_page else slots


def _declare(
    rng: random.Random,
    held: _Held,
    shard: tuple[int, int | None],
    buffer: tuple[str, int],
    page_stride: int,
    offsets: list[int],
) -> DeclaredPlacement:
    strides = {"page": page_stride} | held.strides
    steps = {b - a for a, b in pairwise(offsets)}
    layer_offsets: tuple[int, ...] = ()
    if len(offsets) > 1 and len(steps) == 1 and min(steps) > 0 and rng.random() < 0.8:
        strides["layer"] = steps.pop()
    elif len(offsets) > 1:
        layer_offsets = tuple(offset - min(offsets) for offset in offsets)
    stage, tp = shard
    return DeclaredPlacement(
        component=held.component.name,
        buffer=buffer[0],
        buffer_bytes=buffer[1],
        offset=min(offsets),
        strides=tuple(strides.items()),
        layer_offsets=layer_offsets,
        stage=stage,
        tp=tp,
    )
