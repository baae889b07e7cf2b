"""The two ends of a model: the embedding and the head, both cut by vocabulary over tp."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model.linear import Linear
from baton.engine.model.norms import RmsNorm


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    """The rows [first, first + len(weight)) of the vocabulary."""

    weight: Tensor
    first: int
    is_whole: bool
    factor: float = 1.0
    """What the family multiplies embeddings with."""

    def embed(self, tokens: Tensor) -> Tensor:
        """(rows,) -> partial (rows, hidden): zero for ids of other ranks."""
        if self.is_whole:
            return functional.embedding(tokens, self.weight)
        local = tokens - self.first
        is_here = (local >= 0) & (local < self.weight.shape[0])
        embedded = self.weight.new_zeros(tokens.shape[0], self.weight.shape[1])
        embedded[is_here] = self.weight[local[is_here]]
        return embedded

    def scale(self, x: Tensor) -> Tensor:
        """The embedding times the family's factor, which is rounded to its dtype as published models do."""
        return x if self.factor == 1.0 else x * torch.tensor(self.factor, dtype=x.dtype)


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """The last norm and this rank's rows of the vocabulary."""

    norm: RmsNorm
    output: Linear
    factor: float = 1.0
    """What the family multiplies logits with."""

    def normed(self, x: Tensor) -> Tensor:
        """(rows, hidden) after the last norm."""
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, vocabulary of this rank), float32."""
        logits = self.output(self.norm(x)).to(torch.float32)
        return logits if self.factor == 1.0 else logits * self.factor
