"""Parts of a model: stretches of layers, how a spec spells one out, and how they stack into one cache.

A part numbers its layers from 0. Stacked, the main parts follow one another; draft parts follow the last main
layer wherever they stand in the list, because a draft runs after the model and on its last stage.

Components that are stored together keep one shape over all their layers. So a bundle that comes twice with
equal shapes becomes one bundle on more layers, and one that comes with another shape becomes a bundle of its
own, whose members carry a number.

A spec is `KIND:key=value,...`. The keys of a kind are the whole-number fields of its dataclass, so a new
kind is one row of FORMS. `layers` belongs to every kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, cast, get_type_hints

from baton.errors import ConfigError
from baton.plan.cache import DIM_MAX, Cache, Component
from baton.plan.kinds import Draft, Index, Kind, Latent, Paged, Recurrent
from baton.plan.models.fields import LAYERS_MAX, Placed, shown, suggestion
from baton.plan.ranges import Range, Ranges, intersection, merged, size

ELEMENTS_MAX = 1 << 40
# A draft layer is a set of components of its own, so a great many of them cost more than they could mean.
DRAFT_LAYERS_MAX = 1_000
DRAFT_PREFIX = "draft."
EXAMPLE = "paged:layers=32,heads=8,dim=128"

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class ModelPart:
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
        """What the kinds on any of `layers` store."""
        return tuple(
            component
            for kind, on in self.kinds
            if (common := intersection(layers, on))
            for component in kind.components(common)
        )


def draft_of(part: ModelPart) -> ModelPart:
    """A draft of one layer that keeps what a model's last attention does, as trained with a model."""
    attention = [(kind, on) for kind, on in part.kinds if not isinstance(kind, Recurrent)]
    num_layers = max((stop for _, on in attention for _, stop in on), default=0)
    last = ((num_layers - 1, num_layers),)
    kinds = tuple((kind, ((0, 1),)) for kind, on in attention if intersection(last, on))
    return ModelPart(1, kinds, is_draft=True)


def stack(parts: Sequence[ModelPart]) -> Cache:
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


def _placed(parts: Iterable[ModelPart], start: int) -> tuple[Placed, ...]:
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
    bundles: dict[str, dict[tuple[Component, ...], list[Range]]] = {}
    for kind, layers in placed:
        for name, members in _bundles(kind.components(layers)).items():
            bundles.setdefault(name, {}).setdefault(tuple(members), []).extend(layers)
    for shapes in bundles.values():
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


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind is written: its class, and keys that add a further kind of that size on the same layers."""

    kind: Callable[..., Kind]
    extras: Mapping[str, Callable[[int], Kind]] = field(default_factory=dict)

    def keys(self) -> dict[str, bool]:
        """The keys of the kind itself, and whether each is needed."""
        hints = get_type_hints(self.kind)
        return {
            parameter.name: parameter.default is MISSING
            for parameter in fields(cast(Any, self.kind))
            if hints[parameter.name] is int
        }


FORMS: dict[str, Form] = {
    "latent": Form(Latent, {"index": Index}),
    "paged": Form(Paged),
    "recurrent": Form(Recurrent),
}


def parse_spec(text: str) -> ModelPart:
    """The part that a spec describes."""
    name, _, options = text.partition(":")
    is_draft = name.startswith(DRAFT_PREFIX)
    form = FORMS.get(name.removeprefix(DRAFT_PREFIX))
    if form is None:
        close = suggestion(name.removeprefix(DRAFT_PREFIX), FORMS)
        raise ConfigError(
            f"unknown kind {shown(name)} in {shown(text)}{close}; "
            f"use one of {', '.join(FORMS)}, or one of them after {DRAFT_PREFIX!r}"
        )
    needed = form.keys()
    known = {"layers": True, **needed, **dict.fromkeys(form.extras, False)}
    limits = dict.fromkeys(known, DIM_MAX) | {"layers": DRAFT_LAYERS_MAX if is_draft else LAYERS_MAX}
    sizes = _parse_options(text, options, limits)
    missing = [key for key, is_needed in known.items() if is_needed and key not in sizes]
    if missing:
        raise ConfigError(f"{shown(text)} lacks {' and '.join(missing)}; {_help(name, known)}")
    num_layers = sizes["layers"]
    kinds = [form.kind(**{key: sizes[key] for key in needed if key in sizes})]
    kinds += [extra(sizes[key]) for key, extra in form.extras.items() if key in sizes]
    return ModelPart(num_layers, tuple((kind, ((0, num_layers),)) for kind in kinds), is_draft)


def _parse_options(text: str, options: str, limits: Mapping[str, int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for option in options.split(",") if options else []:
        key, separator, value = option.partition("=")
        if not separator:
            raise ConfigError(
                f"{shown(option)} in {shown(text)} is not of the form key=value, as in {EXAMPLE}"
            )
        if key not in limits:
            raise ConfigError(
                f"unknown key {shown(key)} in {shown(text)}{suggestion(key, limits)}; "
                f"use one of {', '.join(limits)}"
            )
        if key in sizes:
            raise ConfigError(f"key {shown(key)} comes twice in {shown(text)}; keep one of them")
        if not _NUMBER.fullmatch(value) or int(value) > limits[key]:
            raise ConfigError(
                f"{key} is {shown(value)} in {shown(text)}; "
                f"it must be a whole number from 1 to {limits[key]}, without sign or leading zeros"
            )
        sizes[key] = int(value)
    return sizes


def _help(name: str, known: Mapping[str, bool]) -> str:
    """The form of a kind, with optional keys in brackets."""
    keys = [f"{key}=N" if is_needed else f"[{key}=N]" for key, is_needed in known.items()]
    return f"write {name}:{','.join(keys)}"
