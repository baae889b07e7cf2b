"""A layer with a norm on both sides of each half: what a half gives is normed before it is added."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.model.decoder import Mixer, MixerSpec, Mlp, MlpSpec
from baton.engine.model.norms import NormSpec, RmsNorm
from baton.engine.model.seam import Attention
from baton.engine.model.weights import Loader


@dataclass(frozen=True, slots=True)
class SandwichSpec:
    """What a config says of a layer; all four norms are alike."""

    norm: NormSpec
    mixer: MixerSpec
    mlp: MlpSpec

    def load(self, loader: Loader, index: int) -> Sandwich:
        """This rank's part of layer `index`."""
        prefix = f"model.layers.{index}"
        return Sandwich(
            index=index,
            mixer_norm=self.norm.load(loader, f"{prefix}.input_layernorm.weight"),
            mixer=self.mixer.load(loader, index, f"{prefix}.self_attn"),
            mixed_norm=self.norm.load(loader, f"{prefix}.post_attention_layernorm.weight"),
            mlp_norm=self.norm.load(loader, f"{prefix}.pre_feedforward_layernorm.weight"),
            mlp=self.mlp.load(loader, index, f"{prefix}.mlp"),
            fed_norm=self.norm.load(loader, f"{prefix}.post_feedforward_layernorm.weight"),
        )


@dataclass(slots=True)
class Sandwich:
    """A layer on one rank; seam.Layer says what its methods promise."""

    index: int
    mixer_norm: RmsNorm
    mixer: Mixer
    mixed_norm: RmsNorm
    mlp_norm: RmsNorm
    mlp: Mlp
    fed_norm: RmsNorm

    def mix(self, x: Tensor, attention: Attention) -> Tensor:
        """This rank's part of the mixer's output."""
        return self.mixer.mix(self.mixer_norm(x), attention)

    def join_mix(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the mixer."""
        return x + self.mixed_norm(mixed)

    def feed(self, x: Tensor) -> Tensor:
        """This rank's part of the MLP's output."""
        return self.mlp.feed(self.mlp_norm(x))

    def join_feed(self, x: Tensor, fed: Tensor) -> Tensor:
        """The residual stream after the MLP."""
        return x + self.fed_norm(fed)
