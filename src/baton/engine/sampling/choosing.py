"""Weights of tokens, which of them stay, and the draw.

A weight is a probability that is not divided by the sum: exp((logit - max) / temperature), in float64, so
that the likeliest token weighs 1. Filters set weights to 0. A draw is by inverse distribution function over
the weights in the order of token ids, so it needs no sorting and one uniform number decides it on any device.

Top-k and top-p rank tokens by weight, equal weights by the lower id; exactly k stay. Top-p is over what top-k
left: the fewest likeliest tokens whose weights reach the share p of the sum. Min-p is relative to the
likeliest token, hence a plain bound. Nearly always the first `HEAD` tokens settle top-p, which spares sorting
the vocabulary; rows for which they do not are sorted whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.sampling.params import SamplingParams

HEAD = 1024


def weigh(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """(rows, vocabulary) float64: what each token weighs after temperature, top-k, top-p and min-p."""
    weights = logits.to(torch.float64, copy=True)
    # The maximum goes first: a tiny temperature then gives 0 and -inf, never inf - inf.
    weights -= weights.amax(dim=-1, keepdim=True)
    weights /= _column([one.temperature for one in params], weights)
    weights.exp_()
    vocab_size = weights.shape[-1]
    ranked = [row for row, one in enumerate(params) if 0 < one.top_k < vocab_size or one.top_p < 1]
    if ranked:
        at = torch.tensor(ranked, device=weights.device)
        weights[at] = _keep_ranked(weights[at], [params[row] for row in ranked])
    if any(one.min_p > 0 for one in params):
        weights.masked_fill_(weights < _column([one.min_p for one in params], weights), 0)
    return weights


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """(rows, draws) token ids for uniform numbers in [0, 1) of that shape."""
    cumulative = weights.cumsum(dim=-1)
    # A uniform number is at most 1 - 2**-53, whose product with a float64 never rounds up to that itself: the
    # sum over all tokens exceeds it, and the first sum to do so is that of a token with a weight.
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def likeliest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of each row and their ids, largest first, equal ones by the lower id."""
    if count >= values.shape[-1]:
        whole = torch.sort(values, dim=-1, descending=True, stable=True)
        return whole.values, whole.indices
    ids = torch.topk(values, count, dim=-1).indices.sort(dim=-1).values
    order = torch.sort(values.gather(-1, ids), dim=-1, descending=True, stable=True)
    best, ids = order.values, ids.gather(-1, order.indices)
    # Where equal values lie on both sides of the border, it is open which of them topk took.
    is_open = (values >= best[:, -1:]).sum(dim=-1) > count
    if is_open.any():
        whole = torch.sort(values[is_open], dim=-1, descending=True, stable=True)
        best[is_open], ids[is_open] = whole.values[:, :count], whole.indices[:, :count]
    return best, ids


def _keep_ranked(weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab_size = weights.shape[-1]
    top_k = torch.tensor(
        [[min(one.top_k or vocab_size, vocab_size)] for one in params], device=weights.device
    )
    top_p = _column([one.top_p for one in params], weights)
    kept, is_settled = _keep_first(weights, top_k, top_p, min(HEAD, vocab_size))
    if not is_settled.all():
        is_open = ~is_settled
        kept[is_open], _ = _keep_first(weights[is_open], top_k[is_open], top_p[is_open], vocab_size)
    return kept


def _keep_first(weights: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """What stays if nothing after the `width` likeliest does, and for which rows that is so."""
    vocab_size = weights.shape[-1]
    best, ids = likeliest(weights, width)
    best = best.masked_fill(torch.arange(width, device=weights.device) >= top_k, 0)
    reached = best.cumsum(dim=-1)
    has_all = top_k <= width
    totals = torch.where(has_all, reached[:, -1:], weights.cumsum(dim=-1)[:, -1:])
    before = torch.cat([torch.zeros_like(totals), reached[:, :-1]], dim=-1)
    best = best.masked_fill((before >= top_p * totals) & (top_p < 1), 0)
    # The sum over everything is what top-p refers to only where top-k leaves everything.
    is_settled = has_all | ((top_k >= vocab_size) & (top_p < 1) & (reached[:, -1:] >= top_p * totals))
    return torch.zeros_like(weights).scatter_(-1, ids, best), is_settled[:, 0]


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor([[value] for value in values], dtype=torch.float64, device=like.device)
