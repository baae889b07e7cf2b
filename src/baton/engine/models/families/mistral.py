"""Mistral: Llama with a window on every layer in its early checkpoints; Ministral: on some layers, or all."""

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
from baton.plan.models.families.attention import windowed


def _read(fields: ModelFields) -> Blueprint:
    mixer = replace(read_gqa(fields), has_input_bias=False, has_output_bias=False)
    mixers = [replace(mixer, window=window) for window in read_windows(fields, windowed)]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


DEFAULTS = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
_FAMILY = ModelFamily(_read, DEFAULTS)
FAMILIES = {"ministral": _FAMILY, "mistral": _FAMILY}
