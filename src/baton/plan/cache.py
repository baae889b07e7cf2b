"""The components of a model's cache: named tensors over global layer ids.

A component is one logical tensor. Its dims are layer, then tokens (unless it is a state, which has one
entry per request), then units where it has them (the thing that tp cuts), then the dims inside one unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeAlias

from baton.errors import ConfigError
from baton.plan.ranges import Range, Ranges, merged

DIM_MAX = 1 << 24


@dataclass(frozen=True, slots=True)
class Full:
    """One entry per token of the prompt."""

    has_tokens = True
    window = None

    def num_entries(self, num_tokens: int) -> int:
        """Entries along the token dim."""
        return num_tokens

    def wanted(self, num_tokens: int, num_held: int) -> Range:
        """The tokens that a target without the first `num_held` needs."""
        return (num_held, num_tokens)


@dataclass(frozen=True, slots=True)
class Window:
    """One entry per token, of which only the last `window` matter."""

    window: int
    has_tokens = True

    def num_entries(self, num_tokens: int) -> int:
        """Entries along the token dim; slots count from token 0, whatever the window."""
        return num_tokens

    def wanted(self, num_tokens: int, num_held: int) -> Range:
        """The window, less what is held of it."""
        return (max(0, num_held, num_tokens - self.window), num_tokens)


@dataclass(frozen=True, slots=True)
class State:
    """One entry per request: what a recurrent layer carries."""

    has_tokens = False
    window = None

    def num_entries(self, num_tokens: int) -> int:
        """One, whatever the prompt."""
        return 1

    def wanted(self, num_tokens: int, num_held: int) -> Range:
        """Always all of it: a held prefix says nothing about the state at the end."""
        return (0, 1)


Extent: TypeAlias = Full | Window | State


@dataclass(frozen=True, slots=True)
class Units:
    """What tp cuts a component by."""

    count: int
    name: str = "head"


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim inside one unit."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Component:
    """One logical tensor of a cache.

    `group` names the page table that its pages are found in, `bundle` the components it is stored beside
    where storage is fused, `place` its turn among them. `dtype` pins an element type that does not follow
    the side's.
    """

    name: str
    layers: Ranges
    units: Units | None
    dims: tuple[Dim, ...]
    extent: Extent
    group: str
    bundle: str
    place: int = 0
    dtype: str | None = None

    @property
    def num_elements(self) -> int:
        """Elements of one unit (of the whole where there are no units), per layer and entry."""
        return prod(dim.size for dim in self.dims)

    @property
    def num_units(self) -> int:
        """Units, counting a component without them as one."""
        return self.units.count if self.units else 1


@dataclass(frozen=True)
class Cache:
    """A model's whole cache; layers from `num_layers` on are draft layers and live on the last stage."""

    num_layers: int
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        _check_cache(self)

    @cached_property
    def by_name(self) -> dict[str, Component]:
        """Components by their names."""
        return {component.name: component for component in self.components}

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The page tables that a rank keeps, sorted."""
        return tuple(sorted({component.group for component in self.components}))

    @cached_property
    def _hash(self) -> int:
        return hash((self.num_layers, self.components))

    def __hash__(self) -> int:
        return self._hash


def _check_cache(cache: Cache) -> None:
    names = [component.name for component in cache.components]
    if not names:
        raise ConfigError("a cache needs at least one component")
    if names != sorted(set(names)):
        raise ConfigError(f"component names must be unique and sorted, found {', '.join(names)}")
    if not 1 <= cache.num_layers <= DIM_MAX:
        raise ConfigError(f"number of layers must be 1 to {DIM_MAX}, found {cache.num_layers}")
    for component in cache.components:
        _check_component(component)


def _check_component(component: Component) -> None:
    sizes = [dim.size for dim in component.dims] + [component.num_units]
    if isinstance(component.extent, Window):
        sizes.append(component.extent.window)
    if any(not 1 <= size <= DIM_MAX for size in sizes):
        raise ConfigError(f"component {component.name}: sizes must be 1 to {DIM_MAX}, found {sizes}")
    if not component.layers or component.layers != merged(component.layers):
        raise ConfigError(f"component {component.name}: layers must be sorted, disjoint and not empty")
