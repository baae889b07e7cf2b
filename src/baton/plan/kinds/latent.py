"""One compressed vector per token (MLA), the same on every tp rank."""

from __future__ import annotations

from dataclasses import dataclass

from baton.plan.cache import Component, Dim
from baton.plan.kinds.base import reach
from baton.plan.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Latent:
    """A latent of `dim` channels, the rotary part included; a window of 0 means none."""

    dim: int
    window: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """latent, named after its window where it has one."""
        extent, suffix = reach(self.window)
        return (
            Component(
                name="latent" + suffix,
                layers=layers,
                units=None,
                dims=(Dim("channel", self.dim),),
                extent=extent,
                group="tokens" + suffix,
                bundle="latent" + suffix,
            ),
        )
