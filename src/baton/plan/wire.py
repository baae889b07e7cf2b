"""A spec as bytes: a peer's layout, cache and storage, read as untrusted input.

The format is JSON with every field named. Nothing is assumed about the input: types, sizes, names and counts
are checked against limits before anything is built from them, unknown and missing fields are refused, and the
error names the field. What comes back can be planned with: no size leads to more work than its limits allow,
and no offset into a pool goes beyond 64 bits.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import prod
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from baton.errors import ConfigError, LayoutError
from baton.plan.cache import DIM_MAX, Cache, Component, Dim, Extent, Full, State, Units, Window
from baton.plan.dtypes import ITEM_BYTES
from baton.plan.layout import NUM_RANKS_MAX, parse_layout
from baton.plan.ownership import Spec, placements
from baton.plan.ranges import size
from baton.plan.steps import STAGING
from baton.plan.storage import PAGE_MAX, DeclaredPlacement, Storage

SPEC_BYTES_MAX = 1 << 20
TEXT_MAX = 200
"""How much of what was read an error repeats."""
PLACEMENT_TEXT_MAX = 800
"""The same where it names two placements and the bytes that they share."""
LAYERS_MAX = 1 << 16
LAYERS_HELD_MAX = 1 << 18
POOL_BYTES_MAX = 1 << 62
AXES = ("layer", "page", "component", "unit", "token")
"""What an order calls its axes; a dim inside a unit has a name of its own."""
SPECS_MAX = 256
"""Specs that are kept in both forms: every link of an instance asks for the same few."""

Name = Annotated[str, Meta(pattern=r"^[ -~]+\Z", max_length=128)]
BufferName = Annotated[str, Meta(pattern=rf"^(?!{STAGING}\Z)[ -~]+\Z", max_length=128)]
"""Staging memory is called so."""
LayerId = Annotated[int, Meta(ge=0, le=LAYERS_MAX)]
Size = Annotated[int, Meta(ge=1, le=DIM_MAX)]
PageTokens = Annotated[int, Meta(ge=1, le=PAGE_MAX)]
NumPages = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Offset = Annotated[int, Meta(ge=0, le=POOL_BYTES_MAX)]
Stride = Annotated[int, Meta(ge=1, le=POOL_BYTES_MAX)]
RankIndex = Annotated[int, Meta(ge=0, le=NUM_RANKS_MAX)]
OrderFields = Annotated[tuple[Name, ...], Meta(max_length=16)]


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An object of the format; whoever reads it knows all of its fields."""


class ComponentFields(_Fields, frozen=True):
    name: BufferName
    layers: Annotated[tuple[tuple[LayerId, LayerId], ...], Meta(max_length=LAYERS_MAX)]
    units: tuple[Size, Name] | None
    dims: Annotated[tuple[tuple[Name, Size], ...], Meta(max_length=8)]
    extent: tuple[Literal["full", "window", "state"], Annotated[int, Meta(ge=0, le=DIM_MAX)]]
    group: Name
    bundle: BufferName
    place: Annotated[int, Meta(ge=0, le=DIM_MAX)]
    dtype: Name | None


class CacheFields(_Fields, frozen=True):
    num_layers: Annotated[int, Meta(ge=1, le=LAYERS_MAX)]
    components: Annotated[tuple[ComponentFields, ...], Meta(max_length=4096)]


class PlacementFields(_Fields, frozen=True):
    component: Name
    stage: RankIndex
    tp: RankIndex | None
    buffer: BufferName
    buffer_bytes: Stride
    offset: Offset
    strides: Annotated[tuple[tuple[Name, Stride], ...], Meta(max_length=16)]
    layer_offsets: Annotated[tuple[Offset, ...], Meta(max_length=LAYERS_MAX)]


class StorageFields(_Fields, frozen=True):
    page_tokens: PageTokens
    dtype: Name
    order: OrderFields
    state_order: OrderFields
    granule: PageTokens
    num_pages: Annotated[tuple[tuple[Name, NumPages], ...], Meta(max_length=4096)]
    num_pages_default: NumPages
    placements: Annotated[tuple[PlacementFields, ...], Meta(min_length=1, max_length=1 << 14)] | UnsetType = (
        UNSET
    )
    """Left out where there are none, so that a peer that does not know of them reads the rest."""


class SpecFields(_Fields, frozen=True):
    layout: Annotated[str, Meta(pattern=r"^[ -~]+\Z", max_length=1 << 16)]
    cache: CacheFields
    storage: StorageFields


FieldsT = TypeVar("FieldsT", bound=_Fields)


@lru_cache(maxsize=SPECS_MAX)
def spec_to_bytes(spec: Spec) -> bytes:
    """The spec as JSON; equal specs give equal bytes. Raises where `spec_from_bytes` would refuse them."""
    components = tuple(_component_fields(component) for component in spec.cache.components)
    storage = msgspec.to_builtins(spec.storage)
    storage["placements"] = storage["placements"] or UNSET
    fields = {
        "layout": spec.layout.text,
        "cache": {"num_layers": spec.cache.num_layers, "components": components},
        "storage": {name: value for name, value in storage.items() if value is not UNSET},
    }
    raw = msgspec.json.encode(fields, order="sorted")
    spec_from_bytes(raw)
    return raw


def _component_fields(component: Component) -> dict[str, Any]:
    fields = msgspec.to_builtins(component)
    units, kinds = component.units, {Full: "full", Window: "window", State: "state"}
    return {
        **fields,
        "units": units and [units.count, units.name],
        "dims": [[dim.name, dim.size] for dim in component.dims],
        "extent": [kinds[type(component.extent)], component.extent.window or 0],
    }


@lru_cache(maxsize=SPECS_MAX)
def spec_from_bytes(raw: bytes) -> Spec:
    """The spec in these bytes; raises ConfigError or LayoutError, naming the field, on anything else."""
    fields = _read(raw, SpecFields, "spec")
    try:
        layout = parse_layout(fields.layout)
    except LayoutError as cause:
        sides = f"spec.layout {fields.layout[:TEXT_MAX]!r}"
        raise LayoutError(cause.reason[:TEXT_MAX], sides=sides) from None
    spec = Spec(layout, _cache(fields.cache), _storage(fields.storage, "spec.storage"))
    _check_pools(spec)
    return spec


def storage_from_bytes(raw: bytes) -> Storage:
    """The storage in these bytes, the JSON of `StorageFields`; ConfigError, with the field, on others."""
    return _storage(_read(raw, StorageFields, "storage"), "storage")


def _read(raw: bytes, kind: type[FieldsT], document: str) -> FieldsT:
    if len(raw) > SPEC_BYTES_MAX:
        raise ConfigError(f"a {document} has at most {SPEC_BYTES_MAX} bytes, found {len(raw)}")
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as cause:
        raise ConfigError(
            f"a {document} has to be JSON: {type(cause).__name__} ({str(cause)[:TEXT_MAX]})"
        ) from None
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as cause:
        wanted, _, path = str(cause).partition(" - at `$")
        path = path.removesuffix("`")
        value = fields
        for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
        raise _wrong(document + path, wanted, value) from None


def _wrong(where: str, wanted: str, value: object) -> ConfigError:
    return ConfigError(f"{where}: {wanted[:1].lower()}{wanted[1:]}, found {repr(value)[:TEXT_MAX]}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError(f"a field is given twice, among {', '.join(sorted(fields))[:TEXT_MAX]}")
    return fields


def _cache(fields: CacheFields) -> Cache:
    parts = enumerate(fields.components)
    components = tuple(_component(part, f"spec.cache.components[{index}]") for index, part in parts)
    if sum(size(component.layers) for component in components) > LAYERS_HELD_MAX:
        raise ConfigError(f"spec.cache.components: expected at most {LAYERS_HELD_MAX} layers together")
    try:
        return Cache(fields.num_layers, components)
    except ConfigError as cause:
        raise ConfigError(f"spec.cache: {str(cause)[:TEXT_MAX]}") from None


def _component(fields: ComponentFields, where: str) -> Component:
    names = [name for name, _ in fields.dims]
    if len(set(names)) != len(names) or set(names) & set(AXES):
        wanted = f"expected dims with names of their own, none of {', '.join(AXES)}"
        raise _wrong(f"{where}.dims", wanted, names)
    kind, window = fields.extent
    if (kind == "window") != (window > 0):
        raise _wrong(f"{where}.extent[1]", "expected a window of 1 or more, and 0 for others", window)
    extent: Extent = Window(window) if kind == "window" else Full() if kind == "full" else State()
    return Component(
        **msgspec.structs.asdict(fields)
        | {
            "units": fields.units and Units(*fields.units),
            "dims": tuple(Dim(*dim) for dim in fields.dims),
            "extent": extent,
            "dtype": fields.dtype and _dtype(fields.dtype, f"{where}.dtype"),
        }
    )


def _dtype(name: str, where: str) -> str:
    if name not in ITEM_BYTES:
        raise _wrong(where, f"expected one of {', '.join(ITEM_BYTES)}", name)
    return name


def _storage(fields: StorageFields, where: str) -> Storage:
    if len(dict(fields.num_pages)) != len(fields.num_pages):
        raise _wrong(f"{where}.num_pages", "expected a list that names each group once", fields.num_pages)
    _dtype(fields.dtype, f"{where}.dtype")
    declared = () if fields.placements is UNSET else fields.placements
    placed = tuple(DeclaredPlacement(**msgspec.structs.asdict(placement)) for placement in declared)
    try:
        return Storage(**msgspec.structs.asdict(fields) | {"placements": placed})
    except ConfigError as cause:
        raise ConfigError(f"{where}: {str(cause)[:TEXT_MAX]}") from None


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
