"""Bamba: Mamba2 in most layers, and attention in those that the config lists."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import Blueprint, Family, read_dense
from baton.engine.models.config import ModelFields
from baton.engine.models.families.falcon_h1 import MAMBA_DEFAULTS, NAMES, read_attention, read_mamba2
from baton.engine.models.layers import DecoderSpec
from baton.engine.models.mamba2 import GroupNormSpec


def _read(fields: ModelFields) -> Blueprint:
    hidden, eps = fields.number("hidden_size"), fields.real("rms_norm_eps")
    mlp = read_dense(fields, fields.flag("mlp_bias"))
    states = read_mamba2(fields, GroupNormSpec(fields.number("mamba_n_groups"), eps))
    states = replace(states, has_output_bias=states.has_input_bias)
    recurrent = DecoderSpec(hidden, eps, states, mlp, replace(NAMES, mixer="mamba"))
    attending = DecoderSpec(hidden, eps, read_attention(fields), mlp, replace(NAMES, mixer="self_attn"))
    attended = set(fields.numbers("attn_layer_indices"))
    return Blueprint(
        hidden_size=hidden,
        vocab_size=fields.number("vocab_size"),
        norm_eps=eps,
        is_tied=fields.flag("tie_word_embeddings"),
        layers=tuple(attending if i in attended else recurrent for i in range(fields.num_layers)),
        norm_name="model.final_layernorm",
    )


DEFAULTS = {**MAMBA_DEFAULTS, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.5}
FAMILIES = {"bamba": Family(_read, DEFAULTS)}
