"""Families of tiny instances of unlike layouts that can hand caches to each other, the same in every run.

Seeds draw from a fixed number of families, so that plans made for one seed are reused by the next.

Some instances have the memory of an engine that allocated its cache itself: gaps, interleaved components,
overlaid groups. Their placements follow one of two patterns. Page by page, a frame holds what all layers keep
in one page; layer by layer, a slot holds all pages of one layer. Either way there is a region that several
components share, in any order and with gaps, and the groups of a cache have regions of their own or overlay
each other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from baton.errors import LayoutError
from baton.plan.cache import Cache, Component, Units
from baton.plan.dtypes import item_bytes
from baton.plan.kinds import Conv, Draft, Index, Kind, Latent, Paged, Recurrent
from baton.plan.layout import Layout, parse_layout
from baton.plan.ownership import Spec, cuts
from baton.plan.planner import plan
from baton.plan.ranges import Ranges, to_ids
from baton.plan.storage import STATE_PACKED, DeclaredPlacement, Order, Storage

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


NUM_FAMILIES = 64
TOKENS_MAX = 24
NUM_PROMPTS = 4
"""A pool has room for this many prompts of the greatest length."""
RANKS_MAX = 6

_CONVS = (
    Conv("q", Units(1, "key head"), 1, 2),
    Conv("k", Units(1, "key head"), 1, 2),
    Conv("v", Units(2, "value head"), 1, 2),
)
_CACHES: dict[str, tuple[int, tuple[tuple[Kind, Ranges], ...]]] = {
    "gqa": (2, ((Paged(2, 1), ((0, 2),)),)),
    "gqa-odd": (3, ((Paged(3, 1, 2), ((0, 3),)),)),
    "gqa-deep": (4, ((Paged(1, 1), ((0, 4),)),)),
    "latent": (2, ((Latent(3), ((0, 2),)),)),
    "window": (3, ((Paged(2, 1), ((0, 1),)), (Paged(2, 1, 0, 5), ((1, 3),)))),
    "state": (2, ((Recurrent(2, 2, _CONVS, "value head"), ((0, 2),)),)),
    "hybrid": (3, ((Paged(2, 1), ((2, 3),)), (Recurrent(2, 2), ((0, 2),)))),
    "index": (2, ((Latent(2), ((0, 2),)), (Index(1, 1), ((1, 2),)))),
    "draft": (2, ((Paged(2, 1), ((0, 2),)), (Draft(Paged(2, 1)), ((2, 3),)))),
}
_ORDERS: tuple[Order, ...] = (
    ("layer", "page", "unit", "token"),
    ("layer", "page", "token", "unit"),
    ("page", "layer", "component", "unit", "token"),
    ("layer", "page", "token", "unit", "component"),
)
_STATE_ORDERS: tuple[Order, ...] = (STATE_PACKED, ("page", "layer", "unit"))
_DTYPES = (("bf16", "bf16"), ("fp8", "fp8"), ("fp16", "fp16"), ("bf16", "fp32"), ("fp16", "fp32"))
_AXES = {
    "dp": ("dp2",),
    "pp": ("pp2",),
    "cp": ("cp2", "cp2:mirror", "cp2:split", "cp2:stripe1", "cp3:stripe2"),
    "tp": ("tp2", "tp2", "tp3", "tp4"),
}


@dataclass(frozen=True, slots=True)
class SimFamily:
    """One cache, and instances of unlike layouts and storages that can exchange it."""

    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]


@lru_cache(maxsize=NUM_FAMILIES)
def family(number: int) -> SimFamily:
    rng = random.Random(f"family/{number}")
    while True:
        drawn = _draw(rng, number)
        if drawn is not None:
            return drawn


def _draw(rng: random.Random, number: int) -> SimFamily | None:
    cache = cache_of(list(_CACHES)[number % len(_CACHES)])
    granule = 2 if rng.random() < 0.12 else 1
    dtypes = _DTYPES[2] if granule > 1 else rng.choice(_DTYPES)
    shared = _storage(rng, dtypes[0], granule)
    sides = []
    for dtype in dtypes:
        specs = []
        for _ in range(rng.choice((1, 1, 2))):
            storage = shared if granule > 1 else _storage(rng, dtype, granule)
            layout = _layout(rng)
            if layout.num_ranks > RANKS_MAX:
                return None
            specs.append(Spec(layout, cache, _with_pages(storage, cache)))
        sides.append(tuple(specs))
    try:
        for source in sides[0]:
            for target in sides[1]:
                plan(source, target)
    except LayoutError:
        return None
    return SimFamily(*(tuple(_in_memory(number, side, spec) for spec in sides[side]) for side in range(2)))


def _in_memory(number: int, side: int, spec: Spec) -> Spec:
    """The spec as it is or, on one side or on both, in memory that an engine has declared."""
    if number % 4 != 3 or (side + number // 4) % 3 == 0:
        return spec
    return draw_placements(random.Random(f"placements/{number}/{side}/{spec.layout}"), spec)


@lru_cache
def cache_of(name: str) -> Cache:
    num_layers, parts = _CACHES[name]
    components = [component for kind, layers in parts for component in kind.components(layers)]
    return Cache(num_layers, tuple(sorted(components, key=lambda component: component.name)))


def _layout(rng: random.Random) -> Layout:
    num_axes = rng.choice((0, 1, 1, 1, 2, 2, 3))
    axes = rng.sample(sorted(_AXES), num_axes)
    return parse_layout(".".join(rng.choice(_AXES[axis]) for axis in axes) or "tp1")


def _storage(rng: random.Random, dtype: str, granule: int) -> Storage:
    page = granule * rng.choice((1, 2, 2, 3, 4, 8))
    order = _ORDERS[0] if granule > 1 else rng.choice(_ORDERS)
    return Storage(page, dtype, order, rng.choice(_STATE_ORDERS), granule)


def _with_pages(storage: Storage, cache: Cache) -> Storage:
    with_tokens = {component.group for component in cache.components if component.extent.has_tokens}
    whole = -(-TOKENS_MAX // storage.page_tokens)
    return storage.with_pages(
        {group: NUM_PROMPTS * whole if group in with_tokens else NUM_PROMPTS + 2 for group in cache.groups}
    )
