"""Mistral: Llama with a window on every layer in its early checkpoints; Ministral: on some layers, or all."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    assemble,
    read_dense,
    read_gqa,
    read_windows,
)
from baton.engine.models.config import ModelFields
from baton.plan.models.families.attention import windowed


def _read(fields: ModelFields) -> Blueprint:
    mixer = read_gqa(fields)
    mixers = [replace(mixer, window=window) for window in read_windows(fields, windowed)]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
_FAMILY = Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})
FAMILIES = {"ministral": _FAMILY, "mistral": _FAMILY}
