"""Qwen3-Next: gated delta nets with a layer of gated attention every few, and a mixture on most layers.

Qwen3.5 text is the same with projections side by side, dense or with a mixture on every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble,
    read_activation,
    read_dense,
    read_gqa,
    read_moe,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.families.qwen import place_mixtures
from baton.engine.models.gated_delta import GatedDeltaSpec
from baton.engine.models.layers import DecoderSpec, DraftSpec, MixerSpec, MlpSpec, Names
from baton.engine.models.mlp import DenseSpec
from baton.engine.models.moe import MoeSpec, Softmax
from baton.plan.models.families.attention import FULL
from baton.plan.models.families.recurrent import LINEAR, delta_net, layer_types

NAMES = {FULL: Names(), LINEAR: Names(mixer="linear_attn")}
DRAFT_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def read_mixture(fields: ModelFields, *, is_normed: bool) -> MoeSpec:
    """Routed experts, and one that each row weighs by itself."""
    num_experts = fields.number("num_experts")
    mixture = read_moe(
        fields, num_experts, Softmax(fields.number("num_experts_per_tok", num_experts), is_normed)
    )
    width = fields.number("shared_expert_intermediate_size")
    shared = DenseSpec(mixture.hidden_size, width, mixture.activation, is_weighed=True)
    return replace(mixture, shared=shared, shared_name="shared_expert")


def assemble_hybrid(
    fields: ModelFields, mlps: Sequence[MlpSpec], draft_mlp: MlpSpec, *, is_packed: bool
) -> Blueprint:
    """Layers of both sorts, by layer_types or with attention in every full_attention_interval-th.

    The draft layer has attention.
    """
    hidden, eps = fields.number("hidden_size"), fields.real("rms_norm_eps")
    attention = read_gqa(fields, is_partly_turned=True)
    mixers: dict[str, MixerSpec] = {
        FULL: replace(attention, norm_eps=eps, is_norm_centred=True, is_gated=True),
        LINEAR: GatedDeltaSpec(hidden, delta_net(fields), eps, read_activation(fields), is_packed),
    }
    kinds = layer_types(fields)
    by_layer, names = [mixers[kind] for kind in kinds], [NAMES[kind] for kind in kinds]
    made = assemble(fields, by_layer, mlps, names, is_norm_centred=True)
    counts = [fields.number_or_none(name, least=0) for name in DRAFT_COUNTS]
    if not any(counts) or fields.flag("mtp_use_dedicated_embeddings"):
        return made
    draft = DraftSpec(
        DecoderSpec(made.norm, mixers[FULL], draft_mlp),
        prefix="mtp",
        inner="layers.0",
        joined="fc",
        token_norm="pre_fc_norm_embedding",
        row_norm="pre_fc_norm_hidden",
        norm="norm",
    )
    return replace(made, draft=draft)


def _read(fields: ModelFields) -> Blueprint:
    mixture = read_mixture(fields, is_normed=fields.flag("norm_topk_prob"))
    return assemble_hybrid(fields, place_mixtures(fields, mixture), mixture, is_packed=True)


def _read_dense(fields: ModelFields) -> Blueprint:
    dense = read_dense(fields)
    return assemble_hybrid(fields, [dense] * fields.num_layers, dense, is_packed=False)


def _read_moe(fields: ModelFields) -> Blueprint:
    mixture = read_mixture(fields, is_normed=True)
    return assemble_hybrid(fields, [mixture] * fields.num_layers, mixture, is_packed=False)


HYBRID_DEFAULTS = {
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
    # Configs do not say that there is one; its weights are with the others.
    "num_nextn_predict_layers": 1,
}
MOE_DEFAULTS = {**HYBRID_DEFAULTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
FAMILIES = {
    "qwen3_5_moe_text": ModelFamily(_read_moe, MOE_DEFAULTS),
    "qwen3_5_text": ModelFamily(_read_dense, {**HYBRID_DEFAULTS, "num_key_value_heads": 4}),
    "qwen3_next": ModelFamily(_read, DEFAULTS),
}
