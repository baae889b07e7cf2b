"""Kinds of cache: frozen dataclasses of sizes that yield components.

State of fixed size per request (Mamba2, gated delta net and other linear attention) is cut by its heads. A
convolution's state is several components packed in one buffer, each cut by a unit of its own: [q|k|v] by key
heads, key heads and value heads, [x|B|C] by heads, groups and groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from baton.plan.cache import Component, Dim, Full, State, Units, Window
from baton.plan.ranges import Ranges, to_ids


class Kind(Protocol):
    """Sizes of one kind of cache."""

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """The components that this kind keeps on `layers`."""


def _per_token(
    name: str,
    layers: Ranges,
    channels: int,
    bundle: str,
    *,
    units: Units | None = None,
    window: int = 0,
    place: int = 0,
    dtype: str | None = None,
) -> Component:
    """A component with an entry for each token; with a window (0: none) it is named after it."""
    suffix = f".w{window}" if window else ""
    return Component(
        name=name + suffix,
        layers=layers,
        units=units,
        dims=(Dim("channel", channels),),
        extent=Window(window) if window else Full(),
        group="tokens" + suffix,
        bundle=bundle + suffix,
        place=place,
        dtype=dtype,
    )


@dataclass(frozen=True, slots=True)
class Paged:
    """K and V heads; `vdim` is V's channel count where it differs, a window of 0 means none."""

    heads: int
    dim: int
    vdim: int = 0
    window: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """k and v, named after their window where they have one."""
        return tuple(
            _per_token(name, layers, channels, "kv", units=Units(self.heads), window=self.window, place=place)
            for place, (name, channels) in enumerate((("k", self.dim), ("v", self.vdim or self.dim)))
        )


@dataclass(frozen=True, slots=True)
class Latent:
    """A latent of `dim` channels, the rotary part included; a window of 0 means none."""

    dim: int
    window: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """latent, named after its window where it has one."""
        return (_per_token("latent", layers, self.dim, "latent", window=self.window),)


@dataclass(frozen=True, slots=True)
class Index:
    """Index keys of `dim` channels; `scales` is how many fp32 scales go with each token (0: none)."""

    dim: int
    scales: int = 0

    def components(self, layers: Ranges) -> tuple[Component, ...]:
        """index_k, and index_k.scale where there are scales."""
        keys = _per_token("index_k", layers, self.dim, "index")
        if not self.scales:
            return (keys,)
        return (keys, _per_token("index_k.scale", layers, self.scales, "index", place=1, dtype="fp32"))


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
