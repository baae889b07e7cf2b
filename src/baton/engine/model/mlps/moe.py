"""Mixtures of experts: a router, routed experts dealt over dp and tp, and experts that every token uses.

Rows are sorted by expert, so each expert with rows is one matmul over a contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.cuts import cut_evenly
from baton.engine.model.decoder import Mlp, MlpSpec
from baton.engine.model.linear import laid_out
from baton.engine.model.mlps.activations import gated
from baton.engine.model.mlps.routing import Routed, Rule
from baton.engine.model.weights import ExpertsHook, Loader, Piece, rows
from baton.plan.ranges import Range


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The sizes and options of one mixture."""

    hidden_size: int
    num_experts: int
    width: int
    activation: str
    rule: Rule
    is_routed_in_float32: bool = False
    """The router's matmul, not its scores alone, is in float32."""
    shared: MlpSpec | None = None
    shared_name: str = "shared_experts"

    def load(self, loader: Loader, index: int, prefix: str) -> Moe:
        """This rank's experts; `prefix` names the module."""
        span = cut_evenly(self.num_experts, loader.cut.width)
        router = loader.take(Piece(f"{prefix}.gate.weight", (self.num_experts, self.hidden_size)))
        correction = None
        if self.rule.has_correction:
            name = f"{prefix}.gate.e_score_correction_bias"
            correction = loader.take(Piece(name, (self.num_experts,)), torch.float32)
        shared = self.shared.load(loader, index, f"{prefix}.{self.shared_name}") if self.shared else None
        return Moe(
            index=index,
            spec=self,
            router=router.float() if self.is_routed_in_float32 else router,
            correction=correction,
            experts=self._experts(loader, f"{prefix}.experts", span),
            shared=shared,
            on_experts=loader.on_experts,
        )

    def _experts(self, loader: Loader, prefix: str, span: Range) -> Experts:
        """From one tensor for all experts, or from one module for each, whichever the checkpoint has."""
        into, out = (self.width, self.hidden_size), (self.hidden_size, self.width)
        if loader.has(f"{prefix}.gate_up_proj"):
            project = rows(
                f"{prefix}.gate_up_proj", (self.num_experts, 2 * self.width, self.hidden_size), span
            )
            output = rows(f"{prefix}.down_proj", (self.num_experts, *out), span)
            pair = laid_out(loader.take(project)), laid_out(loader.take(output))
            return Experts(span, *pair, self.activation)
        modules = [f"{prefix}.{expert}" for expert in range(*span)]
        names = [f"{module}.{name}.weight" for module in modules for name in ("gate_proj", "up_proj")]
        stacked = loader.stack([Piece(name, into) for name in names], into)
        projects = stacked.view(len(modules), 2 * self.width, self.hidden_size)
        outputs = loader.stack([Piece(f"{module}.down_proj.weight", out) for module in modules], out)
        return Experts(span, laid_out(projects), laid_out(outputs), self.activation)


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts [span) of a mixture."""

    span: Range
    project: Tensor
    """(experts, gates and values, hidden)."""
    output: Tensor
    """(experts, hidden, width)."""
    activation: str

    def run(self, i: int, block: Tensor) -> Tensor:
        """The i-th of the span on rows, which may be overwritten."""
        hidden = gated(functional.linear(block, self.project[i]), self.activation)
        return torch.mm(hidden, self.output[i].t(), out=block)


@dataclass(frozen=True, slots=True)
class Moe:
    """One mixture on one rank."""

    index: int
    spec: MoeSpec
    router: Tensor
    correction: Tensor | None
    experts: Experts
    shared: Mlp | None
    on_experts: ExpertsHook | None

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        logits = functional.linear(x.to(self.router.dtype), self.router).float()
        weights, chosen = self.spec.rule.route(logits, self.correction)
        if self.on_experts is not None:
            self.on_experts(self.index, chosen)
        fed = self.shared.feed(x) if self.shared is not None else torch.zeros_like(x)
        return add_routed(fed, x, (weights.to(x.dtype), chosen), self.experts)


class RoutedExperts(Protocol):
    """Some of the routed experts of a mixture."""

    @property
    def span(self) -> Range:
        """Which of them."""

    def run(self, i: int, block: Tensor) -> Tensor:
        """The i-th of the span on rows, which may be overwritten."""


def add_routed(fed: Tensor, x: Tensor, routed: Routed, experts: RoutedExperts) -> Tensor:
    """Adds what a rank's experts make of the rows that were routed to them to `fed`."""
    weights, chosen = routed
    first, last = experts.span
    sorted_ids, order = chosen.flatten().sort(stable=True)
    bounds = torch.searchsorted(sorted_ids, torch.arange(first, last + 1, device=x.device)).tolist()
    order = order[bounds[0] : bounds[-1]]
    token = order // chosen.shape[1]
    taken = x[token]
    for i, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            block = taken[start - bounds[0] : stop - bounds[0]]
            block.copy_(experts.run(i, block))
    return fed.index_add_(0, token, taken.mul_(weights.flatten()[order].unsqueeze(1)))
