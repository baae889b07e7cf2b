"""Grouped-query attention whose results are gated: q_proj gives each head's gates beside its queries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.engine.model.linear import Linear, laid_out
from baton.engine.model.mixers.gqa import Gqa, GqaSpec
from baton.engine.model.seam import Attention
from baton.engine.model.weights import Loader


@dataclass(frozen=True, slots=True)
class GatedGqaSpec:
    """The attention that is gated."""

    inner: GqaSpec

    def load(self, loader: Loader, index: int, prefix: str) -> GatedGqa:
        """This rank's heads; `prefix` names the module."""
        found, dim = self.inner.load(loader, index, prefix, 2), self.inner.head_dim
        num_gates = found.num_heads * dim
        return GatedGqa(replace(found, project=_gates_last(found.project, dim, num_gates)), num_gates)


@dataclass(frozen=True, slots=True)
class GatedGqa:
    """One layer's attention on one rank; its projection gives the gates of all heads last."""

    inner: Gqa
    num_gates: int

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's heads' part of the output for normed rows x."""
        projected = self.inner.project(x)
        num_cached = projected.shape[1] - self.num_gates
        mixed = self.inner.attend(projected[:, :num_cached], attention)
        return self.inner.output(mixed * projected[:, num_cached:].sigmoid())


def _gates_last(project: Linear, dim: int, num_gates: int) -> Linear:
    """The same with the gates of all heads after everything else, not beside each head's queries."""
    order = torch.arange(len(project.weight), device=project.weight.device)
    pairs = order[: 2 * num_gates].view(-1, 2, dim)
    order = torch.cat((pairs[:, 0].flatten(), order[2 * num_gates :], pairs[:, 1].flatten()))
    return Linear(laid_out(project.weight[order]), None if project.bias is None else project.bias[order])
