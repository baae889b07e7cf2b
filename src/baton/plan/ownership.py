"""Which rank holds which box of a component.

A layout cuts a component along three dims, each by one axis: layers by pp, units by tp, tokens by cp. A cut
is a list of pieces with the coordinates that hold each; where several coordinates hold one piece they are
mirrors. dp only selects a group of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import Cache, Component
from baton.plan.declared import OverlapCheck, PlacedRegion, regions_of, resolve_declared
from baton.plan.layout import Layout, Mirror, Scheme, Stripe
from baton.plan.ranges import Range, Ranges, Stride, intersection, size, to_ids
from baton.plan.storage import DeclaredPlacement, Holding, Placement, Storage, place

END = 1 << 40
"""Past every layer id and every token: stands for "for any length" in rules."""


@dataclass(frozen=True)
class Spec:
    """One side of a hand-over: its layout, its cache, and how the cache is stored."""

    layout: Layout
    cache: Cache
    storage: Storage

    @cached_property
    def _hash(self) -> int:
        return hash((self.layout, self.cache, self.storage))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class Partitioning:
    """How a layout cuts one component: the piece of every pp, tp and cp coordinate."""

    layers: tuple[Ranges, ...]
    units: tuple[Range, ...]
    shares: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """What one rank holds of one component; tokens are the share that the scheme deals it."""

    layers: Ranges
    units: Range
    share: int


@lru_cache(maxsize=4096)
def cuts(spec: Spec, component: Component, side: str) -> Partitioning:
    """The pieces by coordinate; raises LayoutError where the layout cannot cut the component."""
    layout, num_layers = spec.layout, spec.cache.num_layers
    stages = layout.stages(num_layers, side)
    # Draft layers carry ids from num_layers on and run where the last stage runs.
    ends = [*(stop for _, stop in stages[:-1]), END]
    layers = tuple(intersection(component.layers, ((a, b),)) for (a, _), b in zip(stages, ends, strict=True))
    if component.units is None:
        units: tuple[Range, ...] = ((0, 1),) * layout.size("tp")
    else:
        unit = "KV head" if component.bundle.startswith("kv") else component.units.name
        units = layout.unit_blocks(component.units.count, component=component.name, unit=unit, side=side)
    num_shares = scheme(spec, component).num_shares(layout.size("cp"))
    _check_granule(spec, component, side)
    shares = tuple(i if num_shares > 1 else 0 for i in range(layout.size("cp")))
    return Partitioning(layers, units, shares)


def scheme(spec: Spec, component: Component) -> Scheme:
    """How cp deals a component's tokens; what has no tokens is mirrored."""
    return spec.layout.scheme if component.extent.has_tokens else Mirror()


def _check_granule(spec: Spec, component: Component, side: str) -> None:
    dealing = scheme(spec, component)
    granule = spec.storage.granule
    if isinstance(dealing, Stripe) and (dealing.block or spec.storage.page_tokens) % granule:
        raise LayoutError(
            f"stripes of {dealing.block} tokens cut through granules of {granule}; use a multiple",
            component=component.name,
            sides=f"{side} {spec.layout}",
        )


def share_stride(spec: Spec, component: Component, share: int, num_entries: int) -> Stride:
    """The entries that a share consists of, for a prompt with `num_entries` of them."""
    page = spec.storage.page_entries(component)
    return scheme(spec, component).share(share, spec.layout.size("cp"), num_entries, page)


@lru_cache(maxsize=65_536)
def box(spec: Spec, component: Component, rank: int, side: str) -> Box:
    """What `rank` holds of `component`."""
    pieces = cuts(spec, component, side)
    at = spec.layout.coordinates(rank)
    return Box(pieces.layers[at["pp"]], pieces.units[at["tp"]], pieces.shares[at["cp"]])


@lru_cache(maxsize=16_384)
def placements(spec: Spec, rank: int, side: str) -> dict[str, Placement]:
    """Where every component lies on `rank`; what it holds no layer of is left out."""
    if spec.storage.placements:
        return _declared_memory(spec)[_shard(spec, rank)].placements
    bundles: dict[str, list[Holding]] = {}
    for component in spec.cache.components:
        held = box(spec, component, rank, side)
        if held.layers:
            holding = Holding(component, size(held.layers), held.units[1] - held.units[0])
            bundles.setdefault(component.bundle, []).append(holding)
    placed: dict[str, Placement] = {}
    for holdings in bundles.values():
        placed |= place(spec.storage, holdings)
    return placed


def buffers(spec: Spec, rank: int, side: str) -> dict[str, int]:
    """The buffers that `rank` needs, with their sizes in bytes."""
    return {at.buffer: at.buffer_bytes for at in placements(spec, rank, side).values()}


def page_spaces(spec: Spec, rank: int) -> dict[str, str]:
    """By group, the name of its page space: groups that overlay each other on `rank` have one in common.

    A page id of a space belongs to one group at a time.
    """
    if spec.storage.placements:
        return _declared_memory(spec)[_shard(spec, rank)].spaces
    return {group: group for group in spec.cache.groups}


@lru_cache(maxsize=4096)
def space_sizes(spec: Spec, rank: int) -> dict[str, int]:
    """The number of pages of each page space of `rank`, by its name."""
    sizes: dict[str, int] = {}
    for group, space in sorted(page_spaces(spec, rank).items()):
        sizes[space] = max(sizes.get(space, 0), spec.storage.pages_of(group))
    return sizes


@lru_cache(maxsize=256)
def by_layer(spec: Spec, side: str) -> Spec:
    """The same memory with a component for each layer: `k` of two layers becomes `k.0` and `k.1`.

    Engines that allocate every layer by itself declare their caches so. Raises ConfigError on memory that
    cannot be declared: where elements do not begin at a multiple of their size.
    """
    names = {component.name: layer_names(component) for component in spec.cache.components}
    components = tuple(
        replace(component, name=name, bundle=name, layers=((layer, layer + 1),))
        for component in spec.cache.components
        for layer, name in names[component.name].items()
    )
    steps = spec.layout.strides()
    placed = []
    for stage, tp in product(range(spec.layout.size("pp")), range(spec.layout.size("tp"))):
        rank = stage * steps["pp"] + tp * steps["tp"]
        for name, at in placements(spec, rank, side).items():
            component = spec.cache.by_name[name]
            layers = to_ids(box(spec, component, rank, side).layers)
            axes = ["page", "unit", *(["token"] if component.extent.has_tokens else [])]
            axes += [dim.name for dim in component.dims]
            placed += [
                DeclaredPlacement(
                    component=names[name][layer],
                    buffer=at.buffer,
                    buffer_bytes=at.buffer_bytes,
                    offset=int(start),
                    strides=tuple((axis, at.stride(axis)) for axis in axes),
                    stage=stage,
                    tp=tp,
                )
                for layer, start in zip(layers, at.layer_starts(np.arange(len(layers))), strict=True)
            ]
    cache = replace(spec.cache, components=components)
    declared = Spec(spec.layout, cache, spec.storage.with_placements(placed))
    placements(declared, 0, side)  # checks those of every rank
    return declared


def layer_names(component: Component) -> dict[int, str]:
    """By layer, what `by_layer` calls a component; one that has one layer and its number stays as it is."""
    layers = to_ids(component.layers)
    if len(layers) == 1 and component.name.endswith(f".{layers[0]}"):
        return {layers[0]: component.name}
    return {layer: f"{component.name}.{layer}" for layer in layers}


# Where an engine says where its memory is.


@dataclass(frozen=True, slots=True)
class _Memory:
    """What the ranks of one stage and tp coordinate have."""

    placements: dict[str, Placement]
    spaces: dict[str, str]


def _shard(spec: Spec, rank: int) -> tuple[int, int]:
    at = spec.layout.coordinates(rank)
    return at["pp"], at["tp"]


@lru_cache(maxsize=256)
def _declared_memory(spec: Spec) -> dict[tuple[int, int], _Memory]:
    """The memory of every stage and tp coordinate; ConfigError where the placements cannot be right."""
    by_key = {(at.component, at.stage, at.tp): at for at in spec.storage.placements}
    parts = {component.name: cuts(spec, component, "declared") for component in spec.cache.components}
    num_stages, num_shards = spec.layout.size("pp"), spec.layout.size("tp")
    check = OverlapCheck()
    memory: dict[tuple[int, int], _Memory] = {}
    alike: dict[object, _Memory] = {}
    used = set()
    for stage in range(num_stages):
        held = [part for part in spec.cache.components if parts[part.name].layers[stage]]
        for shard in range(num_shards):
            chosen = []
            for component in held:
                keys = [(component.name, stage, tp) for tp in (shard, None)]
                key = next((key for key in keys if key in by_key), None)
                if key is None:
                    raise ConfigError(
                        f"no placement of {component.name} on stage {stage}, tp {shard}; declare one for "
                        "every component and stage, or none at all"
                    )
                used.add(key)
                first, last = parts[component.name].units[shard]
                chosen.append((component, key, last - first))
            case = tuple(chosen)
            if case not in alike:
                layers = {component.name: parts[component.name].layers[stage] for component in held}
                entries = [(by_key[key], component, units) for component, key, units in chosen]
                alike[case] = _checked_memory(spec, entries, layers, check)
            memory[stage, shard] = alike[case]
    if unused := [at for key, at in by_key.items() if key not in used]:
        raise ConfigError(
            f"{unused[0]}: {spec.layout} has no such component, stage or tp coordinate, or no layers of it"
        )
    return memory


def _checked_memory(
    spec: Spec,
    entries: list[tuple[DeclaredPlacement, Component, int]],
    layers: dict[str, Ranges],
    check: OverlapCheck,
) -> _Memory:
    """Placements of one rank that stay in their buffers and out of each other's bytes."""
    placed: dict[str, Placement] = {}
    regions: dict[str, list[PlacedRegion]] = {}
    sizes: dict[str, tuple[int, DeclaredPlacement]] = {}
    for declared, component, num_units in entries:
        held = Holding(component, size(layers[component.name]), num_units)
        at = placed[component.name] = resolve_declared(spec.storage, declared, held)
        num_bytes, other = sizes.setdefault(at.buffer, (at.buffer_bytes, declared))
        if num_bytes != at.buffer_bytes:
            raise ConfigError(
                f"buffer {at.buffer!r} has {num_bytes} bytes in the {other} and {at.buffer_bytes} in the "
                f"{declared}"
            )
        ids = to_ids(layers[component.name])
        regions.setdefault(at.buffer, []).extend(regions_of(declared, at, held, spec.storage, ids))
    spaces = {group: group for group in spec.cache.groups}
    for buffer, inside in regions.items():
        for group, other_group in sorted(check.overlays(buffer, inside)):
            first, second = sorted((spaces[group], spaces[other_group]))
            spaces = {name: first if space == second else space for name, space in spaces.items()}
    return _Memory(placed, spaces)
