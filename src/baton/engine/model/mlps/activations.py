"""What a config's hidden_act names; each works in place on its argument where it can."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional


def _silu(x: Tensor) -> Tensor:
    return functional.silu(x)


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": _silu,
    "swish": _silu,
    "gelu": _gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
}
NAMES = {name: name for name in ACTIVATIONS}


def gated(x: Tensor, activation: str) -> Tensor:
    """x is gates beside values, (rows, 2 n): activated gates times values, (rows, n)."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
