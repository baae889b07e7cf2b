"""DeepSeek-V2: latent attention, mixtures routed by softmax."""

from __future__ import annotations

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    Blueprint,
    Family,
    assemble_latent,
    read_groups,
    read_mla,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.moe import Softmax

METHODS = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}


def _read(fields: ModelFields) -> Blueprint:
    fields.require("scoring_func", "softmax")
    # The published code and transformers part ways here, and no published model sets it.
    fields.require("norm_topk_prob", False)
    is_grouped = fields.choice("topk_method", METHODS) == "group_limited_greedy"
    num_groups, num_groups_chosen = read_groups(fields) if is_grouped else (1, 1)
    rule = Softmax(
        num_chosen=fields.number("num_experts_per_tok", fields.number("n_routed_experts")),
        factor=fields.real("routed_scaling_factor"),
        num_groups=num_groups,
        num_groups_chosen=num_groups_chosen,
    )
    return assemble_latent(fields, read_mla(fields), rule, fields.flag("mlp_bias"))


DEFAULTS = {
    "max_position_embeddings": 2048,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
FAMILIES = {"deepseek_v2": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
