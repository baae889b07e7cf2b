"""A spec as bytes: a peer's layout, cache and storage, read as untrusted input.

The format is JSON with every field named. Nothing is assumed about the input: types, sizes, names and counts
are checked against limits before anything is built from them, unknown and missing fields are refused, and the
error names the field. What comes back can be planned with: no size leads to more work than its limits allow,
and no offset into a pool goes beyond 64 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import DIM_MAX, Cache, Component, Dim, Extent, Full, State, Units, Window
from baton.plan.dtypes import ITEM_BYTES
from baton.plan.layout import NUM_RANKS_MAX, Layout, parse_layout
from baton.plan.ownership import Spec, placements
from baton.plan.ranges import size
from baton.plan.steps import STAGING
from baton.plan.storage import PAGE_MAX, DeclaredPlacement, Order, Storage

SPEC_BYTES_MAX = 1 << 20
LAYOUT_CHARS_MAX = 1 << 16
NAME_CHARS_MAX = 128
TEXT_MAX = 200
"""How much of what was read an error repeats."""
PLACEMENT_TEXT_MAX = 800
"""The same where it names two placements and the bytes that they share."""
COMPONENTS_MAX = 4096
GROUPS_MAX = 4096
LAYERS_MAX = 1 << 16
LAYERS_HELD_MAX = 1 << 18
DIMS_MAX = 8
AXES_MAX = 16
PAGES_MAX = (1 << 31) - 1
POOL_BYTES_MAX = 1 << 62
PLACEMENTS_MAX = 1 << 14
AXES = ("layer", "page", "component", "unit", "token")
"""What an order calls its axes; a dim inside a unit has a name of its own."""

Value = TypeVar("Value")

SPECS_MAX = 256
"""Specs that are kept in both forms: every link of an instance asks for the same few."""


@lru_cache(maxsize=SPECS_MAX)
def spec_to_bytes(spec: Spec) -> bytes:
    """The spec as JSON; equal specs give equal bytes. Raises where `spec_from_bytes` would refuse them."""
    fields = {
        "layout": spec.layout.text,
        "cache": {
            "num_layers": spec.cache.num_layers,
            "components": [_component_out(component) for component in spec.cache.components],
        },
        "storage": storage_fields(spec.storage),
    }
    raw = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    spec_from_bytes(raw)
    return raw


def storage_fields(storage: Storage) -> dict[str, Any]:
    """A storage as the fields of a JSON object."""
    fields: dict[str, Any] = {
        "page_tokens": storage.page_tokens,
        "dtype": storage.dtype,
        "order": storage.order,
        "state_order": storage.state_order,
        "granule": storage.granule,
        "num_pages": storage.num_pages,
        "num_pages_default": storage.num_pages_default,
    }
    if storage.placements:
        # Left out where there are none, so that a peer that does not know of them reads the rest.
        fields["placements"] = [placement_fields(declared) for declared in storage.placements]
    return fields


def placement_fields(declared: DeclaredPlacement) -> dict[str, Any]:
    """A declared placement as the fields of a JSON object."""
    return {
        "component": declared.component,
        "stage": declared.stage,
        "tp": declared.tp,
        "buffer": declared.buffer,
        "buffer_bytes": declared.buffer_bytes,
        "offset": declared.offset,
        "strides": [list(entry) for entry in declared.strides],
        "layer_offsets": list(declared.layer_offsets),
    }


def _component_out(component: Component) -> dict[str, Any]:
    units, extent = component.units, component.extent
    kinds = {Full: "full", Window: "window", State: "state"}
    return {
        "name": component.name,
        "layers": component.layers,
        "units": [units.count, units.name] if units else None,
        "dims": [[dim.name, dim.size] for dim in component.dims],
        "extent": [kinds[type(extent)], extent.window or 0],
        "group": component.group,
        "bundle": component.bundle,
        "place": component.place,
        "dtype": component.dtype,
    }


@lru_cache(maxsize=SPECS_MAX)
def spec_from_bytes(raw: bytes) -> Spec:
    """The spec in these bytes; raises ConfigError or LayoutError, naming the field, on anything else."""
    fields = _read(raw, "spec").fields("layout", "cache", "storage")
    spec = Spec(_layout(fields["layout"]), _cache(fields["cache"]), _storage(fields["storage"]))
    _check_pools(spec)
    return spec


def storage_from_bytes(raw: bytes) -> Storage:
    """The storage in these bytes, the JSON of `storage_fields`; ConfigError, with the field, on others."""
    return _storage(_read(raw, "storage"))


def _read(raw: bytes, what: str) -> _Read:
    if len(raw) > SPEC_BYTES_MAX:
        raise ConfigError(f"a {what} has at most {SPEC_BYTES_MAX} bytes, found {len(raw)}")
    try:
        return _Read(what, json.loads(raw.decode("ascii"), object_pairs_hook=_once))
    except (ValueError, RecursionError) as cause:
        raise ConfigError(
            f"a {what} has to be JSON: {type(cause).__name__} ({str(cause)[:TEXT_MAX]})"
        ) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field is given twice, among {', '.join(sorted(fields))[:TEXT_MAX]}")
    return fields


@dataclass(frozen=True, slots=True)
class _Read:
    """A value from the wire and where it was found."""

    where: str
    value: Any

    def wrong(self, wanted: str) -> ConfigError:
        """The refusal."""
        return ConfigError(f"{self.where} has to be {wanted}, found {repr(self.value)[:TEXT_MAX]}")

    def fields(self, *names: str) -> dict[str, _Read]:
        """The fields of an object, which has these and no others."""
        if not isinstance(self.value, dict) or set(self.value) != set(names):
            raise self.wrong(f"an object with the fields {', '.join(names)}")
        return {name: _Read(f"{self.where}.{name}", self.value[name]) for name in names}

    def items(self, most: int) -> list[_Read]:
        """The items of a list."""
        if not isinstance(self.value, list) or len(self.value) > most:
            raise self.wrong(f"a list of at most {most}")
        return [_Read(f"{self.where}[{i}]", value) for i, value in enumerate(self.value)]

    def two(self) -> tuple[_Read, _Read]:
        """The items of a list of two."""
        if not isinstance(self.value, list) or len(self.value) != 2:
            raise self.wrong("a list of two")
        return _Read(f"{self.where}[0]", self.value[0]), _Read(f"{self.where}[1]", self.value[1])

    def number(self, least: int, most: int) -> int:
        """An integer within bounds."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.wrong(f"a number from {least} to {most}")
        return self.value

    def text(self, most: int = NAME_CHARS_MAX) -> str:
        """Printable ASCII, at least one character."""
        value = self.value
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            raise self.wrong(f"text of 1 to {most} printable characters")
        if not value.isascii():
            raise self.wrong("ASCII")
        return value

    def one_of(self, known: Iterable[str]) -> str:
        """One of a fixed set of strings."""
        names = tuple(known)
        if not isinstance(self.value, str) or self.value not in names:
            raise self.wrong(f"one of {', '.join(names)}")
        return self.value

    def built(self, make: Callable[[], Value]) -> Value:
        """What `make` builds; its complaints get the name of this field."""
        try:
            return make()
        except ConfigError as cause:
            raise ConfigError(f"{self.where}: {str(cause)[:TEXT_MAX]}") from None


def _layout(read: _Read) -> Layout:
    text = read.text(LAYOUT_CHARS_MAX)
    try:
        return parse_layout(text)
    except LayoutError as cause:
        raise LayoutError(cause.reason[:TEXT_MAX], sides=f"{read.where} {text[:TEXT_MAX]!r}") from None


def _cache(read: _Read) -> Cache:
    fields = read.fields("num_layers", "components")
    num_layers = fields["num_layers"].number(1, LAYERS_MAX)
    components = tuple(_component(item) for item in fields["components"].items(COMPONENTS_MAX))
    num_held = sum(size(component.layers) for component in components)
    if num_held > LAYERS_HELD_MAX:
        raise fields["components"].wrong(f"components of at most {LAYERS_HELD_MAX} layers together")
    return read.built(lambda: Cache(num_layers, components))


def _component(read: _Read) -> Component:
    fields = read.fields("name", "layers", "units", "dims", "extent", "group", "bundle", "place", "dtype")
    has_dtype = fields["dtype"].value is not None
    return Component(
        name=_buffer_name(fields["name"]),
        layers=tuple(_layers(item) for item in fields["layers"].items(LAYERS_MAX)),
        units=None if fields["units"].value is None else _units(fields["units"]),
        dims=_dims(fields["dims"]),
        extent=_extent(fields["extent"]),
        group=fields["group"].text(),
        bundle=_buffer_name(fields["bundle"]),
        place=fields["place"].number(0, DIM_MAX),
        dtype=fields["dtype"].one_of(ITEM_BYTES) if has_dtype else None,
    )


def _buffer_name(read: _Read) -> str:
    if read.value == STAGING:
        raise read.wrong("another name, since staging memory is called so")
    return read.text()


def _layers(read: _Read) -> tuple[int, int]:
    first, last = (item.number(0, LAYERS_MAX) for item in read.two())
    return (first, last)


def _units(read: _Read) -> Units:
    count, name = read.two()
    return Units(count.number(1, DIM_MAX), name.text())


def _dims(read: _Read) -> tuple[Dim, ...]:
    pairs = [item.two() for item in read.items(DIMS_MAX)]
    dims = tuple(Dim(name.text(), length.number(1, DIM_MAX)) for name, length in pairs)
    names = [dim.name for dim in dims]
    if len(set(names)) != len(names) or set(names) & set(AXES):
        raise read.wrong(f"dims with names of their own, none of {', '.join(AXES)}")
    return dims


def _extent(read: _Read) -> Extent:
    kind, window = read.two()
    match kind.one_of(("full", "window", "state")):
        case "full":
            window.number(0, 0)
            return Full()
        case "window":
            return Window(window.number(1, DIM_MAX))
        case _:
            window.number(0, 0)
            return State()


def _storage(read: _Read) -> Storage:
    names = ["page_tokens", "dtype", "order", "state_order", "granule", "num_pages", "num_pages_default"]
    is_declared = isinstance(read.value, dict) and "placements" in read.value
    fields = read.fields(*names, "placements") if is_declared else read.fields(*names)
    declared: tuple[DeclaredPlacement, ...] = ()
    if is_declared:
        declared = tuple(_placement(item) for item in fields["placements"].items(PLACEMENTS_MAX))
        if not declared:
            raise fields["placements"].wrong("a list that is not empty, or left out")
    pages = [item.two() for item in fields["num_pages"].items(GROUPS_MAX)]
    num_pages = tuple((group.text(), count.number(0, PAGES_MAX)) for group, count in pages)
    if len(dict(num_pages)) != len(num_pages):
        raise fields["num_pages"].wrong("a list that names each group once")
    page_tokens, granule = (fields[name].number(1, PAGE_MAX) for name in ("page_tokens", "granule"))
    order, state_order = (_order(fields[name]) for name in ("order", "state_order"))
    dtype = fields["dtype"].one_of(ITEM_BYTES)
    default = fields["num_pages_default"].number(0, PAGES_MAX)
    storage = (page_tokens, dtype, order, state_order, granule, num_pages, default)
    return read.built(lambda: Storage(*storage, declared))


def _placement(read: _Read) -> DeclaredPlacement:
    names = ("component", "stage", "tp", "buffer", "buffer_bytes", "offset", "strides", "layer_offsets")
    fields = read.fields(*names)
    strides = [item.two() for item in fields["strides"].items(AXES_MAX)]
    offsets = fields["layer_offsets"].items(LAYERS_MAX)
    return DeclaredPlacement(
        component=fields["component"].text(),
        buffer=_buffer_name(fields["buffer"]),
        buffer_bytes=fields["buffer_bytes"].number(1, POOL_BYTES_MAX),
        offset=fields["offset"].number(0, POOL_BYTES_MAX),
        strides=tuple((axis.text(), stride.number(1, POOL_BYTES_MAX)) for axis, stride in strides),
        layer_offsets=tuple(item.number(0, POOL_BYTES_MAX) for item in offsets),
        stage=fields["stage"].number(0, NUM_RANKS_MAX),
        tp=None if fields["tp"].value is None else fields["tp"].number(0, NUM_RANKS_MAX),
    )


def _order(read: _Read) -> Order:
    return tuple(item.text() for item in read.items(AXES_MAX))


def _check_declared(spec: Spec) -> None:
    """Raises ConfigError or LayoutError unless every rank has a place for all that it holds."""
    try:
        placements(spec, 0, "spec")
    except ConfigError as cause:
        raise ConfigError(f"spec.storage: {str(cause)[:PLACEMENT_TEXT_MAX]}") from None


def _check_pools(spec: Spec) -> None:
    """Raises ConfigError where two pools have one name, or a pool would be larger than offsets can say."""
    if spec.storage.placements:
        _check_declared(spec)
        return
    owners: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for component in spec.cache.components:
        is_fused = "component" in spec.storage.order_of(component)
        buffer, owner = component.name, f"component {component.name}"
        if is_fused:
            buffer, owner = component.bundle, f"bundle {component.bundle}"
        if owners.setdefault(buffer, owner) != owner:
            raise ConfigError(f"spec.cache: {owners[buffer]} and {owner} are both kept in buffer {buffer!r}")
        per_page = spec.storage.page_entries(component) * component.num_units * component.num_elements
        pages = size(component.layers) * spec.storage.pages_of(component.group)
        item = ITEM_BYTES[spec.storage.dtype_of(component)]
        sizes[buffer] = sizes.get(buffer, 0) + prod((per_page, pages, item))
        if sizes[buffer] > POOL_BYTES_MAX:
            raise ConfigError(f"spec.storage: buffer {buffer!r} is larger than {POOL_BYTES_MAX} bytes")
