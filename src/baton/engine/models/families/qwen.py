"""Qwen2, 2.5 and 3: Llama with a bias on queries, keys and values, or with a norm on queries and keys.

Qwen3-MoE has a mixture of experts on all layers, or on every n-th.
"""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble,
    read_dense,
    read_gqa,
    read_moe,
    read_windows,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import GqaSpec
from baton.engine.models.layers import MlpSpec
from baton.engine.models.moe import MoeSpec, Softmax
from baton.plan.models.families.attention import flagged, flagged_from


def _read(fields: ModelFields, mixer: GqaSpec) -> Blueprint:
    """Layers with this attention, some of them with a window."""
    mixers = [replace(mixer, window=window) for window in read_windows(fields, flagged_from)]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


def _read_qwen2(fields: ModelFields) -> Blueprint:
    return _read(fields, replace(read_gqa(fields), has_input_bias=True, has_output_bias=False))


def _read_normed_gqa(fields: ModelFields) -> GqaSpec:
    """Attention with a norm per head and a bias where the config asks for one."""
    return replace(read_gqa(fields), norm_eps=fields.real("rms_norm_eps"))


def _read_qwen3(fields: ModelFields) -> Blueprint:
    return _read(fields, _read_normed_gqa(fields))


def _read_qwen3_moe(fields: ModelFields) -> Blueprint:
    mixer = _read_normed_gqa(fields)
    mixers = [replace(mixer, window=window) for window in read_windows(fields, flagged)]
    name = "num_experts" if fields.values.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.number(name)
    rule = Softmax(fields.number("num_experts_per_tok", num_experts), fields.flag("norm_topk_prob"))
    return assemble(fields, mixers, place_mixtures(fields, read_moe(fields, num_experts, rule)))


def place_mixtures(fields: ModelFields, sparse: MoeSpec) -> list[MlpSpec]:
    """A mixture in every decoder_sparse_step-th layer but for those of mlp_only_layers; others are dense."""
    dense, skipped = read_dense(fields), set(fields.numbers("mlp_only_layers"))
    step = fields.number("decoder_sparse_step")
    return [sparse if i not in skipped and (i + 1) % step == 0 else dense for i in range(fields.num_layers)]


DEFAULTS = {
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
    "qwen2": ModelFamily(_read_qwen2, DEFAULTS),
    "qwen3": ModelFamily(_read_qwen3, {**DEFAULTS, "head_dim": 128}),
    "qwen3_moe": ModelFamily(_read_qwen3_moe, MOE_DEFAULTS),
}
