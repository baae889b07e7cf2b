"""Rotary position embeddings: frequencies by the config's rope type, and the rotation itself.

A table of cosines and sines by position is made once per rank and looked up once per pass, so a layer costs
the rotation alone. `dynamic` scaling changes frequencies only beyond max_position_embeddings, which no
sequence here exceeds, so it is the default type; `longrope` picks frequencies by the length a sequence will
reach, which is not known when its first keys are cached, so it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.config import ModelFields
from baton.engine.models.fused import kernels_for
from baton.plan.models.fields import shown

THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Scaling:
    """The numbers of a rope type, those that the type does not use at values that change nothing."""

    factor: float = 1.0
    original_positions: int = 1
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """How the first `dim` channels of a head are rotated."""

    dim: int
    theta: float
    num_positions: int
    kind: str = "default"
    scaling: Scaling = Scaling()
    amplitude: float = 1.0
    """What cosines and sines are multiplied with."""
    is_paired_in: bool = False
    """Channels (0, 1), (2, 3), ... turn together, not (0, dim / 2), (1, dim / 2 + 1), ..."""
    is_paired_out: bool = False
    """The result is in that order too, not in halves."""

    def frequencies(self) -> Tensor:
        """(dim / 2,) float32: radians per position."""
        return FREQUENCIES[self.kind](self)


class Rope:
    """The rotation of a RopeSpec on one device."""

    def __init__(self, spec: RopeSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        positions = torch.arange(spec.num_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, spec.frequencies().to(device))
        table = torch.cat((angles.cos(), angles.sin()), dim=1)
        self._table = table.mul_(spec.amplitude).to(dtype)
        self._last_rotation: _Rotation | None = None

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (rows, heads, channels) turned by each row's position; channels past the spec's are kept."""
        dim = self.spec.dim
        is_plain = dim == x.shape[-1] and not self.spec.is_paired_in and not self.spec.is_paired_out
        kernels = kernels_for(x) if is_plain else None
        if kernels is not None:
            rotated: Tensor = kernels.rotate(x, positions, self._table)
            return rotated
        turns = self._rotation(positions)
        cos, sin = turns.cos, turns.sin
        if is_plain:
            # The same in fewer calls, each of which a GPU waits for where steps are short.
            turned = x * turns.cos_twice
            (a, b), (out_a, out_b) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
            out_a.addcmul_(b, sin, value=-1)
            out_b.addcmul_(a, sin)
            return turned
        turned = torch.empty_like(x, memory_format=torch.contiguous_format)
        a, b = _parts(x[..., :dim], self.spec.is_paired_in)
        out_a, out_b = _parts(turned[..., :dim], self.spec.is_paired_out)
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin)
        if dim < x.shape[-1]:
            turned[..., dim:] = x[..., dim:]
        return turned

    def _rotation(self, positions: Tensor) -> _Rotation:
        """Those of a pass: its layers ask with the same positions."""
        if self._last_rotation is None or self._last_rotation.positions is not positions:
            cos, sin = self._table[positions].unsqueeze(1).chunk(2, dim=-1)
            self._last_rotation = _Rotation(positions, cos, sin, torch.cat((cos, cos), dim=-1))
        return self._last_rotation


@dataclass(frozen=True, slots=True)
class _Rotation:
    """Cosines and sines of positions, (rows, 1, dim / 2)."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    cos_twice: Tensor


def _parts(x: Tensor, is_paired: bool) -> tuple[Tensor, Tensor]:
    if is_paired:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def read_rope(fields: ModelFields, head_dim: int) -> RopeSpec:
    """The rotation that a config asks for, in either of the two ways that configs spell it."""
    values = rope_values(fields)
    where = "rope_scaling" if fields.values.get("rope_scaling") else "rope_parameters"
    inner = ModelFields(
        f"{fields.where}: {where}", {"rope_theta": THETA, "partial_rotary_factor": 1.0, **values}
    )
    kind = values.get("rope_type", values.get("type", "default"))
    if not isinstance(kind, str) or kind not in FREQUENCIES:
        raise inner.refusal(f"rope type {shown(kind)} is not supported; use one of {', '.join(FREQUENCIES)}")
    dim = int(head_dim * inner.positive("partial_rotary_factor"))
    if dim % 2 or not 0 < dim <= head_dim:
        raise inner.refusal(f"{dim} of {head_dim} channels cannot be rotated in pairs")
    scaling, amplitude = _scaling(kind, inner, fields.max_positions)
    return RopeSpec(dim, inner.positive("rope_theta"), fields.max_positions, kind, scaling, amplitude)


def rope_values(fields: ModelFields) -> Mapping[str, object]:
    """The rope settings of a config as one mapping, nulls left out."""
    stated = fields.mapping("rope_scaling") or fields.mapping("rope_parameters")
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    values = {name: fields.values.get(name) for name in outer}
    if values["original_max_position_embeddings"] is not None:
        stated = {name: value for name, value in stated.items() if name != "original_max_position_embeddings"}
    return {name: value for name, value in {**values, **stated}.items() if value is not None}


def yarn_amplitude(factor: float, weight: float = 1.0) -> float:
    """By how much yarn enlarges what it has stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _scaling(kind: str, values: ModelFields, max_positions: int) -> tuple[Scaling, float]:
    """The numbers of a rope type, and the amplitude of its rotation."""
    if kind in ("default", "dynamic"):
        return Scaling(), 1.0
    if kind == "linear":
        return Scaling(factor=values.positive("factor")), 1.0
    original = values.number_or_none("original_max_position_embeddings", max_positions << 10) or max_positions
    if kind == "llama3":
        low, high = values.positive("low_freq_factor"), values.positive("high_freq_factor")
        return Scaling(values.positive("factor"), original, low_frequency=low, high_frequency=high), 1.0
    stated = values.values
    factor = values.positive("factor") if "factor" in stated else max_positions / original
    scaling = Scaling(
        factor,
        original,
        beta_fast=values.positive("beta_fast") if stated.get("beta_fast") else 32.0,
        beta_slow=values.positive("beta_slow") if stated.get("beta_slow") else 1.0,
        is_truncated=stated.get("truncate", True) is True,
    )
    if "attention_factor" in stated:
        return scaling, values.positive("attention_factor")
    if stated.get("mscale") and stated.get("mscale_all_dim"):
        whole = yarn_amplitude(factor, values.real("mscale_all_dim"))
        return scaling, yarn_amplitude(factor, values.real("mscale")) / whole
    return scaling, yarn_amplitude(factor)


def _wavelengths(spec: RopeSpec) -> Tensor:
    """Positions per radian."""
    return spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)


def _default(spec: RopeSpec) -> Tensor:
    return 1.0 / _wavelengths(spec)


def _linear(spec: RopeSpec) -> Tensor:
    return _default(spec) / spec.scaling.factor


def _llama3(spec: RopeSpec) -> Tensor:
    """Short waves are kept, long ones stretched, those between in proportion."""
    scaling, plain = spec.scaling, _default(spec)
    turns = scaling.original_positions * plain / (2 * math.pi)
    span = scaling.high_frequency - scaling.low_frequency
    share = ((turns - scaling.low_frequency) / span).clamp(0, 1)
    return (1 - share) * plain / scaling.factor + share * plain


def _yarn(spec: RopeSpec) -> Tensor:
    """As llama3, with a ramp over channels in place of one over wavelengths."""
    scaling, plain = spec.scaling, _default(spec)
    stretched = 1.0 / (scaling.factor * _wavelengths(spec))

    def channel(turns: float) -> float:
        ratio = scaling.original_positions / (turns * 2 * math.pi)
        return spec.dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    width = high - low if high != low else 0.001
    kept = 1 - ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return stretched * (1 - kept) + plain * kept


FREQUENCIES: dict[str, Callable[[RopeSpec], Tensor]] = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
