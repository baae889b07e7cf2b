"""Mixtures of experts: a router, routed experts dealt over dp and tp, and experts that every token uses.

Rows are sorted by expert, so each expert with rows is one matmul over a contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.layers import Mlp, MlpSpec
from baton.engine.models.mlp import gated
from baton.engine.models.weights import Linear, Loader, TensorSlice, cut_evenly, laid_out, rows
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
        router = loader.take(TensorSlice(f"{prefix}.gate.weight", (self.num_experts, self.hidden_size)))
        correction = None
        if self.rule.has_correction:
            name = f"{prefix}.gate.e_score_correction_bias"
            correction = loader.take(TensorSlice(name, (self.num_experts,)), torch.float32)
        shared = self.shared.load(loader, index, f"{prefix}.{self.shared_name}") if self.shared else None
        return Moe(
            rule=self.rule,
            router=Linear(router.float() if self.is_routed_in_float32 else router),
            correction=correction,
            experts=self._experts(loader, f"{prefix}.experts", span),
            shared=shared,
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
        stacked = loader.stack([TensorSlice(name, into) for name in names], into)
        projects = stacked.view(len(modules), 2 * self.width, self.hidden_size)
        outputs = loader.stack([TensorSlice(f"{module}.down_proj.weight", out) for module in modules], out)
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

    rule: Rule
    router: Linear
    experts: Experts | ClampedExperts
    correction: Tensor | None = None
    shared: Mlp | None = None

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""
        logits = self.router(x.to(self.router.weight.dtype)).float()
        weights, chosen = self.rule.route(logits, self.correction)
        fed = self.shared.feed(x) if self.shared is not None else torch.zeros_like(x)
        return add_routed(fed, x, (weights.to(x.dtype), chosen), self.experts)


def add_routed(fed: Tensor, x: Tensor, routed: Routed, experts: Experts | ClampedExperts) -> Tensor:
    """Adds the output of a rank's experts, for the rows routed to them, to `fed`."""
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


# Routing rules: which experts a token goes to, and with what weights.
#
# Every rank routes all rows alike, so that the experts of all ranks together make up the answer.


Routed: TypeAlias = tuple[Tensor, Tensor]
"""Weights in float32 and expert ids, each (rows, experts per token)."""


class Rule(Protocol):
    """From a router's logits (rows, experts) in float32 to experts."""

    has_correction: ClassVar[bool]
    """Whether the router has a learned correction that counts in the choice, not in the weights."""

    def route(self, logits: Tensor, correction: Tensor | None) -> Routed:
        """The experts of each row."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The most probable experts (Qwen3-MoE, DeepSeek-V2), of the best groups where there are groups."""

    num_chosen: int
    is_normed: bool = False
    factor: float = 1.0
    num_groups: int = 1
    num_groups_chosen: int = 1
    has_correction: ClassVar[bool] = False

    def route(self, logits: Tensor, correction: Tensor | None) -> Routed:
        """Groups rank by their best expert; experts of the other groups count as impossible."""
        scores = logits.softmax(dim=-1)
        if self.num_groups > 1:
            best = _grouped(scores, self.num_groups).amax(dim=-1)
            scores = _of_best_groups(scores, best, self.num_groups_chosen, 0.0)
        weights, chosen = scores.topk(self.num_chosen, dim=-1)
        if self.is_normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.factor, chosen


@dataclass(frozen=True, slots=True)
class Sigmoid:
    """Independent scores, corrected for the choice so that the load is even (DeepSeek-V3)."""

    num_chosen: int
    is_normed: bool
    factor: float
    num_groups: int
    num_groups_chosen: int
    has_correction: ClassVar[bool] = True

    def route(self, logits: Tensor, correction: Tensor | None) -> Routed:
        """Groups rank by their two best experts together; weights are the scores without correction."""
        assert correction is not None
        scores = logits.sigmoid()
        corrected = scores + correction
        if self.num_groups_chosen < self.num_groups:
            best = _grouped(corrected, self.num_groups).topk(2, dim=-1).values.sum(dim=-1)
            corrected = _of_best_groups(corrected, best, self.num_groups_chosen, float("-inf"))
        chosen = corrected.topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.is_normed:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.factor, chosen


def _grouped(scores: Tensor, num_groups: int) -> Tensor:
    return scores.view(scores.shape[0], num_groups, scores.shape[1] // num_groups)


def _of_best_groups(scores: Tensor, group_scores: Tensor, num_chosen: int, otherwise: float) -> Tensor:
    """Scores of the experts in the best groups, `otherwise` for the rest."""
    best = group_scores.topk(num_chosen, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return scores.masked_fill(
        is_out.repeat_interleave(scores.shape[1] // group_scores.shape[1], dim=1), otherwise
    )


# gpt-oss's mixture of experts: clamped gates, biases everywhere, gates and values in turn in one tensor.


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

    def load(self, loader: Loader, _index: int, prefix: str) -> Moe:
        """This rank's experts; `prefix` names the module."""
        router = f"{prefix}.router"
        weight = loader.take(TensorSlice(f"{router}.weight", (self.num_experts, self.hidden_size)))
        bias = loader.take(TensorSlice(f"{router}.bias", (self.num_experts,)))
        experts = self._experts(loader, f"{prefix}.experts", cut_evenly(self.num_experts, loader.cut.width))
        return Moe(self.rule, Linear(weight, bias), experts)

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
