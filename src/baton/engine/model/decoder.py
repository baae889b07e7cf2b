"""The layer that most families share: norm, mixer, residual, norm, MLP, residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from baton.engine.model.norms import NormSpec, RmsNorm
from baton.engine.model.seam import Attention
from baton.engine.model.weights import Loader


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
class Names:
    """What a family calls the modules of a layer."""

    mixer_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    """Empty where the layer itself holds what the mixer consists of."""
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """What a config says of a layer."""

    hidden_size: int
    norm_eps: float
    mixer: MixerSpec
    mlp: MlpSpec
    names: Names = Names()
    is_norm_centred: bool = False

    def load(self, loader: Loader, index: int) -> Decoder:
        """This rank's part of layer `index`."""
        prefix = f"model.layers.{index}"
        norm, names = NormSpec(self.hidden_size, self.norm_eps, self.is_norm_centred), self.names
        return Decoder(
            index=index,
            mixer_norm=norm.load(loader, f"{prefix}.{names.mixer_norm}.weight"),
            mixer=self.mixer.load(loader, index, f"{prefix}.{names.mixer}".removesuffix(".")),
            mlp_norm=norm.load(loader, f"{prefix}.{names.mlp_norm}.weight"),
            mlp=self.mlp.load(loader, index, f"{prefix}.{names.mlp}"),
        )


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
