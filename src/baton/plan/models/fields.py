"""Fields of a Hugging Face config, read with checks, and what a model family is.

A field that is absent has the family's default, as `transformers` would fill it in; one that is null has
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TypeAlias

from baton.errors import ConfigError
from baton.plan.cache import DIM_MAX
from baton.plan.kinds import Kind
from baton.plan.ranges import Ranges, from_ids

LAYERS_MAX = 100_000
SHOWN_MAX = 80

Placed: TypeAlias = tuple[Kind, Ranges]
"""A kind and the layers that keep it."""


def shown(value: object) -> str:
    """The value as Python writes it, cut where it is long."""
    text = ascii(value)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` where a known name is close, or nothing."""
    close = get_close_matches(name[:SHOWN_MAX], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


@dataclass(frozen=True, slots=True)
class Fields:
    """The values of one config; `where` names it in messages."""

    where: str
    values: Mapping[str, object]

    def refusal(self, reason: str) -> ConfigError:
        """The error that says what is wrong with this config."""
        return ConfigError(f"{self.where}: {reason}")

    @property
    def num_layers(self) -> int:
        """num_hidden_layers, draft layers not counted."""
        return self.number("num_hidden_layers", LAYERS_MAX)

    def number(self, name: str, most: int = DIM_MAX, least: int = 1) -> int:
        """A whole number that the config must have."""
        value = self.number_or_none(name, most, least)
        if value is None:
            raise self.refusal(f"{name} is missing; give it as a whole number from {least} to {most}")
        return value

    def number_or_none(self, name: str, most: int = DIM_MAX, least: int = 1) -> int | None:
        """A whole number, or None where the config has none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.refusal(f"{name} is {shown(value)}; it must be a whole number from {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        """True or false, false where the config does not say."""
        value = self.values.get(name)
        if not isinstance(value, bool | None):
            raise self.refusal(f"{name} is {shown(value)}; it must be true or false")
        return bool(value)

    def choice(self, name: str, choices: Mapping[str, str]) -> str | None:
        """What `choices` maps the field's word to, or None where the config has none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(f"{name} is {shown(value)}; use one of {', '.join(choices)}")
        return choices[value]

    def per_layer(self, name: str, words: tuple[str, ...]) -> list[str] | None:
        """One of `words` for each layer, or None where the config has no such list."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != self.num_layers:
            raise self.refusal(
                f"{name} is {shown(value)}; it must list {self.num_layers} words, one per layer"
            )
        strange = next((word for word in value if word not in words), None)
        if strange is not None:
            raise self.refusal(f"{name} has {shown(strange)}; the layers known here are {', '.join(words)}")
        return value


def placed_by(words: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[Placed, ...]:
    """Each kind with the layers whose entry names it; kinds without layers are left out."""
    placed = []
    for word, kind in kinds.items():
        if layers := from_ids(i for i, layer_word in enumerate(words) if layer_word == word):
            placed.append((kind, layers))
    return tuple(placed)


Reader: TypeAlias = Callable[[Fields], tuple[Placed, ...]]


@dataclass(frozen=True, slots=True)
class CacheFamily:
    """Models that spell their cache alike: how it is read, and fields that configs may leave out."""

    read: Reader
    defaults: Mapping[str, object] = field(default_factory=dict)
