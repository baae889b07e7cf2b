"""Declared placements from strided views of a buffer, as an engine's tensors are.

An engine that allocated its cache has a tensor for each layer, or one for all: shape, strides and an offset
in some storage. `declare` names the axes of such views, compares their sizes with what the ranks of a stage
hold by the spec, and gives the placement. Nothing of torch is needed: a view is six numbers and two tuples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from baton.errors import ConfigError
from baton.plan.ownership import Spec, cuts
from baton.plan.ranges import size
from baton.plan.storage import DeclaredPlacement, Holding, axis_sizes


@dataclass(frozen=True, slots=True)
class TensorView:
    """A strided view of a buffer; the offset in bytes, the strides in elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @staticmethod
    def of(tensor: Any) -> TensorView:
        """The view that a torch tensor is of its storage."""
        item = tensor.element_size()
        return TensorView(tensor.storage_offset() * item, tuple(tensor.shape), tuple(tensor.stride()), item)


def declare(
    spec: Spec,
    component: str,
    axes: Sequence[str],
    views: Sequence[TensorView],
    *,
    buffer: str,
    buffer_bytes: int,
    stage: int = 0,
    tp: int | None = None,
) -> DeclaredPlacement:
    """The placement of a component on the ranks of a stage, from views of one buffer.

    `axes` names the axes of a view: page, unit, token and the component's dims. There is a view for each
    layer of the stage, ascending by layer id, or one view whose axes include layer. Axes at the end that are
    not named are the inside of an opaque page and have to be dense; in a state, they are its dims.
    """
    part = spec.cache.by_name.get(component)
    if part is None:
        known = ", ".join(spec.cache.by_name)
        raise ConfigError(f"there is no component {component!r} in the cache; it has {known}")
    pieces = cuts(spec, part, "declared")
    if not 0 <= stage < len(pieces.layers) or not 0 <= (tp or 0) < len(pieces.units):
        raise ConfigError(f"{spec.layout} has no stage {stage} with tp coordinate {tp or 0}")
    first, last = pieces.units[tp or 0]
    num_layers = size(pieces.layers[stage])
    held = Holding(part, num_layers, last - first)
    where = f"{component} on stage {stage}"
    if not num_layers:
        raise ConfigError(f"{where} of {spec.layout}: the stage holds no layers of it; declare nothing there")
    if "layer" not in axes and len(views) != num_layers:
        raise ConfigError(f"{where}: {len(views)} views for {num_layers} layers; give one for each")
    if "layer" in axes and len(views) != 1:
        raise ConfigError(f"{where}: {len(views)} views with an axis for layers; give one")
    if len({(view.shape, view.strides, view.item_bytes) for view in views}) != 1:
        raise ConfigError(
            f"{where}: the views of its layers differ in shape or strides; make layers that differ "
            "components of their own"
        )
    view = views[0]
    strides = _strides(where, axes, view, axis_sizes(spec.storage, held))
    offsets = [view.offset for view in views]
    offset = min(offsets)
    layer_offsets: tuple[int, ...] = ()
    if len(offsets) > 1:
        steps = {b - a for a, b in pairwise(offsets)}
        if len(steps) == 1 and min(steps) > 0:
            strides = {"layer": steps.pop(), **strides}
        else:
            layer_offsets = tuple(at - offset for at in offsets)
    return DeclaredPlacement(
        component=component,
        buffer=buffer,
        buffer_bytes=buffer_bytes,
        offset=offset,
        strides=tuple(strides.items()),
        layer_offsets=layer_offsets,
        stage=stage,
        tp=tp,
    )


def _strides(where: str, axes: Sequence[str], view: TensorView, sizes: dict[str, int]) -> dict[str, int]:
    """Strides in bytes of the named axes that have more than one step."""
    if not len(set(axes)) == len(axes) <= len(view.shape) == len(view.strides):
        raise ConfigError(
            f"{where}: axes {', '.join(axes)} for a view of shape {view.shape} and strides {view.strides}; "
            "name each axis once, from the first on"
        )
    for axis, length in zip(axes, view.shape, strict=False):
        if axis not in sizes:
            raise ConfigError(f"{where}: there is no axis {axis!r}; use {', '.join(sizes)}")
        # Pages past those of the pools are the engine's own.
        if length < sizes[axis] if axis == "page" else length != sizes[axis]:
            raise ConfigError(
                f"{where}: a view of shape {view.shape} has {length} along {axis}, the spec {sizes[axis]}"
            )
    missing = [axis for axis, count in sizes.items() if count > 1 and axis not in ("layer", *axes)]
    num_inside = 1
    for count, stride in reversed(list(zip(view.shape, view.strides, strict=True))[len(axes) :]):
        if count > 1 and stride != num_inside:
            raise ConfigError(
                f"{where}: axes without a name have to be dense, found strides {view.strides} of shape "
                f"{view.shape}"
            )
        num_inside *= count
    num_missing = 1
    for axis in missing:
        num_missing *= sizes[axis]
    if num_missing != num_inside:
        raise ConfigError(
            f"{where}: axes without a name hold {num_inside} elements, but {num_missing} of "
            f"{', '.join(missing) or 'nothing'} are left"
        )
    return {
        axis: stride * view.item_bytes
        for axis, count, stride in zip(axes, view.shape, view.strides, strict=False)
        if count > 1
    }
