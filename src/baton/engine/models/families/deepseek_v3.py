"""DeepSeek-V3 and R1, and Kimi K2 in their shape: mixtures routed by corrected sigmoids."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    assemble_latent,
    read_groups,
    read_mla,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.mla import MlaSpec
from baton.engine.models.moe import Sigmoid


def read_rule(fields: ModelFields) -> Sigmoid:
    """How tokens are routed."""
    fields.require("scoring_func", "sigmoid")
    fields.require("topk_method", "noaux_tc")
    num_experts = fields.number("n_routed_experts")
    num_groups, num_groups_chosen = read_groups(fields)
    if num_groups_chosen < num_groups and num_experts < 2 * num_groups:
        raise fields.refusal(f"n_group is {num_groups}; groups of {num_experts} experts need two each")
    return Sigmoid(
        num_chosen=fields.number("num_experts_per_tok", num_experts),
        is_normed=fields.flag("norm_topk_prob"),
        factor=fields.real("routed_scaling_factor"),
        num_groups=num_groups,
        num_groups_chosen=num_groups_chosen,
    )


def read_mixer(fields: ModelFields) -> MlaSpec:
    """Latent attention whose pairs are taken apart into halves before keys are cached."""
    mixer = read_mla(fields)
    rope = replace(mixer.rope, is_paired_in=fields.flag("rope_interleave"), is_paired_out=False)
    return replace(mixer, rope=rope)


def _read(fields: ModelFields) -> Blueprint:
    return assemble_latent(fields, read_mixer(fields), read_rule(fields))


DEFAULTS = {
    "max_position_embeddings": 4096,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
_FAMILY = Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})
FAMILIES = {"deepseek_v3": _FAMILY, "kimi_k2": _FAMILY}
