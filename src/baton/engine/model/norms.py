"""Root-mean-square norm.

Some families keep a weight as its difference to 1: it is held in float32, so that the sum is not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.weights import Loader, Piece


def load_weight(loader: Loader, piece: Piece, *, is_centred: bool) -> Tensor:
    """What a norm multiplies with; `is_centred`: the checkpoint has its difference to 1."""
    return 1 + loader.take(piece, torch.float32) if is_centred else loader.take(piece)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The size and options of one norm."""

    size: int
    eps: float
    is_centred: bool = False

    def load(self, loader: Loader, name: str) -> RmsNorm:
        """The norm whose weight has that name."""
        return RmsNorm(load_weight(loader, Piece(name, (self.size,)), is_centred=self.is_centred), self.eps)


class RmsNorm:
    """Scales rows to unit mean square, then by a weight; sums are in float32 whatever the dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return torch.rms_norm(x, self._shape, self.weight, self.eps)
        return torch.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)


class HeadNorm:
    """The same over the channels of each head, with a weight of its own for every head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return (torch.rms_norm(wide, (x.shape[-1],), None, self.eps) * self.weight).to(x.dtype)
