"""Sequences cut into chunks that are computed at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.mlp import ACTIVATIONS

CHUNK = 64
"""A longer one needs more products among its own tokens, a shorter one more of them with the state."""
LOG_LEAST = -60.0
"""Of a decay: beyond it numbers become so small that processors take many times as long over them."""


def chunks(num_tokens: int) -> Iterator[slice]:
    """Where each chunk lies."""
    for first in range(0, num_tokens, CHUNK):
        yield slice(first, first + CHUNK)


def by_unit(x: Tensor, chunk: slice) -> Tensor:
    """A chunk of (n, tokens, units, channels) as (n, units, tokens, channels)."""
    return x[:, chunk].transpose(1, 2)


def reach(log_decay: Tensor) -> Tensor:
    """Logarithms of decays (..., chunk, 1) summed up to each token.

    In float64: after a token that forgets everything, sums must still resolve a mild decay.
    """
    return log_decay.to(torch.float64).cumsum(-2)


def reaches(log_decay: Tensor) -> Tensor:
    """The same for (..., tokens, 1), chunk by chunk: (..., chunks, CHUNK, 1); the last chunk is filled up."""
    filled = functional.pad(log_decay, (0, 0, 0, -log_decay.shape[-2] % CHUNK))
    return reach(torch.unflatten(filled, -2, (-1, CHUNK)))


def decay(log: Tensor) -> Tensor:
    """From logarithms of at most 0, in float32; tiny results stay normal numbers."""
    return log.clamp_min(LOG_LEAST).to(torch.float32).exp_()


def fading(reached: Tensor) -> Tensor:
    """From summed logarithms (..., chunk, 1): what is left at t of what came at s, 0 for s > t."""
    shape = (*reached.shape[:-1], reached.shape[-2])
    between = torch.empty(shape, dtype=torch.float32, device=reached.device)
    # Subtracted as they are, and rounded afterwards.
    torch.sub(reached, reached.mT, out=between)
    return between.clamp_(LOG_LEAST, 0.0).exp_().tril_()


# The short causal convolution before a recurrence: each channel by itself, over the last few tokens.


@dataclass(frozen=True, slots=True)
class Convolution:
    """Weights (channels, taps + 1), the last for the token itself."""

    weight: Tensor
    bias: Tensor | None
    activation: str

    def advance(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x (n, tokens, channels) after the inputs (n, channels, taps): the outputs, and the last inputs."""
        num_tokens, num_taps = x.shape[1], before.shape[-1]
        inputs = torch.cat((before.mT.to(x.dtype), x), dim=1)
        out = inputs[:, num_taps:] * self.weight[:, num_taps]
        for tap in range(num_taps):
            out.addcmul_(inputs[:, tap : tap + num_tokens], self.weight[:, tap])
        if self.bias is not None:
            out.add_(self.bias)
        return ACTIVATIONS[self.activation](out), inputs[:, num_tokens:].mT
