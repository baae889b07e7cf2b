"""The gated MLP, its width cut over dp and tp."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.model.cuts import cut_evenly
from baton.engine.model.linear import Inputs, Linear, Outputs, load_fused, load_partial
from baton.engine.model.mlps.activations import gated
from baton.engine.model.weights import Loader


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
            Outputs(f"{prefix}.{name}", self.width, span, self.has_bias) for name in ("gate_proj", "up_proj")
        ]
        down = Inputs(f"{prefix}.down_proj", (self.hidden_size, self.width), span, share, self.has_bias)
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
