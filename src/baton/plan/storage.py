"""How a side stores its components, declared as an order of axes and turned into strides.

A pool is one buffer. Its axes, outermost first, are some order of layer, page, component, unit, token and
the dims inside a unit. With `component` in the order, all components of a bundle share the pool (K and V
fused, or a packed convolution state); without it, each has a pool of its own. Two choices cover
the usual cases: HND puts unit before token, NHD after; a layer-major pool puts layer first, a page-major
one page.

Strides follow by walking the order from the inside out. Until `component` is reached each component has its
own size; there the sizes are laid side by side and summed, so that K and V may differ in channels and a
packed [q|k|v] may be cut at different places on every rank.

An engine that has its memory already declares where each component lies instead (`DeclaredPlacement`): a
buffer, an offset and strides. Then the orders are not used. `ownership.placements` checks what is declared
against the rest of the spec, with `overlaps`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import Component
from baton.plan.dtypes import item_bytes
from baton.plan.tokens import Ints

Order: TypeAlias = tuple[str, ...]

PAGE_MAX = 1 << 20
HND: Order = ("layer", "page", "unit", "token")
FUSED: Order = ("layer", "page", "component", "unit", "token")
STATE_PACKED: Order = ("layer", "page", "component", "unit")
_TOPICS = {"hnd": "hnd", "nhd": "hnd", "apart": "apart", "fused": "apart", "layer": "layer", "page": "layer"}


@dataclass(frozen=True, slots=True)
class DeclaredPlacement:
    """Where one component lies on the ranks of a pipeline stage, in bytes, as their engine says.

    `offset` is where the first of its layers, pages, units and tokens begins in the buffer. `strides` gives
    bytes by axis: layer, page, unit, token and the dims inside a unit. Layers that are not equally far apart
    have `layer_offsets` instead of a stride, counted from `offset`, one for each layer that the stage holds,
    ascending by layer id. Without a stride for `token` the page is opaque: one piece, or one piece for each
    unit where `unit` has a stride. Dims without strides are dense, and an axis of size one needs none.
    """

    component: str
    buffer: str
    buffer_bytes: int
    offset: int
    strides: tuple[tuple[str, int], ...]
    layer_offsets: tuple[int, ...] = ()
    stage: int = 0
    tp: int | None = None
    """The tp coordinate that it holds for; None: all of them."""

    def __str__(self) -> str:
        shard = "" if self.tp is None else f", tp {self.tp}"
        return f"placement of {self.component} on stage {self.stage}{shard}"


@dataclass(frozen=True, slots=True)
class Storage:
    """One side's declaration: page size, element type, axis orders, granule and pool sizes.

    `num_pages` gives (group, pages of its pools); a group that is not named has `num_pages_default`.
    `placements` are either none, or one for each component on each stage that holds layers of it.
    """

    page_tokens: int = 64
    dtype: str = "bf16"
    order: Order = HND
    state_order: Order = STATE_PACKED
    granule: int = 1
    num_pages: tuple[tuple[str, int], ...] = ()
    num_pages_default: int = 1
    placements: tuple[DeclaredPlacement, ...] = ()

    def __post_init__(self) -> None:
        item_bytes(self.dtype)
        if not 1 <= self.page_tokens <= PAGE_MAX:
            raise ConfigError(f"page size must be 1 to {PAGE_MAX} tokens, found {self.page_tokens}")
        for order, needed in ((self.order, HND), (self.state_order, HND[:3])):
            if len(set(order)) != len(order) or not set(needed) <= set(order):
                raise ConfigError(f"axis order {order} must name each of {', '.join(needed)} once")
        if self.granule < 1 or self.page_tokens % self.granule:
            raise ConfigError(
                f"granule {self.granule} does not divide the page of {self.page_tokens} tokens; "
                "use 1, or a divisor of the page size"
            )
        if self.placements:
            _check_once(self.placements)

    def pages_of(self, group: str) -> int:
        """How many pages the pools of a group have."""
        return dict(self.num_pages).get(group, self.num_pages_default)

    def page_entries(self, component: Component) -> int:
        """Entries in one page: tokens, or one for a state."""
        return self.page_tokens if component.extent.has_tokens else 1

    def dtype_of(self, component: Component) -> str:
        """The element type of a component here."""
        return component.dtype or self.dtype

    def order_of(self, component: Component) -> Order:
        """The full axis order of a component's pool, its inner dims included."""
        order = self.order if component.extent.has_tokens else self.state_order
        return order + tuple(dim.name for dim in component.dims if dim.name not in order)

    def with_pages(self, pages: dict[str, int]) -> Storage:
        """The same storage with pools of these sizes."""
        return replace(self, num_pages=tuple(sorted(pages.items())))

    def with_placements(self, placements: Iterable[DeclaredPlacement]) -> Storage:
        """The same storage in memory that an engine has already, in whatever order it is described."""
        ordered = sorted(placements, key=lambda at: (at.component, at.stage, -1 if at.tp is None else at.tp))
        return replace(self, placements=tuple(ordered))


def _check_once(placements: tuple[DeclaredPlacement, ...]) -> None:
    """Raises ConfigError where one rank would have two placements of one component."""
    shards: dict[tuple[str, int], set[int | None]] = {}
    for declared in placements:
        known = shards.setdefault((declared.component, declared.stage), set())
        if declared.tp in known or (known and None in (*known, declared.tp)):
            raise ConfigError(f"{declared} is given twice; give it once, for all tp coordinates or for each")
        known.add(declared.tp)


def parse_storage(text: str, page_tokens: int, dtype: str) -> Storage:
    """Reads `hnd|nhd . apart|fused . layer|page . granuleN`, in any order, each at most once."""
    chosen = {"hnd": True, "apart": True, "layer": True}
    granule = 1
    seen: set[str] = set()
    for word in text.split("."):
        topic = _TOPICS.get(word) or ("granule" if word.startswith("granule") else "")
        if not topic or topic in seen:
            raise ConfigError(
                f"storage {text!r}: cannot use {word!r}; join by dots at most one each of "
                "hnd|nhd, apart|fused, layer|page, granuleN"
            )
        seen.add(topic)
        if topic == "granule":
            granule = _granule(text, word)
        else:
            chosen[topic] = word == topic
    inner = ("unit", "token") if chosen["hnd"] else ("token", "unit")
    bundle: Order = () if chosen["apart"] else ("component",)
    outer = ("layer", "page") if chosen["layer"] else ("page", "layer")
    return Storage(page_tokens=page_tokens, dtype=dtype, order=(*outer, *bundle, *inner), granule=granule)


def _granule(text: str, word: str) -> int:
    digits = word.removeprefix("granule")
    if not digits.isascii() or not digits.isdigit() or digits.startswith("0"):
        raise ConfigError(f"storage {text!r}: {word!r} needs a number of tokens, as in granule64")
    return int(digits)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one component lies on one rank, in bytes."""

    buffer: str
    buffer_bytes: int
    offset: int
    item_bytes: int
    page_entries: int
    strides: dict[str, int] = field(hash=False)
    layer_offsets: tuple[int, ...] = ()
    """Bytes from `offset` to each layer, where layers have no stride."""

    def stride(self, axis: str) -> int:
        """Bytes from one index of an axis to the next."""
        return self.strides[axis]

    def layer_starts(self, layers: Ints) -> Ints:
        """Where layers begin, by their number among the layers of the rank."""
        if self.layer_offsets:
            return self.offset + np.array(self.layer_offsets, dtype=np.int64)[layers]
        return self.offset + layers * self.strides["layer"]


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of a component one rank keeps."""

    component: Component
    num_layers: int
    num_units: int


def place(storage: Storage, holdings: list[Holding]) -> dict[str, Placement]:
    """Placements of the components of one bundle on one rank, by component name."""
    if "component" in storage.order_of(holdings[0].component):
        return _walk(storage, sorted(holdings, key=lambda held: held.component.place))
    return {held.component.name: _walk(storage, [held])[held.component.name] for held in holdings}


def _walk(storage: Storage, holdings: list[Holding]) -> dict[str, Placement]:
    """Strides from the inside out; `sizes` is what each component has reached."""
    items = [item_bytes(storage.dtype_of(held.component)) for held in holdings]
    sizes, offsets = list(items), [0] * len(holdings)
    strides: list[dict[str, int]] = [{} for _ in holdings]
    held_sizes = [axis_sizes(storage, held) for held in holdings]
    is_joined = len(holdings) == 1
    order = _common_order(storage, holdings)
    for axis in reversed(order):
        if axis == "component":
            offsets = [sum(sizes[:i]) for i in range(len(sizes))]
            sizes = [sum(sizes)] * len(sizes)
            is_joined = True
            continue
        extents = [of_one.get(axis, 1) for of_one in held_sizes]
        if is_joined and len(set(extents)) > 1:
            raise LayoutError(
                f"stored together, but they differ along {axis}: {extents}", component=_names(holdings)
            )
        for i, extent in enumerate(extents):
            strides[i][axis] = sizes[i]
            sizes[i] *= extent
    return {
        held.component.name: Placement(
            buffer=held.component.bundle if "component" in order else held.component.name,
            buffer_bytes=sizes[i],
            offset=offsets[i],
            item_bytes=items[i],
            page_entries=storage.page_entries(held.component),
            strides=strides[i],
        )
        for i, held in enumerate(holdings)
    }


def _common_order(storage: Storage, holdings: list[Holding]) -> Order:
    orders = {storage.order_of(held.component) for held in holdings}
    if len(orders) > 1:
        raise LayoutError(
            f"stored together, but their axes differ: {sorted(orders)}", component=_names(holdings)
        )
    return orders.pop()


def _names(holdings: list[Holding]) -> str:
    return ", ".join(held.component.name for held in holdings)


def axis_sizes(storage: Storage, held: Holding) -> dict[str, int]:
    """What a rank holds of a component along every axis; a state has no tokens."""
    component = held.component
    sizes = {
        "layer": held.num_layers,
        "page": storage.pages_of(component.group),
        "unit": held.num_units,
    }
    if component.extent.has_tokens:
        sizes["token"] = storage.page_tokens
    return sizes | {dim.name: dim.size for dim in component.dims}
