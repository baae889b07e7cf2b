"""Root-mean-square norm."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


class RmsNorm:
    """Scales rows to unit mean square, then by a weight; sums are in float32 whatever the dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class HeadNorm:
    """The same over the channels of each head, with a weight of its own for every head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), None, self.eps) * self.weight
