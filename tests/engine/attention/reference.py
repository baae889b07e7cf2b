"""Attention as its definition says, in float64, over the whole history of every sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton.engine.models.base import HeadOptions, IndexQuery


def attend(q: Tensor, k: Tensor, v: Tensor, position: int, options: HeadOptions) -> Tensor:
    """One row q (heads, c) at `position` over k and v (tokens, units, c) from token 0 on."""
    lowest = 0 if options.window is None else max(0, position + 1 - options.window)
    group = q.shape[0] // k.shape[1]
    out = []
    for head in range(q.shape[0]):
        keys = k[lowest : position + 1, head // group].double()
        scores = keys @ q[head].double() * options.scale
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head : head + 1].double()))
        shares = scores.softmax(0)[: len(keys)]
        out.append(shares @ v[lowest : position + 1, head // group].double())
    return torch.stack(out)


def chosen(row: IndexQuery, keys: Tensor) -> Tensor:
    """The places, in order, of the index keys (tokens, channels) that a single row chooses."""
    products = (row.queries[0].double() @ keys.double().T).clamp(min=0)
    scores = row.weights[0].double() @ products
    return scores.topk(min(row.num_chosen, len(keys))).indices.sort().values


@dataclass
class History:
    """What one layer has cached of each sequence."""

    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    def add(self, sequence: int, rows: Tensor) -> Tensor:
        """All rows of a sequence, these included."""
        kept = self.rows.setdefault(sequence, [])
        kept.append(rows)
        return torch.cat(kept)


@dataclass(frozen=True)
class RandomLatent:
    """A latent query with random matrices: key channels = plain part + rotary part."""

    q: Tensor
    rotary: Tensor
    keys: Tensor
    """(heads, latent value part, plain key channels)."""
    values: Tensor
    """(heads, latent value part, value channels)."""

    @property
    def num_value_channels(self) -> int:
        return self.keys.shape[1]

    def absorbed(self) -> Tensor:
        return torch.cat((torch.einsum("rhp,hlp->rhl", self.q, self.keys), self.rotary), -1)

    def plain(self) -> Tensor:
        return torch.cat((self.q, self.rotary), -1)

    def expand(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        num_values = self.num_value_channels
        keys = torch.einsum("tl,hlp->thp", latent[:, :num_values], self.keys)
        shared = latent[:, None, num_values:].expand(-1, keys.shape[1], -1)
        values = torch.einsum("tl,hlv->thv", latent[:, :num_values], self.values)
        return torch.cat((keys, shared), -1), values

    def project(self, mixed: Tensor) -> Tensor:
        return torch.einsum("rhl,hlv->rhv", mixed, self.values)
