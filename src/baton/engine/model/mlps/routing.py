"""Routing rules: which experts a token goes to, and with what weights.

Every rank routes all rows alike, so that the experts of all ranks together make up the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Routed: TypeAlias = tuple[Tensor, Tensor]
"""Weights in float32 and expert ids, each (rows, experts per token)."""


class Rule(Protocol):
    """From a router's logits (rows, experts) in float32 to experts."""

    @property
    def has_correction(self) -> bool:
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

    @property
    def has_correction(self) -> bool:
        """No."""
        return False

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

    @property
    def has_correction(self) -> bool:
        """Yes."""
        return True

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
