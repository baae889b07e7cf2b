"""Grouped-query attention: queries, keys and values in one projection, heads cut over tp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.cuts import cut_heads, scaled
from baton.engine.model.linear import Inputs, Linear, Outputs, load_fused, load_partial
from baton.engine.model.norms import HeadNorm, load_weight
from baton.engine.model.rope import Rope, RopeSpec
from baton.engine.model.seam import Attention, HeadOptions
from baton.engine.model.weights import Loader, Piece, rows
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

    def load(self, loader: Loader, index: int, prefix: str, num_wide: int = 1) -> Gqa:
        """This rank's heads; `prefix` names the module, of which q_proj may give more than queries."""
        share, dim = loader.cut.heads, self.head_dim
        q, kv = cut_heads(self.num_heads, self.num_kv_heads, share)
        named = {
            "q_proj": (self.num_heads * num_wide, scaled(q, num_wide)),
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
            options=self._options(loader, prefix, q),
            output=load_partial(loader, output),
        )

    def _options(self, loader: Loader, prefix: str, heads: Range) -> HeadOptions:
        sinks = loader.take(rows(f"{prefix}.sinks", (self.num_heads,), heads)) if self.has_sinks else None
        return HeadOptions(self.scale or self.head_dim**-0.5, self.window, sinks=sinks)

    def _norm(self, loader: Loader, prefix: str, num_heads: int, num_kv_heads: int) -> HeadNorm | None:
        if self.norm_eps is None:
            return None
        pieces = [Piece(f"{prefix}.{name}_norm.weight", (self.head_dim,)) for name in ("q", "k")]
        q, k = (load_weight(loader, piece, is_centred=self.is_norm_centred) for piece in pieces)
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
        return self.output(self.attend(self.project(x), attention))

    def attend(self, projected: Tensor, attention: Attention) -> Tensor:
        """What this rank's heads give for rows of queries, keys and values, one head after the other."""
        num_turned = self.num_heads + self.num_kv_heads
        projected = projected.view(projected.shape[0], num_turned + self.num_kv_heads, -1)
        qk, v = torch.split_with_sizes(projected, (num_turned, self.num_kv_heads), 1)
        if self.norm is not None:
            qk = self.norm(qk)
        qk = self.rope.rotate(qk, attention.positions)
        q, k = torch.split_with_sizes(qk, (self.num_heads, self.num_kv_heads), 1)
        return attention.heads(self.index, q, k, v, self.options).flatten(1)
