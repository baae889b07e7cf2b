"""Bamba: Mamba2 in most layers, and attention in those that the config lists."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import Blueprint, ModelFamily, assemble, read_dense, read_gqa
from baton.engine.models.config import ModelFields
from baton.engine.models.families.falcon_h1 import MAMBA_DEFAULTS, NAMES, read_mamba2
from baton.engine.models.mamba2 import GroupNormSpec


def _read(fields: ModelFields) -> Blueprint:
    norm = GroupNormSpec(fields.number("mamba_n_groups"), fields.real("rms_norm_eps"))
    states = read_mamba2(fields, norm)
    recurrent = (replace(states, has_output_bias=states.has_input_bias), replace(NAMES, mixer="mamba"))
    attending = (read_gqa(fields, is_partly_turned=True), replace(NAMES, mixer="self_attn"))
    attended = set(fields.numbers("attn_layer_indices"))
    layers = [attending if i in attended else recurrent for i in range(fields.num_layers)]
    mlps = [read_dense(fields, fields.flag("mlp_bias"))] * len(layers)
    made = assemble(fields, [mixer for mixer, _ in layers], mlps, [names for _, names in layers])
    return replace(made, norm_name="model.final_layernorm")


DEFAULTS = {**MAMBA_DEFAULTS, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.5}
FAMILIES = {"bamba": ModelFamily(_read, DEFAULTS)}
