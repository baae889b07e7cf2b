"""Softmax attention without fused kernels, in float32, for what those cannot do.

It adds sinks, and returns the weight of its keys (the logarithm of the sum of exponentials), so
that partial results over parts of the keys can be merged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.models.base import HeadOptions

_LOWEST = torch.finfo(torch.float32).min
SCORES_MAX = 1 << 24
"""Scores held at a time: 64 MiB."""


@dataclass(frozen=True, slots=True)
class Partial:
    """The result of rows over some of their keys: out (rows, heads, channels), weight (rows, heads)."""

    out: Tensor
    weight: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: HeadOptions) -> Partial:
    """q (n, units, group, rows, c), k and v (n, units, keys, c); bias broadcasts to (n, rows, keys).

    Returns out (n, units, group, rows, c) and weight (n, units, group, rows), which is minus infinity for a
    row that sees no key.
    """
    shape = q.shape[2:4]
    scores = torch.matmul(q.flatten(2, 3).float(), k.float().mT).mul_(options.scale)
    scores = torch.unflatten(scores, 2, shape)
    if bias is not None:
        scores = scores + bias[:, None, None]
    top = scores.amax(-1, keepdim=True).clamp_min(_LOWEST)
    scores = torch.exp(scores - top)
    total = scores.sum(-1, keepdim=True)
    mixed = torch.unflatten(torch.matmul(scores.flatten(2, 3), v.float()), 2, shape)
    # Where no key is seen both are zero, and the answer is too.
    out = mixed / total.clamp_min(torch.finfo(torch.float32).tiny)
    return Partial(out, (top + torch.log(total)).squeeze(-1))


def with_sinks(part: Partial, sinks: Tensor) -> Tensor:
    """Out (rows, heads, channels) with a logit per head in the softmax that has no value."""
    return part.out * torch.sigmoid(part.weight - sinks.float()).unsqueeze(-1)


def merge(parts: Partial) -> Partial:
    """Merges partial results over disjoint keys, stacked along the first dim."""
    top = parts.weight.amax(0).clamp_min(_LOWEST)
    shares = torch.exp(parts.weight - top)
    total = shares.sum(0)
    out = (parts.out * shares.unsqueeze(-1)).sum(0)
    out = out / total.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return Partial(out, top + torch.log(total))
