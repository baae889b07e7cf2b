"""Keys and values per token and head: multi-head and grouped-query attention, with or without a window."""

from __future__ import annotations

from dataclasses import dataclass

from baton.plan.cache import Component, Dim, Units
from baton.plan.kinds.base import reach
from baton.plan.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Paged:
    """K and V heads; `vdim` is V's channel count where it differs, a window of 0 means none."""

    heads: int
    dim: int
    vdim: int = 0
    window: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """k and v, named after their window where they have one."""
        extent, suffix = reach(self.window)
        return tuple(
            Component(
                name=name + suffix,
                layers=layers,
                units=Units(self.heads),
                dims=(Dim("channel", channels),),
                extent=extent,
                group="tokens" + suffix,
                bundle="kv" + suffix,
                place=place,
            )
            for place, (name, channels) in enumerate((("k", self.dim), ("v", self.vdim or self.dim)))
        )
