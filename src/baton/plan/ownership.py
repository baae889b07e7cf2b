"""Which rank holds which box of a component.

A layout cuts a component along three dims, each by one axis: layers by pp, units by tp, tokens by cp. A cut
is a list of pieces with the coordinates that hold each; where several coordinates hold one piece they are
mirrors. dp only selects a group of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from baton.errors import LayoutError
from baton.plan.cache import Cache, Component
from baton.plan.layout import Layout, Mirror, Scheme, Stripe
from baton.plan.ranges import Range, Ranges, intersection, size
from baton.plan.storage import Holding, Placement, Storage, place
from baton.plan.tokens import Stride

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
class Partition:
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
def cuts(spec: Spec, component: Component, side: str) -> Partition:
    """The pieces by coordinate; raises LayoutError where the layout cannot cut the component."""
    layout, num_layers = spec.layout, spec.cache.num_layers
    stages = layout.stages(num_layers, side)
    # Draft layers carry ids from num_layers on and run where the last stage runs.
    ends = [*(stop for _, stop in stages[:-1]), END]
    layers = tuple(intersection(component.layers, ((a, b),)) for (a, _), b in zip(stages, ends, strict=True))
    if component.units is None:
        units: tuple[Range, ...] = ((0, 1),) * layout.size("tp")
    else:
        units = layout.unit_blocks(
            component.units.count, component=component.name, unit=component.units.name, side=side
        )
    num_shares = scheme(spec, component).num_shares(layout.size("cp"))
    _check_granule(spec, component, side)
    shares = tuple(i if num_shares > 1 else 0 for i in range(layout.size("cp")))
    return Partition(layers, units, shares)


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
