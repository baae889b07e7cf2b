"""The gated delta rule: a state (key channels, value channels) per head that is faded and corrected.

Theory. With decay a_t, strength b_t, key k_t and value v_t a token changes the state S to

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - a_t S_{t-1}^T k_t),   and its answer is S_t^T q_t.

What a token writes, u_t, depends on what the tokens before it wrote. Let g_t be the product of the decays of
a chunk up to t, and D_ts = g_t / g_s. In a chunk that starts from S the equations are linear and triangular,

    u_t + b_t sum_{s<t} D_ts (k_t . k_s) u_s = b_t (v_t - g_t S^T k_t),

so that all u of a chunk are one triangular solve, and the answers and the next state are matrix products.
Decays are kept as logarithms, and D is taken only where t >= s: nothing can overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.model.kernels.chunks import by_unit, chunks, decay, fading, reach


class Tokens(NamedTuple):
    """What tokens bring, in float32: each (n, tokens, heads, channels), gates with one channel."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    strength: Tensor


def advance(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Answers (n, tokens, heads, value channels) from a state (n, heads, key channels, value channels) on."""
    num_tokens = tokens.v.shape[1]
    if num_tokens == 1:
        out, state = step(Tokens(*(each[:, 0] for each in tokens)), state)
        return out.unsqueeze(1), state
    outs = []
    for chunk in chunks(num_tokens):
        out, state = scan(Tokens(*(by_unit(each, chunk) for each in tokens)), state)
        outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def step(token: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence, without a dim of tokens."""
    faded = state * decay(token.log_decay).unsqueeze(-1)
    written = (token.v - (token.k.unsqueeze(-2) @ faded).squeeze(-2)) * token.strength
    after = faded + token.k.unsqueeze(-1) * written.unsqueeze(-2)
    return (token.q.unsqueeze(-2) @ after).squeeze(-2), after


def scan(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk of each sequence, with the dim of tokens after that of heads."""
    q, k, v, log_decay, strength = tokens
    reached = reach(log_decay)
    left, carried = fading(reached), decay(reached)
    # Once for the three products that it is part of.
    k = k.contiguous()
    strong, keys = k * strength, k.mT
    free = (v * strength).sub_((strong * carried) @ state)
    # The diagonal counts as ones, whatever is there.
    system = (strong @ keys).mul_(left)
    written = torch.linalg.solve_triangular(system, free, upper=False, unitriangular=True)
    out = ((q @ keys).mul_(left) @ written).add_((q * carried) @ state)
    end = reached[..., -1:, :]
    return out, state * decay(end) + (k * decay(end - reached)).mT @ written
