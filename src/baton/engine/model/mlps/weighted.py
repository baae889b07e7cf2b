"""An MLP whose result each row weighs by itself, such as the shared expert of Qwen's later mixtures."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.model.linear import Linear
from baton.engine.model.mlps.dense import Dense, DenseSpec
from baton.engine.model.weights import Loader, Piece


@dataclass(frozen=True, slots=True)
class WeightedSpec:
    """The MLP that is weighed; the weighing module has its name and `_gate`."""

    inner: DenseSpec

    def load(self, loader: Loader, index: int, prefix: str) -> Weighted:
        """This rank's part of the width; `prefix` names the module."""
        gate = loader.take(Piece(f"{prefix}_gate.weight", (1, self.inner.hidden_size)))
        return Weighted(self.inner.load(loader, index, prefix), Linear(gate))


@dataclass(frozen=True, slots=True)
class Weighted:
    """One such MLP on one rank."""

    inner: Dense
    gate: Linear

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        return self.inner.feed(x) * self.gate(x).sigmoid()
