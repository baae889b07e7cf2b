"""Caches, cut down to what the tests of models compare."""

from typing import Any

from baton.plan.cache import Cache, Component


def brief(component: Component) -> tuple[Any, ...]:
    """Layers, units, their name, dims, window and pinned type."""
    units = component.units
    return (
        component.layers,
        units.count if units else None,
        units.name if units else None,
        tuple(dim.size for dim in component.dims),
        component.extent.window,
        component.dtype,
    )


def briefs(cache: Cache) -> dict[str, tuple[Any, ...]]:
    return {component.name: brief(component) for component in cache.components}


def layers_of(cache: Cache, name: str) -> tuple[tuple[int, int], ...]:
    return cache.by_name[name].layers
