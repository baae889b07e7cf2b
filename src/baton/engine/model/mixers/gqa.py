"""Grouped-query attention: queries, keys and values in one projection, heads cut over tp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.cuts import cut_heads, scaled
from baton.engine.model.linear import Inputs, Linear, Outputs, load_fused, load_partial
from baton.engine.model.norms import HeadNorm
from baton.engine.model.rope import Rope, RopeSpec
from baton.engine.model.seam import Attention, HeadOptions
from baton.engine.model.weights import Loader, Piece


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
    window: int | None = None

    def load(self, loader: Loader, index: int, prefix: str) -> Gqa:
        """This rank's heads; `prefix` names the module."""
        share, dim = loader.cut.heads, self.head_dim
        q, kv = cut_heads(self.num_heads, self.num_kv_heads, share)
        named = {
            "q_proj": (self.num_heads, q),
            "k_proj": (self.num_kv_heads, kv),
            "v_proj": (self.num_kv_heads, kv),
        }
        parts = [
            Outputs(f"{prefix}.{name}", count * dim, scaled(span, dim), self.has_input_bias)
            for name, (count, span) in named.items()
        ]
        shape = (self.hidden_size, self.num_heads * dim)
        output = Inputs(f"{prefix}.o_proj", shape, scaled(q, dim), share, self.has_output_bias)
        num_heads, num_kv_heads = q[1] - q[0], kv[1] - kv[0]
        return Gqa(
            index=index,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            project=load_fused(loader, self.hidden_size, parts),
            norm=self._norm(loader, prefix, num_heads, num_kv_heads),
            rope=loader.rope(self.rope),
            options=HeadOptions(scale=dim**-0.5, window=self.window),
            output=load_partial(loader, output),
        )

    def _norm(self, loader: Loader, prefix: str, num_heads: int, num_kv_heads: int) -> HeadNorm | None:
        if self.norm_eps is None:
            return None
        q = loader.take(Piece(f"{prefix}.q_norm.weight", (self.head_dim,)))
        k = loader.take(Piece(f"{prefix}.k_norm.weight", (self.head_dim,)))
        return HeadNorm(torch.cat((q.expand(num_heads, -1), k.expand(num_kv_heads, -1))), self.norm_eps)


@dataclass(frozen=True, slots=True)
class Gqa:
    """One layer's attention on one rank."""

    index: int
    num_heads: int
    num_kv_heads: int
    project: Linear
    norm: HeadNorm | None
    rope: Rope
    options: HeadOptions
    output: Linear

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        num_turned = self.num_heads + self.num_kv_heads
        projected = self.project(x).view(x.shape[0], num_turned + self.num_kv_heads, -1)
        qk, v = projected[:, :num_turned], projected[:, num_turned:]
        if self.norm is not None:
            qk = self.norm(qk)
        qk = self.rope.rotate(qk, attention.positions)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        mixed = attention.heads(self.index, q, k, v, self.options)
        return self.output(mixed.flatten(1))
