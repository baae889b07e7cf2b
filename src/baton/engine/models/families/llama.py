"""Llama 2 and 3, and models in their shape, such as SmolLM2."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import COMMON_DEFAULTS, Blueprint, Family, assemble, read_dense, read_gqa
from baton.engine.models.config import ModelFields


def _read(fields: ModelFields) -> Blueprint:
    has_bias = fields.flag("attention_bias")
    mixer = replace(read_gqa(fields), has_input_bias=has_bias, has_output_bias=has_bias)
    mlp = read_dense(fields, fields.flag("mlp_bias"))
    return assemble(fields, [mixer] * fields.num_layers, [mlp] * fields.num_layers)


FAMILIES = {"llama": Family(_read, {**COMMON_DEFAULTS, "max_position_embeddings": 2048})}
