"""Qwen3-Next: gated delta nets with a layer of gated attention every few, and a mixture on most layers.

Qwen3.5 text is the same with projections side by side, dense or with a mixture on every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    read_activation,
    read_dense,
    read_gqa,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.gated_delta import GatedDeltaSpec
from baton.engine.models.gqa import GatedGqaSpec
from baton.engine.models.layers import DecoderSpec, MixerSpec, MlpSpec, Names
from baton.engine.models.mlp import DenseSpec, WeightedSpec
from baton.engine.models.moe import MoeSpec, Softmax
from baton.plan.models.families.attention import FULL
from baton.plan.models.families.recurrent import LINEAR, delta_net, layer_types

NAMES = {FULL: Names(), LINEAR: Names(mixer="linear_attn")}


def read_gated_gqa(fields: ModelFields) -> GatedGqaSpec:
    """Attention whose queries and keys are normed and turned in part, and whose results are gated."""
    has_bias = fields.flag("attention_bias")
    plain = replace(
        read_gqa(fields, is_partly_turned=True),
        has_input_bias=has_bias,
        has_output_bias=has_bias,
        norm_eps=fields.real("rms_norm_eps"),
        is_norm_centred=True,
    )
    return GatedGqaSpec(plain)


def read_delta(fields: ModelFields, *, is_packed: bool) -> GatedDeltaSpec:
    """The gated delta net of the other layers."""
    kind = delta_net(fields)
    q, _, v = kind.convs
    return GatedDeltaSpec(
        hidden_size=fields.number("hidden_size"),
        num_key_heads=q.units.count,
        num_value_heads=kind.heads,
        key_dim=q.channels,
        value_dim=v.channels,
        num_taps=q.taps,
        norm_eps=fields.real("rms_norm_eps"),
        activation=read_activation(fields),
        is_packed=is_packed,
    )


def read_mixture(fields: ModelFields, *, is_normed: bool) -> MoeSpec:
    """Routed experts, and one that each row weighs by itself."""
    hidden, activation = fields.number("hidden_size"), read_activation(fields)
    num_experts = fields.number("num_experts")
    shared = DenseSpec(hidden, fields.number("shared_expert_intermediate_size"), activation)
    return MoeSpec(
        hidden_size=hidden,
        num_experts=num_experts,
        width=fields.number("moe_intermediate_size"),
        activation=activation,
        rule=Softmax(fields.number("num_experts_per_tok", num_experts), is_normed),
        shared=WeightedSpec(shared),
        shared_name="shared_expert",
    )


def assemble_hybrid(fields: ModelFields, mlps: Sequence[MlpSpec], *, is_packed: bool) -> Blueprint:
    """Layers of both sorts, by layer_types or with attention in every full_attention_interval-th."""
    hidden, eps = fields.number("hidden_size"), fields.real("rms_norm_eps")
    mixers: dict[str, MixerSpec] = {
        FULL: read_gated_gqa(fields),
        LINEAR: read_delta(fields, is_packed=is_packed),
    }
    return Blueprint(
        hidden_size=hidden,
        vocab_size=fields.number("vocab_size"),
        norm_eps=eps,
        is_tied=fields.flag("tie_word_embeddings"),
        layers=tuple(
            DecoderSpec(hidden, eps, mixers[kind], mlp, NAMES[kind], is_norm_centred=True)
            for kind, mlp in zip(layer_types(fields), mlps, strict=True)
        ),
        is_norm_centred=True,
    )


def _read(fields: ModelFields) -> Blueprint:
    sparse, dense = read_mixture(fields, is_normed=fields.flag("norm_topk_prob")), read_dense(fields)
    skipped, step = set(fields.numbers("mlp_only_layers")), fields.number("decoder_sparse_step")
    is_sparse = [i not in skipped and (i + 1) % step == 0 for i in range(fields.num_layers)]
    mlps = [sparse if here else dense for here in is_sparse]
    return replace(assemble_hybrid(fields, mlps, is_packed=True), num_experts=sparse.num_experts)


def _read_dense(fields: ModelFields) -> Blueprint:
    return assemble_hybrid(fields, [read_dense(fields)] * fields.num_layers, is_packed=False)


def _read_moe(fields: ModelFields) -> Blueprint:
    mlp = read_mixture(fields, is_normed=True)
    made = assemble_hybrid(fields, [mlp] * fields.num_layers, is_packed=False)
    return replace(made, num_experts=mlp.num_experts)


HYBRID_DEFAULTS = {
    **COMMON_DEFAULTS,
    "max_position_embeddings": 32_768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
DEFAULTS = {
    **HYBRID_DEFAULTS,
    "num_key_value_heads": 2,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
}
MOE_DEFAULTS = {**HYBRID_DEFAULTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
FAMILIES = {
    "qwen3_5_moe_text": Family(_read_moe, MOE_DEFAULTS),
    "qwen3_5_text": Family(_read_dense, {**HYBRID_DEFAULTS, "num_key_value_heads": 4}),
    "qwen3_next": Family(_read, DEFAULTS),
}
