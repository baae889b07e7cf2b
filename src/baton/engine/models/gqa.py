"""Grouped-query attention: queries, keys and values in one projection, heads cut over tp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.base import Attention, HeadOptions
from baton.engine.models.layers import HeadNorm, Mixer, MixerSpec, load_weight
from baton.engine.models.rope import Rope, RopeSpec
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    OutputSlice,
    TensorSlice,
    cut_heads,
    load_fused,
    load_partial,
    rows,
    scaled,
)
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class GqaSpec:
    """The sizes and options of one layer's attention."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    has_input_bias: bool = False
    has_output_bias: bool = False
    norm_eps: float | None = None
    """Queries and keys are normed per head with this epsilon."""
    is_norm_centred: bool = False
    """The weights of these norms are kept as their difference to 1."""
    window: int | None = None
    scale: float | None = None
    """Of scores, where it is not the inverse root of the channels."""
    has_sinks: bool = False
    is_gated: bool = False
    """Results are gated; q_proj gives each head's gates beside its queries."""

    def load(self, loader: Loader, index: int, prefix: str) -> Gqa:
        """This rank's heads; `prefix` names the module."""
        share, dim = loader.cut.heads, self.head_dim
        q, kv = cut_heads(self.num_heads, self.num_kv_heads, share)

        def part(name: str, count: int, span: Range) -> OutputSlice:
            return OutputSlice(f"{prefix}.{name}", count * dim, scaled(span, dim), self.has_input_bias)

        queries, gates = [part("q_proj", self.num_heads, q)], []
        if self.is_gated:
            pairs = [(2 * head, 2 * head + 1, 2 * head + 2) for head in range(*q)]
            queries = [part("q_proj", 2 * self.num_heads, (first, middle)) for first, middle, _ in pairs]
            gates = [part("q_proj", 2 * self.num_heads, (middle, last)) for _, middle, last in pairs]
        cached = [part(name, self.num_kv_heads, kv) for name in ("k_proj", "v_proj")]
        shape = (self.hidden_size, self.num_heads * dim)
        output = InputSlice(f"{prefix}.o_proj", shape, scaled(q, dim), share, self.has_output_bias)
        num_heads, num_kv_heads = q[1] - q[0], kv[1] - kv[0]
        return Gqa(
            index=index,
            spec=self,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            project=load_fused(loader, self.hidden_size, [*queries, *cached, *gates]),
            norm=self._norm(loader, prefix, num_heads, num_kv_heads),
            rope=loader.rope(self.rope),
            options=self._options(loader, prefix, q),
            output=load_partial(loader, output),
        )

    def _options(self, loader: Loader, prefix: str, heads: Range) -> HeadOptions:
        sinks = loader.take(rows(f"{prefix}.sinks", (self.num_heads,), heads)) if self.has_sinks else None
        return HeadOptions(self.scale or self.head_dim**-0.5, self.window, sinks=sinks)

    def _norm(self, loader: Loader, prefix: str, num_heads: int, num_kv_heads: int) -> HeadNorm | None:
        if self.norm_eps is None:
            return None
        pieces = [TensorSlice(f"{prefix}.{name}_norm.weight", (self.head_dim,)) for name in ("q", "k")]
        q, k = (load_weight(loader, piece, is_centred=self.is_norm_centred) for piece in pieces)
        return HeadNorm(torch.cat((q.expand(num_heads, -1), k.expand(num_kv_heads, -1))), self.norm_eps)


@dataclass(frozen=True, slots=True)
class Gqa:
    """One layer's attention on one rank; its projection gives queries, keys, values and gates."""

    index: int
    spec: GqaSpec
    num_heads: int
    num_kv_heads: int
    project: Linear
    norm: HeadNorm | None
    rope: Rope
    options: HeadOptions
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        num_turned, num_cached = self.num_heads + self.num_kv_heads, self.num_kv_heads
        projected = torch.unflatten(self.project(x), 1, (-1, self.spec.head_dim))
        qk, v, gates = projected.tensor_split((num_turned, num_turned + num_cached), dim=1)
        if self.norm is not None:
            qk = self.norm(qk)
        qk = self.rope.rotate(qk, attention.positions)
        q, k = torch.split_with_sizes(qk, (self.num_heads, self.num_kv_heads), 1)
        mixed = attention.heads(self.index, q, k, v, self.options)
        return self.output((mixed * gates.sigmoid() if self.spec.is_gated else mixed).flatten(1))


# Several mixers on the same rows, whose results are added.


@dataclass(frozen=True, slots=True)
class Branch:
    """One branch: its name in the checkpoint and its scale factors."""

    name: str
    spec: MixerSpec
    factor_in: float = 1.0
    factor_out: float = 1.0


@dataclass(frozen=True, slots=True)
class BesideSpec:
    """The mixers of one layer."""

    branches: tuple[Branch, ...]

    def load(self, loader: Loader, index: int, prefix: str) -> Beside:
        """This rank's part of all; `prefix` names the module that holds them."""
        return Beside(
            self.branches,
            [branch.spec.load(loader, index, f"{prefix}.{branch.name}") for branch in self.branches],
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """The mixers of one layer on one rank."""

    branches: tuple[Branch, ...]
    mixers: Sequence[Mixer]

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the sum for normed rows x."""
        mixed = torch.zeros_like(x)
        for branch, mixer in zip(self.branches, self.mixers, strict=True):
            mixed += mixer.mix(x * branch.factor_in, attention) * branch.factor_out
        return mixed
