"""Attention of decoding sequences, one row each, with keys padded to a common length.

All query heads of a sequence see the same keys. So the query heads of a kv head take the place of rows: no
head is repeated, and one mask serves all.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention import softmax
from baton.engine.attention.softmax import Partial
from baton.engine.models.base import HeadOptions


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: HeadOptions) -> Tensor:
    """q (n, heads, c), k and v (n, units, keys, c), bias (n, 1, keys) -> (n, heads, value channels)."""
    if options.sinks is not None or v.shape[-1] != k.shape[-1]:
        part = attend_partly(q, k, v, bias, options)
        out = part.out if options.sinks is None else softmax.with_sinks(part, options.sinks)
        return out.to(q.dtype)
    mixed = functional.scaled_dot_product_attention(
        torch.unflatten(q, 1, (k.shape[1], -1)),
        k,
        v,
        attn_mask=None if bias is None else bias.unsqueeze(1),
        scale=options.scale,
    )
    return mixed.flatten(1, 2)


def attend_partly(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: HeadOptions) -> Partial:
    """The same, with the weight of the keys, for merging."""
    grouped = torch.unflatten(q, 1, (k.shape[1], -1)).unsqueeze(3)
    part = softmax.attend(grouped, k, v, bias, options)
    return Partial(part.out.squeeze(3).flatten(1, 2), part.weight.squeeze(3).flatten(1, 2))
