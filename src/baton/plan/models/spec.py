"""Specs: `KIND:key=value,...` spells a stretch of layers out.

The keys of a kind are the whole-number fields of its dataclass, so a new kind is one row of FORMS. `layers`
belongs to every kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast, get_type_hints

from baton.errors import ConfigError
from baton.plan.cache import DIM_MAX
from baton.plan.kinds import Index, Kind, Latent, Paged, Recurrent
from baton.plan.models.parts import Part
from baton.plan.models.quoting import shown, suggestion

LAYERS_MAX = 100_000
# A draft layer is a set of components of its own, so a great many of them cost more than they could mean.
DRAFT_LAYERS_MAX = 1_000
DRAFT_PREFIX = "draft."
EXAMPLE = "paged:layers=32,heads=8,dim=128"

_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind is written: its class, and keys that add a further kind of that size on the same layers."""

    kind: Callable[..., Kind]
    extras: Mapping[str, Callable[[int], Kind]] = field(default_factory=dict)

    def keys(self) -> dict[str, bool]:
        """The keys of the kind itself, and whether each is needed."""
        hints = get_type_hints(self.kind)
        return {
            each.name: each.default is MISSING
            for each in fields(cast(Any, self.kind))
            if hints[each.name] is int
        }


FORMS: dict[str, Form] = {
    "latent": Form(Latent, {"index": Index}),
    "paged": Form(Paged),
    "recurrent": Form(Recurrent),
}


def parse_spec(text: str) -> Part:
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
    return Part(num_layers, tuple((kind, ((0, num_layers),)) for kind in kinds), is_draft)


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
