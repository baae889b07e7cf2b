"""Qwen3: Llama with a norm on the queries and keys of each head."""

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
from baton.engine.models.gqa import GqaSpec


def read_normed_gqa(fields: ModelFields) -> GqaSpec:
    """Attention with a norm per head and a bias where the config asks for one."""
    has_bias = fields.flag("attention_bias")
    eps = fields.real("rms_norm_eps")
    return replace(read_gqa(fields), has_input_bias=has_bias, has_output_bias=has_bias, norm_eps=eps)


def _read(fields: ModelFields) -> Blueprint:
    windows = read_windows(fields)
    mixer = read_normed_gqa(fields)
    mixers = [replace(mixer, window=window) for window in windows]
    mlps = [read_dense(fields)] * fields.num_layers
    return assemble(fields, mixers, mlps)


DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {"qwen3": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
