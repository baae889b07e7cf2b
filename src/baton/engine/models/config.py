"""A Hugging Face config with a family's defaults, read with checks before any weight is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.plan.models.fields import Fields, shown

POSITIONS_MAX = 1 << 28


@dataclass(frozen=True, slots=True)
class ModelFields(Fields):
    """Fields with the further types that a model, beyond its cache, is described by."""

    def real(self, name: str) -> float:
        """A number that the config must have."""
        value = self.values.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.refusal(f"{name} is {shown(value)}; it must be a number")
        return float(value)

    def positive(self, name: str) -> float:
        """A number above 0 that the config must have."""
        value = self.real(name)
        if not 0 < value < float("inf"):
            raise self.refusal(f"{name} is {shown(value)}; it must be above 0")
        return value

    def numbers(self, name: str) -> tuple[int, ...]:
        """Whole numbers; one alone counts as a list of one, and none as an empty list."""
        value = self.values.get(name)
        listed = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
            raise self.refusal(f"{name} is {shown(value)}; it must be whole numbers")
        return tuple(listed)

    def mapping(self, name: str) -> Mapping[str, object]:
        """A JSON object, empty where the config has none."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.refusal(f"{name} is {shown(value)}; it must be a JSON object")
        return value

    def require(self, name: str, *allowed: object) -> None:
        """Refuses a field whose value changes the model in a way that is not built here."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            listed = " or ".join(shown(choice) for choice in allowed) or "absent"
            raise self.refusal(f"{name} is {shown(value)}, which is not supported; it must be {listed}")

    def check_context(self, context_max: int) -> None:
        """Raises ConfigError where no sequence may be that long."""
        if context_max > self.max_positions:
            raise self.refusal(
                f"the maximum context of {context_max} is beyond max_position_embeddings; "
                f"use at most {self.max_positions}"
            )

    @property
    def max_positions(self) -> int:
        """max_position_embeddings: no sequence may be longer."""
        return self.number("max_position_embeddings", POSITIONS_MAX)
