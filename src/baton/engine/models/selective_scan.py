"""The selective state space of Mamba2: a state (channels, state channels) per head that decays and grows.

Theory. With step d_t and rate a < 0 of a head, input x_t, and the projections B_t and C_t of its group,

    S_t = exp(a d_t) S_{t-1} + d_t x_t B_t^T        and the result is S_t C_t.

In a chunk that starts from S, with g_t the product of its decays up to t, the result at t is
g_t S C_t + sum_{s<=t} (g_t / g_s) (C_t . B_s) d_s x_s: attention without a softmax, plus what was carried in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.models.recurrence import by_unit, chunks, decay, fading, reach


class ScanTokens(NamedTuple):
    """What tokens bring, in float32: each (n, tokens, heads or groups, channels), decays with one channel."""

    x: Tensor
    """Times the step, by heads."""
    log_decay: Tensor
    into: Tensor
    """B, by groups."""
    out_of: Tensor
    """C, by groups."""


def advance(tokens: ScanTokens, of_head: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results (n, tokens, heads, channels) from a state (n, heads, channels, state channels) on.

    `of_head` has the group of each head.
    """
    num_tokens = tokens.x.shape[1]
    if num_tokens == 1:
        out, state = step(ScanTokens(*(tensor[:, 0] for tensor in tokens)), of_head, state)
        return out.unsqueeze(1), state
    outs = []
    for chunk in chunks(num_tokens):
        out, state = scan(ScanTokens(*(by_unit(tensor, chunk) for tensor in tokens)), of_head, state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def step(token: ScanTokens, of_head: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence, without a dim of tokens."""
    into, out_of = token.into[:, of_head], token.out_of[:, of_head]
    after = state * decay(token.log_decay).unsqueeze(-1) + token.x.unsqueeze(-1) * into.unsqueeze(-2)
    return (after @ out_of.unsqueeze(-1)).squeeze(-1), after


def scan(tokens: ScanTokens, of_head: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of each sequence, with the dim of tokens after that of heads or groups."""
    x, log_decay, into, out_of = tokens
    reached = reach(log_decay)
    # Groups are multiplied once for all of their heads.
    among = (out_of @ into.mT)[:, of_head].mul_(fading(reached))
    out = (among @ x).add_((out_of[:, of_head] * decay(reached)) @ state.mT)
    end = reached[..., -1:, :]
    added = (x * decay(end - reached)).mT @ into[:, of_head]
    return out, state * decay(end) + added
