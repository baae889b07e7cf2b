"""The gated MLP, its width cut over dp and tp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn import functional

from baton.engine.models.fused import kernels_for
from baton.engine.models.weights import (
    InputSlice,
    Linear,
    Loader,
    OutputSlice,
    TensorSlice,
    cut_evenly,
    load_fused,
    load_partial,
)


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """The sizes and options of one gated MLP."""

    hidden_size: int
    width: int
    activation: str
    has_bias: bool = False
    gate_factor: float = 1.0
    """What gates are multiplied with before they are activated."""
    output_factor: float = 1.0
    is_weighed: bool = False
    """Each row weighs the result by itself, as Qwen's shared experts; the module for that ends in `_gate`."""

    def load(self, loader: Loader, _index: int, prefix: str) -> Dense:
        """This rank's part of the width; `prefix` names the module."""
        share = loader.cut.width
        span = cut_evenly(self.width, share)
        parts = [
            OutputSlice(f"{prefix}.{name}", self.width, span, self.has_bias)
            for name in ("gate_proj", "up_proj")
        ]
        down = InputSlice(f"{prefix}.down_proj", (self.hidden_size, self.width), span, share, self.has_bias)
        project, output = load_fused(loader, self.hidden_size, parts), load_partial(loader, down)
        weight = TensorSlice(f"{prefix}_gate.weight", (1, self.hidden_size))
        return Dense(self, project, output, Linear(loader.take(weight)) if self.is_weighed else None)


@dataclass(frozen=True, slots=True)
class Dense:
    """One gated MLP on one rank."""

    spec: DenseSpec
    project: Linear
    output: Linear
    weight: Linear | None = None

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        projected, spec = self.project(x), self.spec
        if spec.gate_factor != 1.0:
            projected[:, : projected.shape[1] // 2] *= spec.gate_factor
        fed = self.output(gated(projected, spec.activation))
        if self.weight is not None:
            fed = fed * self.weight(x).sigmoid()
        return fed if spec.output_factor == 1.0 else fed * spec.output_factor


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}
"""By what a config's hidden_act names."""
NAMES = {name: name for name in ACTIVATIONS}


def gated(x: Tensor, activation: str) -> Tensor:
    """x is gates beside values, (rows, 2 n): activated gates times values, (rows, n)."""
    kernels = kernels_for(x) if ACTIVATIONS[activation] is functional.silu and x.dim() == 2 else None
    if kernels is not None:
        fed: Tensor = kernels.silu_gate(x)
        return fed
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
