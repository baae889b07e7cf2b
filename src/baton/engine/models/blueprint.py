"""A model as its config describes it: every size and rule, checked before any weight is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.engine.models.base import Layer
from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import GqaSpec
from baton.engine.models.layers import DecoderSpec, MixerSpec, MlpSpec
from baton.engine.models.mla import MlaSpec
from baton.engine.models.mlp import NAMES, DenseSpec
from baton.engine.models.moe import MoeSpec, Rule
from baton.engine.models.rope import RopeSpec, read_rope, rope_values, yarn_amplitude
from baton.engine.models.weights import Loader
from baton.plan.kinds import Paged
from baton.plan.models.families.attention import heads_and_dim
from baton.plan.models.fields import Reader
from baton.plan.ranges import to_ids


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
    num_kv_heads, head_dim = heads_and_dim(fields)
    rope = read_rope(fields, head_dim)
    if rope.dim != head_dim and not is_partly_turned:
        raise fields.refusal(
            f"partial_rotary_factor turns {rope.dim} of {head_dim} channels, "
            "which this family does not know; remove it"
        )
    return GqaSpec(hidden, num_heads, num_kv_heads, head_dim, rope)


def read_windows(fields: ModelFields, read: Reader) -> list[int | None]:
    """The window of each layer, by the reader of what the family caches."""
    windows: dict[int, int | None] = {}
    for kind, layers in read(fields):
        assert isinstance(kind, Paged)
        windows |= dict.fromkeys(to_ids(layers), kind.window or None)
    return [windows[layer] for layer in range(fields.num_layers)]


# What the DeepSeek families share: latent attention, and mixtures that begin after some dense layers.


DENSE, SPARSE = "dense", "sparse"


def read_mla(fields: ModelFields) -> MlaSpec:
    """Latent attention; channels turn in pairs and stay in that order."""
    rope = replace(
        read_rope(fields, fields.number("qk_rope_head_dim")), is_paired_in=True, is_paired_out=True
    )
    plain_dim = fields.number("qk_nope_head_dim")
    return MlaSpec(
        hidden_size=fields.number("hidden_size"),
        num_heads=fields.number("num_attention_heads"),
        query_rank=fields.number_or_none("q_lora_rank"),
        latent_rank=fields.number("kv_lora_rank"),
        plain_dim=plain_dim,
        rope=rope,
        value_dim=fields.number("v_head_dim"),
        scale=(plain_dim + rope.dim) ** -0.5 * _amplification(fields, rope),
        has_bias=fields.flag("attention_bias"),
    )


def _amplification(fields: ModelFields, rope: RopeSpec) -> float:
    """What stretched positions add to the scale of scores, by DeepSeek's mscale_all_dim."""
    weight = rope_values(fields).get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return 1.0
    return (
        yarn_amplitude(
            rope.scaling.factor, ModelFields(fields.where, {"mscale_all_dim": weight}).real("mscale_all_dim")
        )
        ** 2
    )


def read_groups(fields: ModelFields) -> tuple[int, int]:
    """How many groups the experts are in, and how many of them a token may use."""
    num_groups = fields.number_or_none("n_group") or 1
    chosen = fields.number_or_none("topk_group", num_groups) or num_groups
    num_experts = fields.number("n_routed_experts")
    if num_experts % num_groups:
        raise fields.refusal(f"n_group is {num_groups}; it must divide the {num_experts} n_routed_experts")
    return num_groups, chosen


def assemble_latent(
    fields: ModelFields, mixers: Sequence[MlaSpec], rule: Rule, has_mlp_bias: bool = False
) -> Blueprint:
    """The model, its first layers dense."""
    dense, sparse = read_dense(fields, has_mlp_bias), _read_moe(fields, rule, has_mlp_bias)
    first = fields.number("first_k_dense_replace", least=0)
    step = fields.number("moe_layer_freq")
    types = fields.per_layer("mlp_layer_types", (DENSE, SPARSE))
    if types is None:
        types = [SPARSE if i >= first and i % step == 0 else DENSE for i in range(fields.num_layers)]
    mlps = [sparse if each == SPARSE else dense for each in types]
    made = assemble(fields, mixers, mlps)
    has_draft = bool(fields.number_or_none("num_nextn_predict_layers", least=0))
    return replace(made, num_experts=sparse.num_experts, draft=made.layers[-1] if has_draft else None)


def _read_moe(fields: ModelFields, rule: Rule, has_mlp_bias: bool) -> MoeSpec:
    hidden, width = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    activation, shared = read_activation(fields), fields.number_or_none("n_shared_experts", least=0)
    return MoeSpec(
        hidden_size=hidden,
        num_experts=fields.number("n_routed_experts"),
        width=width,
        activation=activation,
        rule=rule,
        is_routed_in_float32=True,
        shared=DenseSpec(hidden, width * shared, activation, has_mlp_bias) if shared else None,
    )
