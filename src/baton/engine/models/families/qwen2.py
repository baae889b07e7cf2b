"""Qwen2 and Qwen2.5: Llama with a bias on queries, keys and values."""

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


def _read(fields: ModelFields) -> Blueprint:
    windows = read_windows(fields)
    mixer = replace(read_gqa(fields), has_input_bias=True)
    mixers = [replace(mixer, window=window) for window in windows]
    mlps = [read_dense(fields)] * fields.num_layers
    return assemble(fields, mixers, mlps)


DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {"qwen2": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
