"""A draft layer as DeepSeek-V3 publishes it: it guesses, from a token and the row before it, the token after.

Theory. Row t of the model predicts token t + 1. Row t of the draft sees that row and token t + 1, once it is
known, and predicts token t + 2. It stores its cache entry at place t, as any layer does, so that the draft's
entries lie in the same pages as the model's and are there for exactly as many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.model.ends import VocabularyEmbedding, VocabularyHead
from baton.engine.model.linear import Linear, Outputs, load_fused
from baton.engine.model.norms import NormSpec, RmsNorm
from baton.engine.model.seam import Layer
from baton.engine.model.weights import Loader


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A draft on one rank; seam.Draft says what its parts promise."""

    layer: Layer
    embedding: VocabularyEmbedding
    head: VocabularyHead
    token_norm: RmsNorm
    row_norm: RmsNorm
    joined: Linear

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Both, each normed, side by side through one matrix, which every rank has whole."""
        return self.joined(torch.cat((self.token_norm(embedded), self.row_norm(hidden)), dim=-1))


def load_draft(
    loader: Loader, layer: Layer, norm: NormSpec, ends: tuple[VocabularyEmbedding, VocabularyHead]
) -> DraftLayer:
    """The draft around its layer; embedding and output are the model's own, whose copies are not read."""
    prefix = f"model.layers.{layer.index}"
    embedding, head = ends
    joined = Outputs(f"{prefix}.eh_proj", norm.size, (0, norm.size))
    return DraftLayer(
        layer=layer,
        embedding=embedding,
        head=VocabularyHead(norm.load(loader, f"{prefix}.shared_head.norm.weight"), head.output, head.factor),
        token_norm=norm.load(loader, f"{prefix}.enorm.weight"),
        row_norm=norm.load(loader, f"{prefix}.hnorm.weight"),
        joined=load_fused(loader, 2 * norm.size, (joined,)),
    )
