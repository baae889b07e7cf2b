"""The layer that all families share: norm, mixer, residual, norm, MLP, residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.models.base import Attention
from baton.engine.models.fused import kernels_for
from baton.engine.models.weights import Linear, Loader, OutputSlice, TensorSlice, load_fused


class Mixer(Protocol):
    """The half of a layer that looks at other tokens."""

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the output for normed rows x."""


class Mlp(Protocol):
    """The half of a layer that looks at one token at a time."""

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""


class MixerSpec(Protocol):
    """A mixer, as the config describes it."""

    def load(self, loader: Loader, index: int, prefix: str, /) -> Mixer:
        """This rank's part of it at layer `index`, from the module named `prefix`."""


class MlpSpec(Protocol):
    """An MLP, as the config describes it."""

    def load(self, loader: Loader, index: int, prefix: str, /) -> Mlp:
        """This rank's part of it at layer `index`, from the module named `prefix`."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a layer's modules in a family's checkpoints."""

    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    """Empty where the layer itself holds what the mixer consists of."""
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"
    mixed_norm: str = ""
    """Of what the mixer gives, before it is added; empty where that is not normed."""
    fed_norm: str = ""
    """Of what the MLP gives."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A layer, as the config describes it."""

    norm: NormSpec
    """All norms of a layer are alike."""
    mixer: MixerSpec
    mlp: MlpSpec
    names: Names = Names()

    def load(self, loader: Loader, index: int, prefix: str = "") -> Decoder:
        """This rank's part of layer `index`, from the module named `prefix` or else by its index."""
        prefix, names = prefix or f"model.layers.{index}", self.names

        def norm(name: str) -> RmsNorm | None:
            return self.norm.load(loader, f"{prefix}.{name}.weight") if name else None

        return Decoder(
            index=index,
            mixer_norm=self.norm.load(loader, f"{prefix}.{names.mixer_norm}.weight"),
            mixer=self.mixer.load(loader, index, f"{prefix}.{names.mixer}".removesuffix(".")),
            mixed_norm=norm(names.mixed_norm),
            mlp_norm=self.norm.load(loader, f"{prefix}.{names.mlp_norm}.weight"),
            mlp=self.mlp.load(loader, index, f"{prefix}.{names.mlp}"),
            fed_norm=norm(names.fed_norm),
        )


@dataclass(frozen=True, slots=True)
class Decoder:
    """A layer on one rank; `baton.engine.models.base` says how its methods are called."""

    index: int
    """Global layer id."""
    mixer_norm: RmsNorm
    mixer: Mixer
    mixed_norm: RmsNorm | None
    mlp_norm: RmsNorm
    mlp: Mlp
    fed_norm: RmsNorm | None

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the mixer's output."""
        return self.mixer.mix(self.mixer_norm(x), attention)

    def join_mix(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the mixer, given the summed output."""
        return x + (mixed if self.mixed_norm is None else self.mixed_norm(mixed))

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the MLP's output."""
        return self.mlp.feed(self.mlp_norm(x))

    def join_feed(self, x: Tensor, fed: Tensor) -> Tensor:
        """The residual stream after the MLP, given the summed output."""
        return x + (fed if self.fed_norm is None else self.fed_norm(fed))


# Root-mean-square norm.
#
# Some families keep a weight as its difference to 1: it is held in float32, so that the sum is not rounded.


def load_weight(loader: Loader, piece: TensorSlice, *, is_centred: bool) -> Tensor:
    """What a norm multiplies with; `is_centred`: the checkpoint has its difference to 1."""
    return 1 + loader.take(piece, torch.float32) if is_centred else loader.take(piece)


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The size and options of one norm."""

    size: int
    eps: float
    is_centred: bool = False

    def load(self, loader: Loader, name: str) -> RmsNorm:
        """The norm whose weight has that name."""
        return RmsNorm(
            load_weight(loader, TensorSlice(name, (self.size,)), is_centred=self.is_centred), self.eps
        )


class RmsNorm:
    """Scales rows to unit mean square, then by a weight; sums are in float32 whatever the dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._shape = (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        kernels = kernels_for(x) if x.dim() == 2 else None
        if kernels is not None:
            normed: Tensor = kernels.rms_norm(x, self.weight, self.eps)
            return normed
        if x.dtype == self.weight.dtype:
            return torch.rms_norm(x, self._shape, self.weight, self.eps)
        return torch.rms_norm(x.to(self.weight.dtype), self._shape, self.weight, self.eps).to(x.dtype)


class HeadNorm:
    """The same over the channels of each head, with a weight of its own for every head."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return (torch.rms_norm(wide, (x.shape[-1],), None, self.eps) * self.weight).to(x.dtype)


# The two ends of a model: the embedding and the head, both cut by vocabulary over tp.


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
        """(rows, hidden) after the last norm: what a draft goes on from."""
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """(rows, hidden) -> (rows, vocabulary of this rank), float32; ranks in order make up the whole."""
        logits = self.output(self.norm(x)).to(torch.float32)
        return logits if self.factor == 1.0 else logits * self.factor


# A draft layer as DeepSeek-V3 and Qwen3-Next have it: it guesses, from a token and the row before it, the
# token after.
#
# Theory. Row t of the model predicts token t + 1. Row t of the draft sees that row and token t + 1, once it
# is known, and predicts token t + 2. It stores its cache entry at place t, as any layer does, so that the
# draft's entries lie in the same pages as the model's and are there for exactly as many tokens.


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """What a config says of a draft layer, and what its family calls the parts of it, or else DeepSeek."""

    layer: DecoderSpec
    prefix: str = "model.layers.{index}"
    inner: str = ""
    """Of the layer itself, behind the prefix."""
    joined: str = "eh_proj"
    token_norm: str = "enorm"
    row_norm: str = "hnorm"
    norm: str = "shared_head.norm"

    def load(
        self, loader: Loader, index: int, ends: tuple[VocabularyEmbedding, VocabularyHead]
    ) -> DraftLayer:
        """The draft around its layer; embedding and output are the model's own, whose copies are not read."""
        prefix, norm = self.prefix.format(index=index), self.layer.norm
        embedding, head = ends
        joined = OutputSlice(f"{prefix}.{self.joined}", norm.size, (0, norm.size))
        return DraftLayer(
            layer=self.layer.load(loader, index, f"{prefix}.{self.inner}".removesuffix(".")),
            embedding=embedding,
            head=VocabularyHead(norm.load(loader, f"{prefix}.{self.norm}.weight"), head.output, head.factor),
            token_norm=norm.load(loader, f"{prefix}.{self.token_norm}.weight"),
            row_norm=norm.load(loader, f"{prefix}.{self.row_norm}.weight"),
            joined=load_fused(loader, 2 * norm.size, (joined,)),
        )


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """A draft on one rank, on the last stage."""

    layer: Decoder
    embedding: VocabularyEmbedding
    """The model's own."""
    head: VocabularyHead
    """A norm of its own before the model's vocabulary."""
    token_norm: RmsNorm
    row_norm: RmsNorm
    joined: Linear

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The next tokens' embeddings and the model's normed last rows, side by side through one matrix."""
        return self.joined(torch.cat((self.token_norm(embedded), self.row_norm(hidden)), dim=-1))


@dataclass(frozen=True, slots=True)
class ModelStage:
    """The layers that one rank runs."""

    layers: tuple[Decoder, ...]
    embedding: VocabularyEmbedding | None
    head: VocabularyHead | None
    draft: DraftLayer | None = None
