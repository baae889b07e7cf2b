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
        return Dense(project, output, self.activation, self.gate_factor, self.output_factor)


@dataclass(frozen=True, slots=True)
class Dense:
    """One gated MLP on one rank."""

    project: Linear
    output: Linear
    activation: str
    gate_factor: float = 1.0
    output_factor: float = 1.0

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        projected = self.project(x)
        if self.gate_factor != 1.0:
            projected[:, : projected.shape[1] // 2] *= self.gate_factor
        fed = self.output(gated(projected, self.activation))
        return fed if self.output_factor == 1.0 else fed * self.output_factor


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


# An MLP whose result each row weighs by itself, such as the shared expert of Qwen's later mixtures.


@dataclass(frozen=True, slots=True)
class WeightedSpec:
    """The MLP that is weighed; the weighing module has its name and `_gate`."""

    inner: DenseSpec

    def load(self, loader: Loader, index: int, prefix: str) -> Weighted:
        """This rank's part of the width; `prefix` names the module."""
        gate = loader.take(TensorSlice(f"{prefix}_gate.weight", (1, self.inner.hidden_size)))
        return Weighted(self.inner.load(loader, index, prefix), Linear(gate))


@dataclass(frozen=True, slots=True)
class Weighted:
    """One such MLP on one rank."""

    inner: Dense
    gate: Linear

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        return self.inner.feed(x) * self.gate(x).sigmoid()
