"""Qwen2, 2.5 and 3: Llama with a bias on queries, keys and values, or with a norm on queries and keys.

Qwen3-MoE has a mixture of experts on all layers, or on every n-th.
"""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    assemble,
    read_activation,
    read_dense,
    read_gqa,
    read_windows,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import GqaSpec
from baton.engine.models.moe import MoeSpec, Softmax
from baton.plan.models.families.attention import flagged, flagged_from


def _read(fields: ModelFields, mixer: GqaSpec) -> Blueprint:
    """Layers with this attention, some of them with a window."""
    mixers = [replace(mixer, window=window) for window in read_windows(fields, flagged_from)]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


def _read_qwen2(fields: ModelFields) -> Blueprint:
    return _read(fields, replace(read_gqa(fields), has_input_bias=True))


def _read_normed_gqa(fields: ModelFields) -> GqaSpec:
    """Attention with a norm per head and a bias where the config asks for one."""
    has_bias = fields.flag("attention_bias")
    eps = fields.real("rms_norm_eps")
    return replace(read_gqa(fields), has_input_bias=has_bias, has_output_bias=has_bias, norm_eps=eps)


def _read_qwen3(fields: ModelFields) -> Blueprint:
    return _read(fields, _read_normed_gqa(fields))


def _read_qwen3_moe(fields: ModelFields) -> Blueprint:
    mixer = _read_normed_gqa(fields)
    sparse, dense = _read_moe(fields), read_dense(fields)
    skipped = set(fields.numbers("mlp_only_layers"))
    step = fields.number("decoder_sparse_step")
    is_sparse = [i not in skipped and (i + 1) % step == 0 for i in range(fields.num_layers)]
    mlps = [sparse if here else dense for here in is_sparse]
    mixers = [replace(mixer, window=window) for window in read_windows(fields, flagged)]
    made = assemble(fields, mixers, mlps)
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
    **COMMON_DEFAULTS,
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
MOE_DEFAULTS = {
    **DEFAULTS,
    "num_key_value_heads": 4,
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
FAMILIES = {
    "qwen2": Family(_read_qwen2, DEFAULTS),
    "qwen3": Family(_read_qwen3, {**DEFAULTS, "head_dim": 128}),
    "qwen3_moe": Family(_read_qwen3_moe, MOE_DEFAULTS),
}
