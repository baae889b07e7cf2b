"""Declared placements: completed by the sizes of the spec, and checked.

Theory. What a component occupies in its buffer is a region: bytes at start + i * stride + j * stride + ... +
[0, length). Its strides have to nest: one step of an axis reaches over everything inside of it. So a region
does not meet itself, and whether two regions meet is decided from their outermost axes inwards. Where both
have the same stride, only the difference of the two indices matters, and few differences bring them together
at all; where one stride is larger, that axis is taken apart at the places that the other region reaches. No
page is ever looked at by itself.

Components of one group never share a byte. Those of different groups may, if page p of one shares bytes with
page p of the other and with no other page: then the groups take their pages from one page space, and an
engine that gives each page of it to one group at a time keeps them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from baton.errors import ConfigError
from baton.plan.dtypes import item_bytes
from baton.plan.ranges import Range
from baton.plan.steps import STAGING
from baton.plan.storage import DeclaredPlacement, Holding, Placement, Storage, axis_sizes

STEPS_MAX = 1 << 16
"""Pairs of patterns that the check of one spec compares; placements that need more are refused."""

Axis: TypeAlias = tuple[int, int]
"""How many steps, and how many bytes each."""


# From a declaration to a placement.


def resolve_declared(storage: Storage, declared: DeclaredPlacement, held: Holding) -> Placement:
    """The placement of a component on ranks that hold so much of it; ConfigError where it cannot be one."""
    component = held.component
    item = item_bytes(storage.dtype_of(component))
    sizes = axis_sizes(storage, held)
    strides = dict(declared.strides)
    _check_numbers(declared, strides, sizes, item)
    _check_layers(declared, held.num_layers)
    dims = [dim.name for dim in component.dims if dim.size > 1]
    if 0 < sum(name in strides for name in dims) < len(dims):
        raise ConfigError(
            f"{declared}: give strides for all of {', '.join(dims)}, or for none if they are dense"
        )
    reach = item
    for dim in reversed(component.dims):
        strides.setdefault(dim.name, reach)
        reach = max(reach, strides[dim.name] * dim.size)
    page_entries = storage.page_entries(component)
    if component.extent.has_tokens:
        if "token" not in strides and page_entries > 1:
            _check_opaque(storage, declared, dims)
            if "unit" not in strides:
                strides["unit"] = reach
                reach *= held.num_units
        strides.setdefault("token", reach)
        reach = max(reach, strides["token"] * page_entries)
    for axis in ("unit", "page") if declared.layer_offsets else ("unit", "page", "layer"):
        if axis not in strides and sizes[axis] > 1:
            raise ConfigError(f"{declared}: there are {sizes[axis]} along {axis}, so it needs a stride")
        strides.setdefault(axis, reach)
        reach = max(reach, strides[axis] * sizes[axis])
    return Placement(
        buffer=declared.buffer,
        buffer_bytes=declared.buffer_bytes,
        offset=declared.offset,
        item_bytes=item,
        page_entries=page_entries,
        strides=strides,
        layer_offsets=declared.layer_offsets,
    )


def _check_numbers(
    declared: DeclaredPlacement, strides: Mapping[str, int], sizes: Mapping[str, int], item: int
) -> None:
    if declared.buffer == STAGING:
        raise ConfigError(f"{declared}: staging memory is called {STAGING!r}; give the buffer another name")
    if len(strides) != len(declared.strides) or not strides.keys() <= sizes.keys():
        axes = ", ".join(axis for axis, _ in declared.strides)
        raise ConfigError(f"{declared}: strides for {axes}; name each of {', '.join(sizes)} at most once")
    for axis, stride in strides.items():
        if stride <= 0:
            raise ConfigError(
                f"{declared}: a stride of {stride} bytes along {axis}; strides are 1 byte or more"
            )
    for quantity, value in (
        ("its offset", declared.offset),
        *((f"its stride along {axis}", stride) for axis, stride in strides.items()),
        *((f"the offset of its layer {i}", at) for i, at in enumerate(declared.layer_offsets)),
    ):
        if value < 0 or value % item:
            raise ConfigError(
                f"{declared}: {quantity} is {value} bytes, not a multiple of elements of {item}"
            )


def _check_layers(declared: DeclaredPlacement, num_layers: int) -> None:
    if not declared.layer_offsets:
        return
    if "layer" in dict(declared.strides):
        raise ConfigError(f"{declared}: give a stride along layer or layer_offsets, not both")
    if len(declared.layer_offsets) != num_layers:
        raise ConfigError(
            f"{declared}: {len(declared.layer_offsets)} layer_offsets for {num_layers} layers of the stage"
        )


def _check_opaque(storage: Storage, declared: DeclaredPlacement, dims: Sequence[str]) -> None:
    if storage.granule != storage.page_tokens:
        raise ConfigError(
            f"{declared}: without a stride along token its pages are opaque and only move whole; give the "
            f"stride, or a granule of {storage.page_tokens} tokens, the page, instead of {storage.granule}"
        )
    if given := [name for name in dims if name in dict(declared.strides)]:
        raise ConfigError(f"{declared}: opaque pages, but strides along {', '.join(given)}; give token's too")


# From a placement to the bytes that it occupies.


@dataclass(frozen=True, slots=True)
class PlacedRegion:
    """What a component, or one layer of it, occupies in its buffer; `axes` are all but pages."""

    name: str
    group: str
    start: int
    pages: Axis
    axes: tuple[Axis, ...]
    length: int

    @property
    def stop(self) -> int:
        """The end of all pages."""
        return self.first_stop + (self.pages[0] - 1) * self.pages[1]

    @property
    def first_stop(self) -> int:
        """The end of the first page."""
        return self.start + _extent(self.axes, self.length)

    def pattern(self) -> _Pattern:
        """All pages."""
        return _Pattern(self.start, _ordered([self.pages, *self.axes]), self.length)

    def first_page(self) -> _Pattern:
        """The first page alone."""
        return _Pattern(self.start, self.axes, self.length)

    def later_pages(self) -> _Pattern | None:
        """All pages but the first."""
        count, stride = self.pages
        if count < 2:
            return None
        return _Pattern(self.start + stride, _ordered([(count - 1, stride), *self.axes]), self.length)


def _ordered(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    return tuple(sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1]))


def _extent(axes: Sequence[Axis], length: int) -> int:
    return sum((count - 1) * stride for count, stride in axes) + length


def regions_of(
    declared: DeclaredPlacement, at: Placement, held: Holding, storage: Storage, layers: Sequence[int]
) -> list[PlacedRegion]:
    """What a placement occupies; ConfigError where its strides do not nest or it leaves its buffer."""
    sizes = axis_sizes(storage, held)
    if not sizes["page"]:
        return []
    if at.layer_offsets:
        del sizes["layer"]
    inside, reach = "an element", at.item_bytes
    length = at.item_bytes
    axes: list[Axis] = []
    for axis, count in sorted(sizes.items(), key=lambda entry: at.strides[entry[0]]):
        stride = at.strides[axis]
        if count < 2:
            continue
        if stride < reach:
            raise ConfigError(
                f"{declared} overlaps itself: it is {stride} bytes from one {axis} to the next, but {inside} "
                f"inside reaches over {reach} bytes"
            )
        inside, reach = axis, reach + (count - 1) * stride
        if axis != "page":
            if stride == length and not axes:
                length *= count
            else:
                axes.append((count, stride))
    stop = at.offset + max(at.layer_offsets, default=0) + reach
    if stop > at.buffer_bytes:
        raise ConfigError(
            f"{declared} reaches to byte {stop} of buffer {at.buffer!r}, which has {at.buffer_bytes} bytes"
        )
    component = held.component
    pages = (sizes["page"], at.strides["page"])
    whole = PlacedRegion(component.name, component.group, at.offset, pages, _ordered(axes), length)
    if not at.layer_offsets:
        return [whole]
    return [
        replace(whole, name=f"{component.name} (layer {layer})", start=at.offset + offset)
        for layer, offset in zip(layers, at.layer_offsets, strict=True)
    ]


# Whether regions share bytes.


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Bytes at start + i * stride + ... + [0, length), the largest stride first."""

    start: int
    axes: tuple[Axis, ...]
    length: int

    @property
    def stop(self) -> int:
        return self.start + _extent(self.axes, self.length)

    @property
    def stride(self) -> int:
        return self.axes[0][1] if self.axes else 0

    def step(self, index: int) -> _Pattern:
        """One step of the outermost axis."""
        return _Pattern(self.start + index * self.stride, self.axes[1:], self.length)


class OverlapCheck:
    """Compares the regions of buffers, with a limit on the work for all of them together."""

    def __init__(self) -> None:
        self._num_steps = 0

    def overlays(self, buffer: str, regions: Sequence[PlacedRegion]) -> set[tuple[str, str]]:
        """Pairs of groups that share bytes; ConfigError where regions share bytes that they must not."""
        return set(self._overlays(buffer, regions, is_framed=False))

    def _overlays(
        self, buffer: str, regions: Sequence[PlacedRegion], *, is_framed: bool
    ) -> Iterator[tuple[str, str]]:
        for cluster in _clusters(regions):
            if not is_framed and _has_frames(cluster):
                # Whatever is in page p of any of them lies between the same two bytes: one page is enough.
                first_pages = [replace(region, pages=(1, 1)) for region in cluster]
                yield from self._overlays(buffer, first_pages, is_framed=True)
                continue
            for region, other in _meeting(cluster):
                shared = self._shared(region.pattern(), other.pattern())
                if shared is None:
                    continue
                if region.group == other.group:
                    raise ConfigError(
                        f"{region.name} and {other.name} of group {region.group!r} overlap in buffer "
                        f"{buffer!r}: bytes {shared[0]} to {shared[1]} belong to both; give each bytes "
                        "of its own"
                    )
                self._check_aligned(buffer, region, other)
                yield (region.group, other.group)

    def _check_aligned(self, buffer: str, region: PlacedRegion, other: PlacedRegion) -> None:
        """Raises ConfigError where a page of one shares bytes with another page of the other."""
        for left, right in ((region, other), (other, region)):
            later = left.later_pages()
            if later is None:
                continue
            is_alike = left.pages[1] == right.pages[1] or right.pages[0] == 1
            shared = self._shared(later, right.first_page() if is_alike else right.pattern())
            if shared is not None:
                raise ConfigError(
                    f"{region.name} of group {region.group!r} and {other.name} of group {other.group!r} "
                    f"overlay each other in buffer {buffer!r}, but not page by page: bytes {shared[0]} to "
                    f"{shared[1]} are in unlike pages; groups that share memory need equal page strides and "
                    "pages that begin together"
                )

    def _shared(self, pattern: _Pattern, other: _Pattern) -> Range | None:
        """Some bytes that both patterns have, or None where there are none."""
        self._num_steps += 1
        if self._num_steps > STEPS_MAX:
            raise ConfigError(
                f"the placements are too intricate: more than {STEPS_MAX} steps to show that they do "
                "not overlap; give layers one stride where they have one, or declare fewer components"
            )
        if pattern.stop <= other.start or other.stop <= pattern.start:
            return None
        if not pattern.axes and not other.axes:
            return (max(pattern.start, other.start), min(pattern.stop, other.stop))
        if pattern.stride < other.stride:
            pattern, other = other, pattern
        inner = pattern.step(0)
        if pattern.stride == other.stride:
            # Only the difference of the two indices matters.
            other_inner = other.step(0)
            lowest = max(1 - other.axes[0][0], -(-(other.start - inner.stop + 1) // pattern.stride))
            highest = min(pattern.axes[0][0] - 1, (other_inner.stop - 1 - pattern.start) // pattern.stride)
            pairs = ((max(d, 0), max(-d, 0)) for d in range(lowest, highest + 1))
            tries = ((pattern.step(i), other.step(j)) for i, j in pairs)
        else:
            lowest = max(0, -(-(other.start - inner.stop + 1) // pattern.stride))
            highest = min(pattern.axes[0][0] - 1, (other.stop - 1 - pattern.start) // pattern.stride)
            tries = ((pattern.step(i), other) for i in range(lowest, highest + 1))
        return next((shared for pair in tries if (shared := self._shared(*pair)) is not None), None)


def _clusters(regions: Sequence[PlacedRegion]) -> Iterator[list[PlacedRegion]]:
    """Regions whose bounds are connected, at least two together."""
    cluster: list[PlacedRegion] = []
    stop = 0
    for region in sorted(regions, key=lambda region: region.start):
        if cluster and region.start >= stop:
            if len(cluster) > 1:
                yield cluster
            cluster = []
        stop = max(stop, region.stop) if cluster else region.stop
        cluster.append(region)
    if len(cluster) > 1:
        yield cluster


def _has_frames(cluster: Sequence[PlacedRegion]) -> bool:
    """Whether page p of every region lies in the p-th of frames as long as the page stride."""
    strides = {region.pages[1] for region in cluster if region.pages[0] > 1}
    span = max(region.first_stop for region in cluster) - min(region.start for region in cluster)
    return len(strides) == 1 and span <= min(strides)


def _meeting(cluster: Sequence[PlacedRegion]) -> Iterator[tuple[PlacedRegion, PlacedRegion]]:
    """Pairs whose bounds meet; the cluster ascends by start."""
    active: list[PlacedRegion] = []
    for region in cluster:
        active = [other for other in active if other.stop > region.start]
        for other in active:
            yield other, region
        active.append(region)
