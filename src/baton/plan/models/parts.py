"""Stretches of layers, and how they stack into one cache.

A part numbers its layers from 0. Stacked, the main parts follow one another; draft parts follow the last main
layer wherever they stand in the list, because a draft runs after the model and on its last stage.

Components that are stored together keep one shape over all their layers. So a bundle that comes twice with
equal shapes becomes one bundle on more layers, and one that comes with another shape becomes a bundle of its
own, whose members carry a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from baton.errors import ConfigError
from baton.plan.cache import Cache, Component
from baton.plan.kinds import Draft, Kind
from baton.plan.ranges import Range, Ranges, intersection, merged, size

ELEMENTS_MAX = 1 << 40

Placed: TypeAlias = tuple[Kind, Ranges]
"""A kind and the layers that keep it."""


@dataclass(frozen=True, slots=True)
class Part:
    """One stretch of layers, numbered from 0, and the parameters that one token uses where known."""

    num_layers: int
    kinds: tuple[Placed, ...]
    is_draft: bool = False
    active_parameters: float | None = None


@dataclass(frozen=True, slots=True)
class Mixed:
    """Several kinds, each on its own layers, seen as one."""

    kinds: tuple[Placed, ...]

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """What those of the kinds keep that are on any of `layers`."""
        return tuple(
            component
            for kind, on in self.kinds
            if (common := intersection(layers, on))
            for component in kind.components(common)
        )


def draft_of(part: Part) -> Part:
    """A draft of one layer that keeps what a model's last layer does, as those trained with a model do."""
    last = ((part.num_layers - 1, part.num_layers),)
    kinds = tuple((kind, ((0, 1),)) for kind, on in part.kinds if intersection(last, on))
    return Part(1, kinds, is_draft=True)


def stack(parts: Sequence[Part]) -> Cache:
    """The cache of a model that consists of `parts`."""
    num_layers = sum(part.num_layers for part in parts if not part.is_draft)
    if num_layers == 0:
        raise ConfigError(
            "a model of draft layers only has nothing to draft for; add a part that is not a draft"
        )
    main = _placed((part for part in parts if not part.is_draft), start=0)
    draft = _placed((part for part in parts if part.is_draft), start=num_layers)
    num_all = num_layers + sum(part.num_layers for part in parts if part.is_draft)
    drafted = Draft(Mixed(draft)).components(((num_layers, num_all),)) if draft else ()
    components = [*_unified(main), *drafted]
    for component in components:
        _check_size(component)
    return Cache(num_layers, tuple(sorted(components, key=lambda component: component.name)))


def _placed(parts: Iterable[Part], start: int) -> tuple[Placed, ...]:
    """The kinds of all parts, on global layer ids that begin at `start`."""
    placed: list[Placed] = []
    for part in parts:
        placed += [(kind, _shifted(layers, start)) for kind, layers in part.kinds]
        start += part.num_layers
    return tuple(placed)


def _shifted(layers: Ranges, by: int) -> Ranges:
    return tuple((start + by, stop + by) for start, stop in layers)


def _unified(placed: Iterable[Placed]) -> Iterator[Component]:
    """One set of components per bundle and shape, each on all the layers that have it."""
    found: dict[str, dict[tuple[Component, ...], list[Range]]] = {}
    for kind, layers in placed:
        for name, members in _bundles(kind.components(layers)).items():
            found.setdefault(name, {}).setdefault(tuple(members), []).extend(layers)
    for shapes in found.values():
        for i, (shape, ranges) in enumerate(shapes.items()):
            suffix = f".{i}" if i else ""
            for component in shape:
                yield replace(
                    component,
                    name=component.name + suffix,
                    bundle=component.bundle + suffix,
                    layers=merged(ranges),
                )


def _bundles(components: Iterable[Component]) -> dict[str, list[Component]]:
    """Components by bundle, without their layers, so that equal shapes are equal."""
    bundles: dict[str, list[Component]] = {}
    for component in components:
        bundles.setdefault(component.bundle, []).append(replace(component, layers=()))
    return bundles


def _check_size(component: Component) -> None:
    """Sizes that are each possible can still have a product that no machine holds."""
    num_elements = size(component.layers) * component.num_units * component.num_elements
    if num_elements > ELEMENTS_MAX:
        raise ConfigError(
            f"component {component.name} has {num_elements} elements per entry over its layers, "
            f"at most {ELEMENTS_MAX} are possible; use smaller sizes"
        )
