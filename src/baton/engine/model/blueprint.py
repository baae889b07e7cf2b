"""What a config says of a model: every size and rule, checked, with no weight read yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.engine.model.decoder import DecoderSpec, MixerSpec, MlpSpec
from baton.engine.model.fields import ModelFields
from baton.engine.model.mixers.gqa import GqaSpec
from baton.engine.model.mlps.activations import NAMES
from baton.engine.model.mlps.dense import DenseSpec
from baton.engine.model.rope import read_rope
from baton.engine.model.seam import Layer
from baton.engine.model.weights import Loader

FULL, SLIDING = "full_attention", "sliding_attention"


class LayerSpec(Protocol):
    """What a config says of a layer."""

    def load(self, loader: Loader, index: int, /) -> Layer:
        """This rank's part of layer `index`."""


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model as its config describes it."""

    hidden_size: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    """The head's matrix is the embedding's."""
    layers: tuple[LayerSpec, ...]
    num_experts: int = 0
    embedding_factor: float = 1.0
    """What embeddings are multiplied with before the first layer."""
    is_norm_centred: bool = False
    """The last norm's weight is kept as its difference to 1."""
    norm_name: str = "model.norm"
    """What the family calls the last norm."""
    head_factor: float = 1.0
    """What logits are multiplied with."""
    draft: LayerSpec | None = None
    """The layer after the last one that guesses a token further, where the checkpoint has one."""


@dataclass(frozen=True, slots=True)
class Family:
    """Models that are built alike: how a config is read, and fields that it may leave out."""

    read: Callable[[ModelFields], Blueprint]
    defaults: Mapping[str, object] = field(default_factory=dict)


COMMON_DEFAULTS: Mapping[str, object] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def assemble(fields: ModelFields, mixers: Sequence[MixerSpec], mlps: Sequence[MlpSpec]) -> Blueprint:
    """A model of plain decoder layers."""
    hidden, eps = fields.number("hidden_size"), fields.real("rms_norm_eps")
    layers = tuple(DecoderSpec(hidden, eps, mixer, mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    is_tied = fields.flag("tie_word_embeddings")
    return Blueprint(hidden, fields.number("vocab_size"), eps, is_tied, layers)


def read_activation(fields: ModelFields) -> str:
    """hidden_act, if it is one that is built here."""
    return fields.choice("hidden_act", NAMES) or "silu"


def read_dense(fields: ModelFields, has_bias: bool = False) -> DenseSpec:
    """The MLP of the dense layers."""
    hidden, width = fields.number("hidden_size"), fields.number("intermediate_size")
    return DenseSpec(hidden, width, read_activation(fields), has_bias)


def read_gqa(fields: ModelFields, *, is_partly_turned: bool = False) -> GqaSpec:
    """The attention of layers that cache keys and values, without bias, norm or window."""
    hidden, num_heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    num_kv_heads = fields.number_or_none("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.refusal(
            f"num_attention_heads is {num_heads}; it must be a multiple of the {num_kv_heads} kv heads"
        )
    head_dim = fields.number_or_none("head_dim") or hidden // num_heads
    rope = read_rope(fields, head_dim)
    if rope.dim != head_dim and not is_partly_turned:
        raise fields.refusal(
            f"partial_rotary_factor turns {rope.dim} of {head_dim} channels, "
            "which this family does not know; remove it"
        )
    return GqaSpec(hidden, num_heads, num_kv_heads, head_dim, rope)


def read_pattern(fields: ModelFields) -> list[str]:
    """Which layers are full and which have a window: every sliding_window_pattern-th is full."""
    kinds = fields.per_layer("layer_types", (FULL, SLIDING))
    if kinds is not None:
        return kinds
    period = fields.number("sliding_window_pattern")
    return [SLIDING if (i + 1) % period else FULL for i in range(fields.num_layers)]


def read_windows(fields: ModelFields) -> list[int | None]:
    """The window of each layer, as Qwen2 and Qwen3 spell it."""
    window = fields.number_or_none("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = fields.per_layer("layer_types", (FULL, SLIDING))
    if kinds is None:
        first = fields.number("max_window_layers", least=0)
        kinds = [SLIDING if i >= first else FULL for i in range(fields.num_layers)]
    return [window if kind == SLIDING else None for kind in kinds]
