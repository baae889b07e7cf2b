"""The layer that most families share: norm, mixer, residual, norm, MLP, residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.engine.model.norms import RmsNorm
from baton.engine.model.seam import Attention
from baton.engine.model.weights import Loader, Piece


class Mixer(Protocol):
    """The half of a layer that looks at other tokens."""

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the output for normed rows x."""


class Mlp(Protocol):
    """The half of a layer that looks at one token at a time."""

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the output for normed rows x."""


class MixerSpec(Protocol):
    """What a config says of a mixer."""

    def load(self, loader: Loader, index: int, prefix: str, /) -> Mixer:
        """This rank's part of it at layer `index`, from the module named `prefix`."""


class MlpSpec(Protocol):
    """What a config says of an MLP."""

    def load(self, loader: Loader, index: int, prefix: str, /) -> Mlp:
        """This rank's part of it at layer `index`, from the module named `prefix`."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What a config says of a layer."""

    hidden_size: int
    norm_eps: float
    mixer: MixerSpec
    mlp: MlpSpec

    def load(self, loader: Loader, index: int) -> Decoder:
        """This rank's part of layer `index`."""
        prefix = f"model.layers.{index}"
        return Decoder(
            index=index,
            mixer_norm=self._norm(loader, f"{prefix}.input_layernorm.weight"),
            mixer=self.mixer.load(loader, index, f"{prefix}.self_attn"),
            mlp_norm=self._norm(loader, f"{prefix}.post_attention_layernorm.weight"),
            mlp=self.mlp.load(loader, index, f"{prefix}.mlp"),
        )

    def _norm(self, loader: Loader, name: str) -> RmsNorm:
        return RmsNorm(loader.take(Piece(name, (self.hidden_size,))), self.norm_eps)


@dataclass(slots=True)
class Decoder:
    """A layer on one rank; seam.Layer says what its methods promise."""

    index: int
    mixer_norm: RmsNorm
    mixer: Mixer
    mlp_norm: RmsNorm
    mlp: Mlp

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the mixer's output."""
        return self.mixer.mix(self.mixer_norm(x), attention)

    def join_mix(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the mixer."""
        return x + mixed

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the MLP's output."""
        return self.mlp.feed(self.mlp_norm(x))

    def join_feed(self, x: Tensor, fed: Tensor) -> Tensor:
        """The residual stream after the MLP."""
        return x + fed
