"""Multi-head latent attention: the cache holds one latent per token, from which keys and values are expanded.

The latent is [compressed, normed | rotated part], the same on every tp rank; heads are cut. A head's key is
its expansion of the compressed part beside the rotated part, its value another expansion. Scores can be taken
in two ways that agree: `plain` expands the latent, `absorbed` moves the expansion over to the query, so that
the latent itself is key and value to all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.base import Attention, IndexQuery
from baton.engine.models.layers import RmsNorm
from baton.engine.models.rope import Rope, RopeSpec
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    OutputSlice,
    TensorSlice,
    cut_evenly,
    load_fused,
    load_partial,
    rows,
    scaled,
)
from baton.plan.ranges import Range

LATENT_EPS = 1e-6
"""The published models norm their latents with this, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """The sizes and options of one layer's attention."""

    hidden_size: int
    num_heads: int
    query_rank: int | None
    """Queries go through a latent of their own of this size."""
    latent_rank: int
    plain_dim: int
    rope: RopeSpec
    value_dim: int
    scale: float
    has_bias: bool = False
    """On the projections into latents and on the output."""
    indexer: IndexerSpec | None = None
    """Picks what rows attend to, by the latent of their queries."""
    is_choice_shared: bool = False
    """Rows attend to what the last indexer before this layer picked."""

    def load(self, loader: Loader, index: int, prefix: str) -> Mla:
        """This rank's heads; `prefix` names the module."""
        share = loader.cut.heads
        heads = cut_evenly(self.num_heads, share)
        num_heads, expanded = heads[1] - heads[0], self.plain_dim + self.value_dim
        shape = (self.hidden_size, self.num_heads * self.value_dim)
        output = InputSlice(f"{prefix}.o_proj", shape, scaled(heads, self.value_dim), share, self.has_bias)
        shape_b = (self.num_heads * expanded, self.latent_rank)
        expand = rows(f"{prefix}.kv_b_proj.weight", shape_b, scaled(heads, expanded))
        return Mla(
            index=index,
            spec=self,
            num_heads=num_heads,
            project=load_fused(loader, self.hidden_size, self._inputs(prefix, heads)),
            query=self._query(loader, prefix, heads),
            latent_norm=self._norm(loader, f"{prefix}.kv_a_layernorm.weight", self.latent_rank),
            rope=loader.rope(self.rope),
            expansion=loader.take(expand).view(num_heads, expanded, self.latent_rank),
            output=load_partial(loader, output),
            indexer=self.indexer.load(loader, f"{prefix}.indexer") if self.indexer else None,
        )

    @property
    def key_dim(self) -> int:
        """Channels of a head's key."""
        return self.plain_dim + self.rope.dim

    def _inputs(self, prefix: str, heads: Range) -> list[OutputSlice]:
        """Queries, or their latent, beside the latent of keys and values."""
        latent = self.latent_rank + self.rope.dim
        kv = OutputSlice(f"{prefix}.kv_a_proj_with_mqa", latent, (0, latent), self.has_bias)
        if self.query_rank is None:
            size = self.num_heads * self.key_dim
            return [OutputSlice(f"{prefix}.q_proj", size, scaled(heads, self.key_dim)), kv]
        return [OutputSlice(f"{prefix}.q_a_proj", self.query_rank, (0, self.query_rank), self.has_bias), kv]

    def _query(self, loader: Loader, prefix: str, heads: Range) -> tuple[RmsNorm, Linear] | None:
        if self.query_rank is None:
            return None
        size = self.num_heads * self.key_dim
        parts = [OutputSlice(f"{prefix}.q_b_proj", size, scaled(heads, self.key_dim))]
        norm = self._norm(loader, f"{prefix}.q_a_layernorm.weight", self.query_rank)
        return norm, load_fused(loader, self.query_rank, parts)

    def _norm(self, loader: Loader, name: str, size: int) -> RmsNorm:
        return RmsNorm(loader.take(TensorSlice(name, (size,))), LATENT_EPS)


@dataclass(frozen=True, slots=True)
class Mla:
    """One layer's attention on one rank."""

    index: int
    spec: MlaSpec
    num_heads: int
    project: Linear
    query: tuple[RmsNorm, Linear] | None
    """From the queries' latent to queries."""
    latent_norm: RmsNorm
    rope: Rope
    expansion: Tensor
    """(heads, plain key channels + value channels, latent rank)."""
    output: Linear
    indexer: Indexer | None = None

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        positions, rank = attention.positions, self.spec.latent_rank
        size = rank + self.spec.rope.dim
        q, kv = self.project(x).tensor_split([-size], dim=-1)
        chosen_by: IndexQuery | Literal["shared"] | None = "shared" if self.spec.is_choice_shared else None
        if self.query is not None:
            norm, expand = self.query
            q = norm(q)
            chosen_by = self.indexer.query(x, q, positions) if self.indexer else chosen_by
            q = expand(q)
        q = q.view(x.shape[0], self.num_heads, self.spec.key_dim)
        turned = self.rope.rotate(kv[:, None, rank:], positions).squeeze(1)
        latent = torch.cat((self.latent_norm(kv[:, :rank]), turned), dim=-1)
        plain, rotary = q[..., : self.spec.plain_dim], q[..., self.spec.plain_dim :]
        query = Query(self, plain, self.rope.rotate(rotary, positions))
        mixed = attention.latent(self.index, query, latent, self.spec.scale, chosen_by)
        return self.output(mixed.flatten(1))


@dataclass(frozen=True, slots=True)
class Query:
    """A pass's queries at one layer; see `baton.engine.models.base.LatentQuery`."""

    mixer: Mla
    without_position: Tensor
    rotated: Tensor

    @property
    def num_value_channels(self) -> int:
        """The compressed part of the latent."""
        return self.mixer.spec.latent_rank

    def absorbed(self) -> Tensor:
        """(rows, heads, latent channels)."""
        keys = self.mixer.expansion[:, : self.mixer.spec.plain_dim]
        moved = torch.bmm(self.without_position.transpose(0, 1), keys).transpose(0, 1)
        return torch.cat((moved, self.rotated), dim=-1)

    def plain(self) -> Tensor:
        """(rows, heads, key channels)."""
        return torch.cat((self.without_position, self.rotated), dim=-1)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, latent channels) -> keys and values of this rank's heads."""
        spec, num_heads = self.mixer.spec, self.mixer.num_heads
        compressed, rotated = latent[:, : spec.latent_rank], latent[:, None, spec.latent_rank :]
        expanded = functional.linear(compressed, self.mixer.expansion.flatten(0, 1))
        expanded = expanded.view(latent.shape[0], num_heads, spec.plain_dim + spec.value_dim)
        keys = torch.cat((expanded[..., : spec.plain_dim], rotated.expand(-1, num_heads, -1)), dim=-1)
        return keys, expanded[..., spec.plain_dim :]

    def project(self, mixed: Tensor) -> Tensor:
        """(rows, heads, latent rank) -> (rows, heads, value channels)."""
        values = self.mixer.expansion[:, self.mixer.spec.plain_dim :]
        return torch.bmm(mixed.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)


# The indexer of sparse attention: queries and keys of its own, by which rows pick what they attend to.
#
# It is not cut: every tp rank has all its heads, so that all pick the same tokens.


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
        weights = TensorSlice(f"{prefix}.weights_proj.weight", (self.num_heads, self.hidden_size))
        return Indexer(
            spec=self,
            queries=load_fused(loader, self.query_rank, [OutputSlice(f"{prefix}.wq_b", size, (0, size))]),
            keys=load_fused(loader, self.hidden_size, [OutputSlice(f"{prefix}.wk", self.dim, (0, self.dim))]),
            norm=(
                loader.take(TensorSlice(f"{prefix}.k_norm.weight", (self.dim,))),
                loader.take(TensorSlice(f"{prefix}.k_norm.bias", (self.dim,))),
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
