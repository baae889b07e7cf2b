"""Whether two sides speak of the same cache: checked once per pair, refused in words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from baton.errors import LayoutError
from baton.plan.cache import Component
from baton.plan.ownership import Spec, box, placements
from baton.plan.ranges import Range, intersection, text


def check_component(source: Spec, target: Spec, component: Component) -> None:
    """Raises LayoutError unless the source can give what the target calls `component`."""
    given = source.cache.by_name.get(component.name)
    if given is None:
        raise _refusal(source, target, component.name, "the target needs it, the source does not cache it")
    unequal = [
        (what, mine, theirs)
        for what, mine, theirs in (
            ("number of units", given.num_units, component.num_units),
            ("unit", given.units and given.units.name, component.units and component.units.name),
            ("sizes of one unit", _sizes(given), _sizes(component)),
            ("window", given.extent.window, component.extent.window),
            ("token dim", given.extent.has_tokens, component.extent.has_tokens),
        )
        if mine != theirs
    ]
    if unequal:
        what, mine, theirs = unequal[0]
        raise _refusal(source, target, component.name, f"{what} differs: source {mine}, target {theirs}")
    if intersection(given.layers, component.layers) != component.layers:
        raise _refusal(
            source,
            target,
            component.name,
            f"the target needs layers {text(component.layers)}, the source has {text(given.layers)}",
        )
    _check_storage(source, target, component)


def _sizes(component: Component) -> str:
    return " x ".join(f"{dim.size} {dim.name}" for dim in component.dims)


def _refusal(source: Spec, target: Spec, component: str, reason: str) -> LayoutError:
    return LayoutError(
        reason, component=component, sides=f"source {source.layout} and target {target.layout}"
    )


def _check_storage(source: Spec, target: Spec, component: Component) -> None:
    if not component.extent.has_tokens:
        return
    mine, theirs = source.storage, target.storage
    if mine.granule != theirs.granule:
        reason = f"granules differ: source {mine.granule}, target {theirs.granule} tokens"
        raise _refusal(source, target, component.name, reason)
    if mine.granule == 1:
        return
    for what, left, right in (
        ("page sizes", mine.page_tokens, theirs.page_tokens),
        ("dtypes", mine.dtype_of(component), theirs.dtype_of(component)),
    ):
        if left != right:
            reason = (
                f"a granule of {mine.granule} tokens moves as it is, but {what} differ: {left} and {right}"
            )
            raise _refusal(source, target, component.name, reason)


def check_granules(source: Spec, target: Spec, ends: Iterable[tuple[int, int, str, Range]]) -> None:
    """Raises LayoutError where tokens that only move together lie differently on the two sides."""
    if source.storage.granule == 1:
        return
    for giver, taker, name, units in ends:
        if not target.cache.by_name[name].extent.has_tokens:
            continue
        if _inside(source, giver, name, "source") != _inside(target, taker, name, "target"):
            raise _refusal(source, target, name, "the layout inside a granule differs")
        if not (
            _can_cut(source, giver, name, units, "source") and _can_cut(target, taker, name, units, "target")
        ):
            raise _refusal(
                source, target, name, "units lie inside a granule and cannot be cut; use hnd storage"
            )


@lru_cache(maxsize=65_536)
def _inside(spec: Spec, rank: int, name: str, side: str) -> tuple[int, ...]:
    strides = placements(spec, rank, side)[name].strides
    dims = [dim.name for dim in spec.cache.by_name[name].dims]
    return tuple(strides[axis] for axis in ["token", *dims])


def _can_cut(spec: Spec, rank: int, name: str, units: Range, side: str) -> bool:
    component = spec.cache.by_name[name]
    strides = placements(spec, rank, side)[name].strides
    is_outside = strides["unit"] >= strides["token"] * spec.storage.granule
    return is_outside or box(spec, component, rank, side).units == units


__all__ = ["check_component", "check_granules"]
