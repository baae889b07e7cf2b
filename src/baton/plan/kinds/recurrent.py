"""State of fixed size per request: Mamba2, gated delta net and other linear attention.

The recurrent state is cut by its heads. A convolution's state is several components packed in one buffer,
each cut by a unit of its own: [q|k|v] by key heads, key heads and value heads, [x|B|C] by heads, groups and
groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.plan.cache import Component, Dim, State, Units
from baton.plan.ranges import Ranges


@dataclass(frozen=True, slots=True)
class Conv:
    """One part of a packed convolution state: `units` times `channels`, `taps` steps back."""

    part: str
    units: Units
    channels: int
    taps: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """`state` elements per head, plus the parts of a packed convolution state."""

    heads: int
    state: int
    convs: tuple[Conv, ...] = ()
    unit: str = "head"
    dtype: str | None = None

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """ssm, and conv.PART for each part."""
        ssm = Component(
            name="ssm",
            layers=layers,
            units=Units(self.heads, self.unit),
            dims=(Dim("state", self.state),),
            extent=State(),
            group="state",
            bundle="ssm",
            dtype=self.dtype,
        )
        convs = tuple(
            Component(
                name=f"conv.{conv.part}",
                layers=layers,
                units=conv.units,
                dims=(Dim("channel", conv.channels), Dim("tap", conv.taps)),
                extent=State(),
                group="state",
                bundle="conv",
                place=place,
            )
            for place, conv in enumerate(self.convs)
        )
        return (ssm, *convs)
