"""Layers of a draft model (MTP, EAGLE): any other kind, under names of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from baton.plan.cache import Component
from baton.plan.kinds.base import Kind
from baton.plan.ranges import Ranges, to_ids


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft layers that cache what `kind` says; the i-th of `layers` is draft.i."""

    kind: Kind

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """draft.i.NAME for every component of the inner kind, one layer each."""
        return tuple(
            replace(part, name=f"draft.{i}.{part.name}", bundle=f"draft.{i}.{part.bundle}")
            for i, layer in enumerate(to_ids(layers))
            for part in self.kind.components(((layer, layer + 1),))
        )
