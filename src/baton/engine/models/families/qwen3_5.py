"""Qwen3.5 text: Qwen3-Next with projections side by side, dense or with a mixture on every layer."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import Blueprint, Family, read_dense
from baton.engine.models.config import ModelFields
from baton.engine.models.families.qwen3_next import HYBRID_DEFAULTS, assemble_hybrid, read_mixture


def _read(fields: ModelFields) -> Blueprint:
    return assemble_hybrid(fields, [read_dense(fields)] * fields.num_layers, is_packed=False)


def _read_moe(fields: ModelFields) -> Blueprint:
    mlp = read_mixture(fields, is_normed=True)
    made = assemble_hybrid(fields, [mlp] * fields.num_layers, is_packed=False)
    return replace(made, num_experts=mlp.num_experts)


DEFAULTS = {**HYBRID_DEFAULTS, "num_key_value_heads": 4}
MOE_DEFAULTS = {**HYBRID_DEFAULTS, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8}
FAMILIES = {"qwen3_5_text": Family(_read, DEFAULTS), "qwen3_5_moe_text": Family(_read_moe, MOE_DEFAULTS)}
