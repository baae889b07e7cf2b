"""Mixtures of experts: a router, routed experts dealt over dp and tp, and experts that every token uses.

Rows are sorted by expert, so each expert with rows is one matmul over a contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.cuts import cut_evenly
from baton.engine.model.linear import laid_out
from baton.engine.model.mlps.activations import gated
from baton.engine.model.mlps.dense import Dense, DenseSpec
from baton.engine.model.mlps.routing import Rule
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
    shared: DenseSpec | None = None

    def load(self, loader: Loader, index: int, prefix: str) -> Moe:
        """This rank's experts; `prefix` names the module."""
        span = cut_evenly(self.num_experts, loader.cut.width)
        router = loader.take(Piece(f"{prefix}.gate.weight", (self.num_experts, self.hidden_size)))
        correction = None
        if self.rule.has_correction:
            name = f"{prefix}.gate.e_score_correction_bias"
            correction = loader.take(Piece(name, (self.num_experts,)), torch.float32)
        shared = self.shared.load(loader, index, f"{prefix}.shared_experts") if self.shared else None
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
            return Experts(span, laid_out(loader.take(project)), laid_out(loader.take(output)))
        modules = [f"{prefix}.{expert}" for expert in range(*span)]
        names = [f"{module}.{name}.weight" for module in modules for name in ("gate_proj", "up_proj")]
        stacked = loader.stack([Piece(name, into) for name in names], into)
        projects = stacked.view(len(modules), 2 * self.width, self.hidden_size)
        outputs = loader.stack([Piece(f"{module}.down_proj.weight", out) for module in modules], out)
        return Experts(span, laid_out(projects), laid_out(outputs))


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts [span) of a mixture."""

    span: Range
    project: Tensor
    """(experts, gates and values, hidden)."""
    output: Tensor
    """(experts, hidden, width)."""


@dataclass(frozen=True, slots=True)
class Moe:
    """One mixture on one rank."""

    index: int
    spec: MoeSpec
    router: Tensor
    correction: Tensor | None
    experts: Experts
    shared: Dense | None
    on_experts: ExpertsHook | None

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        logits = functional.linear(x.to(self.router.dtype), self.router).float()
        weights, chosen = self.spec.rule.route(logits, self.correction)
        if self.on_experts is not None:
            self.on_experts(self.index, chosen)
        fed = self.shared.feed(x) if self.shared is not None else torch.zeros_like(x)
        return self._add_routed(fed, x, weights.to(x.dtype), chosen)

    def _add_routed(self, fed: Tensor, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Adds this rank's experts to `fed`."""
        first, last = self.experts.span
        sorted_ids, order = chosen.flatten().sort(stable=True)
        bounds = torch.searchsorted(sorted_ids, torch.arange(first, last + 1, device=x.device)).tolist()
        order = order[bounds[0] : bounds[-1]]
        token = order // chosen.shape[1]
        taken = x[token]
        for i, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                block = taken[start - bounds[0] : stop - bounds[0]]
                hidden = gated(functional.linear(block, self.experts.project[i]), self.spec.activation)
                torch.mm(hidden, self.experts.output[i].t(), out=block)
        return fed.index_add_(0, token, taken.mul_(weights.flatten()[order].unsqueeze(1)))
