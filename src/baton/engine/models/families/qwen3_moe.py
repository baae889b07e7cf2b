"""Qwen3-MoE: Qwen3 with a mixture of experts on all layers, or on every n-th."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    assemble,
    read_activation,
    read_dense,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.families.qwen3 import read_normed_gqa
from baton.engine.models.moe import MoeSpec, Softmax


def _read(fields: ModelFields) -> Blueprint:
    window = fields.number_or_none("sliding_window") if fields.flag("use_sliding_window") else None
    mixer = replace(read_normed_gqa(fields), window=window)
    sparse, dense = _read_moe(fields), read_dense(fields)
    skipped = set(fields.numbers("mlp_only_layers"))
    step = fields.number("decoder_sparse_step")
    is_sparse = [i not in skipped and (i + 1) % step == 0 for i in range(fields.num_layers)]
    mlps = [sparse if here else dense for here in is_sparse]
    made = assemble(fields, [mixer] * fields.num_layers, mlps)
    return replace(made, num_experts=sparse.num_experts)


def _read_moe(fields: ModelFields) -> MoeSpec:
    name = "num_experts" if fields.values.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.number(name)
    rule = Softmax(fields.number("num_experts_per_tok", num_experts), fields.flag("norm_topk_prob"))
    return MoeSpec(
        hidden_size=fields.number("hidden_size"),
        num_experts=num_experts,
        width=fields.number("moe_intermediate_size"),
        activation=read_activation(fields),
        rule=rule,
    )


DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
FAMILIES = {"qwen3_moe": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
