"""Gemma 3, the language model: windows and a rope base of their own on most layers, norms on both sides."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble,
    read_dense,
    read_gqa,
    read_windows,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import GqaSpec
from baton.engine.models.layers import Names
from baton.plan.models.families.attention import FULL, WINDOWED, patterned

THETAS = {FULL: ("rope_theta", 1_000_000.0), WINDOWED: ("rope_local_base_freq", 10_000.0)}
"""By sort of layer: where configs without rope_parameters have the base, and what it is if they do not."""
NAMES = Names(
    mixed_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    fed_norm="post_feedforward_layernorm",
)


def _read(fields: ModelFields) -> Blueprint:
    fields.require("use_bidirectional_attention", False)
    fields.require("attn_logit_softcapping")
    fields.require("final_logit_softcapping")
    fields = ModelFields(fields.where, {**fields.values, "hidden_act": fields.values["hidden_activation"]})
    mixers = {kind: _read_mixer(fields, kind) for kind in THETAS}
    by_layer = [mixers[WINDOWED if window else FULL] for window in read_windows(fields, patterned)]
    num_layers = fields.num_layers
    made = assemble(
        fields, by_layer, [read_dense(fields)] * num_layers, [NAMES] * num_layers, is_norm_centred=True
    )
    return replace(made, embedding_factor=made.norm.size**0.5)


def _read_mixer(fields: ModelFields, kind: str) -> GqaSpec:
    """The attention of one sort of layer; a config's rope_scaling stretches the full layers alone."""
    name, theta = THETAS[kind]
    stated = fields.mapping("rope_parameters").get(kind)
    if stated is None:
        scaling = fields.mapping("rope_scaling") if kind == FULL else {}
        stated = {"rope_theta": fields.values.get(name) or theta, **scaling}
    turned = {"rope_parameters": stated, "rope_scaling": None, "rope_theta": None}
    return replace(
        read_gqa(ModelFields(fields.where, {**fields.values, **turned})),
        norm_eps=fields.real("rms_norm_eps"),
        is_norm_centred=True,
        window=fields.number("sliding_window") if kind == WINDOWED else None,
        scale=fields.positive("query_pre_attn_scalar") ** -0.5,
    )


DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
FAMILIES = {"gemma3_text": ModelFamily(_read, DEFAULTS)}
