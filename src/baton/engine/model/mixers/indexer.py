"""The indexer of sparse attention: queries and keys of its own, by which rows pick what they attend to.

It is not cut: every tp rank has all its heads, so that all pick the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.linear import Linear, Outputs, load_fused
from baton.engine.model.rope import Rope, RopeSpec
from baton.engine.model.seam import IndexQuery
from baton.engine.model.weights import Loader, Piece

INDEX_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The sizes and options of one layer's indexer."""

    hidden_size: int
    query_rank: int
    num_heads: int
    dim: int
    rope: RopeSpec
    """Of the first channels of a head."""
    num_chosen: int

    def load(self, loader: Loader, prefix: str) -> Indexer:
        """All heads; `prefix` names the module."""
        size = self.num_heads * self.dim
        weights = Piece(f"{prefix}.weights_proj.weight", (self.num_heads, self.hidden_size))
        return Indexer(
            spec=self,
            queries=load_fused(loader, self.query_rank, [Outputs(f"{prefix}.wq_b", size, (0, size))]),
            keys=load_fused(loader, self.hidden_size, [Outputs(f"{prefix}.wk", self.dim, (0, self.dim))]),
            norm=(
                loader.take(Piece(f"{prefix}.k_norm.weight", (self.dim,))),
                loader.take(Piece(f"{prefix}.k_norm.bias", (self.dim,))),
            ),
            weights=loader.take(weights, torch.float32),
            rope=loader.rope(self.rope),
        )


@dataclass(frozen=True, slots=True)
class Indexer:
    """One layer's indexer."""

    spec: IndexerSpec
    queries: Linear
    keys: Linear
    norm: tuple[Tensor, Tensor]
    weights: Tensor
    rope: Rope

    def query(self, x: Tensor, latent: Tensor, positions: Tensor) -> IndexQuery:
        """For normed rows x and the latent of their queries."""
        spec = self.spec
        q = self.queries(latent).view(len(x), spec.num_heads, spec.dim)
        k = functional.layer_norm(self.keys(x), (spec.dim,), *self.norm, INDEX_EPS)
        weights = functional.linear(x.float(), self.weights) * (spec.num_heads * spec.dim) ** -0.5
        return IndexQuery(
            keys=self.rope.rotate(k.unsqueeze(1), positions).squeeze(1),
            queries=self.rope.rotate(q, positions),
            weights=weights,
            num_chosen=spec.num_chosen,
        )
