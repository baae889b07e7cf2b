"""Mistral: Llama with a window on every layer in its early checkpoints; Ministral: on some layers, or all."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    FULL,
    SLIDING,
    Blueprint,
    Family,
    assemble,
    read_dense,
    read_gqa,
)
from baton.engine.models.config import ModelFields


def _read(fields: ModelFields) -> Blueprint:
    mixer = replace(read_gqa(fields), window=fields.number_or_none("sliding_window"))
    mlps = [read_dense(fields)] * fields.num_layers
    return assemble(fields, [mixer] * fields.num_layers, mlps)


def _read_ministral(fields: ModelFields) -> Blueprint:
    mixer, window = read_gqa(fields), fields.number_or_none("sliding_window")
    kinds = fields.per_layer("layer_types", (FULL, SLIDING)) or [SLIDING] * fields.num_layers
    mixers = [replace(mixer, window=window) if kind == SLIDING else mixer for kind in kinds]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
FAMILIES = {
    "ministral": Family(_read_ministral, {**COMMON_DEFAULTS, **DEFAULTS}),
    "mistral": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS}),
}
