"""Families of tiny instances of unlike layouts that can hand caches to each other, the same in every run.

Seeds draw from a fixed number of families, so that plans made for one seed are reused by the next.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from baton.errors import LayoutError
from baton.plan.cache import Cache, Units
from baton.plan.kinds import Conv, Draft, Index, Kind, Latent, Paged, Recurrent
from baton.plan.layout import Layout, parse_layout
from baton.plan.ownership import Spec
from baton.plan.planner import plan
from baton.plan.ranges import Ranges
from baton.plan.storage import STATE_PACKED, Order, Storage
from baton.sim.placements import draw_placements

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
class Family:
    """One cache, and instances of unlike layouts and storages that can exchange it."""

    sources: tuple[Spec, ...]
    targets: tuple[Spec, ...]


@lru_cache(maxsize=NUM_FAMILIES)
def family(number: int) -> Family:
    rng = random.Random(f"family/{number}")
    while True:
        drawn = _draw(rng, number)
        if drawn is not None:
            return drawn


def _draw(rng: random.Random, number: int) -> Family | None:
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
    return Family(*(tuple(_in_memory(number, side, spec) for spec in sides[side]) for side in range(2)))


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
