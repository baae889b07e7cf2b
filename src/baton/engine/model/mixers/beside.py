"""Several mixers on the same rows, whose results are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.decoder import Mixer, MixerSpec
from baton.engine.model.seam import Attention
from baton.engine.model.weights import Loader


@dataclass(frozen=True, slots=True)
class Branch:
    """One of them: what its family calls it, and what its rows and results are multiplied with."""

    name: str
    spec: MixerSpec
    factor_in: float = 1.0
    factor_out: float = 1.0


@dataclass(frozen=True, slots=True)
class BesideSpec:
    """The mixers of one layer."""

    branches: tuple[Branch, ...]

    def load(self, loader: Loader, index: int, prefix: str) -> Beside:
        """This rank's part of all; `prefix` names the module that holds them."""
        return Beside(
            self.branches,
            [branch.spec.load(loader, index, f"{prefix}.{branch.name}") for branch in self.branches],
        )


@dataclass(frozen=True, slots=True)
class Beside:
    """The mixers of one layer on one rank."""

    branches: tuple[Branch, ...]
    mixers: Sequence[Mixer]

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the sum for normed rows x."""
        mixed = torch.zeros_like(x)
        for branch, mixer in zip(self.branches, self.mixers, strict=True):
            mixed += mixer.mix(x * branch.factor_in, attention) * branch.factor_out
        return mixed
