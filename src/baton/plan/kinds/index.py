"""The key cache of a sparse-attention indexer, on the layers that have one."""

from __future__ import annotations

from dataclasses import dataclass

from baton.plan.cache import Component, Dim, Full
from baton.plan.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Index:
    """Index keys of `dim` channels; `scales` is how many fp32 scales go with each token (0: none)."""

    dim: int
    scales: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """index_k, and index_k.scale where there are scales."""
        parts: list[tuple[str, int, str | None]] = [("index_k", self.dim, None)]
        if self.scales:
            parts.append(("index_k.scale", self.scales, "fp32"))
        return tuple(
            Component(
                name=name,
                layers=layers,
                units=None,
                dims=(Dim("channel", size),),
                extent=Full(),
                group="tokens",
                bundle="index",
                place=place,
                dtype=dtype,
            )
            for place, (name, size, dtype) in enumerate(parts)
        )
