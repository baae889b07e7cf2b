"""The short causal convolution before a recurrence: each channel by itself, over the last few tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.mlps.activations import ACTIVATIONS


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
