"""gpt-oss's mixture of experts: clamped gates, biases everywhere, gates and values in turn in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.cuts import cut_evenly
from baton.engine.model.linear import Linear, laid_out
from baton.engine.model.mlps.moe import add_routed
from baton.engine.model.mlps.routing import Rule
from baton.engine.model.weights import ExpertsHook, Loader, Piece, rows
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class ClampedSpec:
    """The sizes and options of one mixture."""

    hidden_size: int
    num_experts: int
    width: int
    rule: Rule
    gain: float
    """Of a gate inside its sigmoid."""
    limit: float
    """Values are cut off here on both sides, gates above."""

    def load(self, loader: Loader, index: int, prefix: str) -> Clamped:
        """This rank's experts; `prefix` names the module."""
        router = f"{prefix}.router"
        weight = loader.take(Piece(f"{router}.weight", (self.num_experts, self.hidden_size)))
        bias = loader.take(Piece(f"{router}.bias", (self.num_experts,)))
        experts = self._experts(loader, f"{prefix}.experts", cut_evenly(self.num_experts, loader.cut.width))
        return Clamped(index, self, Linear(weight, bias), experts, loader.on_experts)

    def _experts(self, loader: Loader, prefix: str, span: Range) -> ClampedExperts:
        def taken(name: str, *shape: int) -> Tensor:
            return loader.take(rows(f"{prefix}.{name}", (self.num_experts, *shape), span))

        return ClampedExperts(
            span=span,
            spec=self,
            project=laid_out(taken("gate_up_proj", self.hidden_size, 2 * self.width).mT),
            project_bias=taken("gate_up_proj_bias", 2 * self.width),
            output=laid_out(taken("down_proj", self.width, self.hidden_size).mT),
            output_bias=taken("down_proj_bias", self.hidden_size),
        )


@dataclass(frozen=True, slots=True)
class ClampedExperts:
    """The routed experts [span) of a mixture."""

    span: Range
    spec: ClampedSpec
    project: Tensor
    """(experts, gates and values in turn, hidden)."""
    project_bias: Tensor
    output: Tensor
    """(experts, hidden, width)."""
    output_bias: Tensor

    def run(self, i: int, block: Tensor) -> Tensor:
        """The i-th of the span on rows."""
        limit = self.spec.limit
        both = functional.linear(block, self.project[i], self.project_bias[i])
        gate, up = both[..., 0::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
        gated = (up + 1) * (gate * torch.sigmoid(gate * self.spec.gain))
        return functional.linear(gated, self.output[i], self.output_bias[i])


@dataclass(frozen=True, slots=True)
class Clamped:
    """One mixture on one rank."""

    index: int
    spec: ClampedSpec
    router: Linear
    experts: ClampedExperts
    on_experts: ExpertsHook | None

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        weights, chosen = self.spec.rule.route(self.router(x).float(), None)
        if self.on_experts is not None:
            self.on_experts(self.index, chosen)
        return add_routed(torch.zeros_like(x), x, (weights.to(x.dtype), chosen), self.experts)
