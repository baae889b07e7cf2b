"""The gated delta rule: a state (key channels, value channels) per head that decays and is corrected.

Theory. With decay a_t, strength b_t, key k_t and value v_t a token changes the state S to

    S_t = a_t S_{t-1} + k_t u_t^T,   u_t = b_t (v_t - a_t S_{t-1}^T k_t),   and its result is S_t^T q_t.

What a token writes, u_t, depends on what the tokens before it wrote. Let g_t be the product of the decays of
a chunk up to t, and D_ts = g_t / g_s. In a chunk that starts from S the equations are linear and triangular,

    u_t + b_t sum_{s<t} D_ts (k_t . k_s) u_s = b_t (v_t - g_t S^T k_t),

so that all u of a chunk are one triangular solve, and the results and the next state are matrix products.
Decays are kept as logarithms, and D is taken only where t >= s: nothing can overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.models.recurrence import chunks, decay, fading, reaches


class DeltaTokens(NamedTuple):
    """What tokens bring, in float32: each (n, tokens, heads, channels), gates with one channel."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    strength: Tensor


class Fades(NamedTuple):
    """How a chunk's decays add up, each (sequences x heads, tokens, 1)."""

    reached: Tensor
    """Logarithms of g, in float64."""
    carried: Tensor
    """g, what is left at a token of the state before the chunk."""
    until: Tensor
    """What is left at the chunk's end of what a token wrote."""


def advance(tokens: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Results (n, tokens, heads, value channels) from a state (n, heads, key channels, value channels) on."""
    num_tokens = tokens.v.shape[1]
    if num_tokens == 1:
        out, state = step(DeltaTokens(*(tensor[:, 0] for tensor in tokens)), state)
        return out.unsqueeze(1), state
    # Sequences and heads are one dim, so that products can be added to what is there.
    every = DeltaTokens(*(tensor.transpose(1, 2).flatten(0, 1) for tensor in tokens))
    num_sequences, after = len(state), state.flatten(0, 1)
    out = torch.empty_like(every.v, memory_format=torch.contiguous_format)
    reached = reaches(every.log_decay)
    faded = (reached, decay(reached), decay(reached[:, :, -1:] - reached))
    for index, chunk in enumerate(chunks(num_tokens)):
        part = DeltaTokens(*(tensor[:, chunk] for tensor in every))
        fades = Fades(*(tensor[:, index, : part.v.shape[1]] for tensor in faded))
        after = scan(part, fades, after, out[:, chunk])
    out, after = (torch.unflatten(tensor, 0, (num_sequences, -1)) for tensor in (out, after))
    return out.transpose(1, 2), after


def step(token: DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence, without a dim of tokens."""
    faded = state * decay(token.log_decay).unsqueeze(-1)
    written = (token.v - (token.k.unsqueeze(-2) @ faded).squeeze(-2)) * token.strength
    after = faded + token.k.unsqueeze(-1) * written.unsqueeze(-2)
    return (token.q.unsqueeze(-2) @ after).squeeze(-2), after


def scan(tokens: DeltaTokens, fades: Fades, state: Tensor, out: Tensor) -> Tensor:
    """One chunk, each (sequences x heads, tokens, channels): the state after it; the results go to `out`."""
    left, carried = fading(fades.reached), fades.carried
    # Once for the products that they are part of.
    q, k = tokens.q.contiguous(), tokens.k.contiguous()
    free = torch.addcmul(tokens.v, torch.bmm(k, state), carried, value=-1).mul_(tokens.strength)
    # The diagonal counts as ones, whatever is there.
    system = torch.bmm(k, k.mT).mul_(left).mul_(tokens.strength)
    # Turned round, rows are columns, which is how the solver wants them: a third of the time.
    written = torch.linalg.solve_triangular(system.mT, free.mT, upper=True, left=False, unitriangular=True).mT
    torch.mul(torch.bmm(q, state), carried, out=out)
    out.baddbmm_(torch.bmm(q, k.mT).mul_(left), written)
    return (state * carried[:, -1:]).baddbmm_((k * fades.until).mT, written)
