"""Mistral: Llama with a window on every layer in its early checkpoints."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import COMMON_DEFAULTS, Blueprint, Family, assemble, read_dense, read_gqa
from baton.engine.models.config import ModelFields


def _read(fields: ModelFields) -> Blueprint:
    mixer = replace(read_gqa(fields), window=fields.number_or_none("sliding_window"))
    mlps = [read_dense(fields)] * fields.num_layers
    return assemble(fields, [mixer] * fields.num_layers, mlps)


DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
FAMILIES = {"mistral": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
