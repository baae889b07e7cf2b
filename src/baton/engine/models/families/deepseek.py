"""DeepSeek: latent attention, and mixtures of experts after some dense layers.

V2 routes by softmax. V3 and R1, and Kimi K2 in their shape, route by corrected sigmoids. V3.2 is V3 with an
indexer on every layer, which picks the tokens to attend to. GLM-5 is V3.2 with another rotation in the
indexer, which several layers may share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble_latent,
    read_groups,
    read_mla,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.mla import IndexerSpec, MlaSpec
from baton.engine.models.moe import Sigmoid, Softmax
from baton.plan.models.families.latent import INDEXED, SHARED, indexer_types

METHODS = {"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"}


def _read_v2(fields: ModelFields) -> Blueprint:
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
    mixers = [read_mla(fields)] * fields.num_layers
    return assemble_latent(fields, mixers, rule, fields.flag("mlp_bias"))


V2_DEFAULTS = {
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


def _read_v3(fields: ModelFields) -> Blueprint:
    return assemble_latent(fields, [read_mixer(fields)] * fields.num_layers, read_rule(fields))


V3_DEFAULTS = {
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


def _read_sparse(fields: ModelFields, types: Sequence[str], *, is_index_paired: bool) -> Blueprint:
    """Layers with an indexer, or with the choice of the last one before them."""
    fields.require("rope_interleave", True)
    fields.require("mlp_bias", False)
    mixer = read_mixer(fields)
    indexer = IndexerSpec(
        hidden_size=fields.number("hidden_size"),
        query_rank=fields.number("q_lora_rank"),
        num_heads=fields.number("index_n_heads"),
        dim=fields.number("index_head_dim", least=mixer.rope.dim),
        rope=replace(mixer.rope, is_paired_in=is_index_paired),
        num_chosen=fields.number("index_topk"),
    )
    mixers = {INDEXED: replace(mixer, indexer=indexer), SHARED: replace(mixer, is_choice_shared=True)}
    made = assemble_latent(fields, [mixers[kind] for kind in types], read_rule(fields))
    return replace(made, stage_starts=tuple(i for i, kind in enumerate(types) if kind == INDEXED))


def _read_v32(fields: ModelFields) -> Blueprint:
    # In halves, unlike the attention that it picks for.
    return _read_sparse(fields, [INDEXED] * fields.num_layers, is_index_paired=False)


def _read_glm(fields: ModelFields) -> Blueprint:
    fields.require("indexer_rope_interleave", True)
    made = _read_sparse(fields, indexer_types(fields), is_index_paired=True)
    return replace(made, draft=None)


V32_DEFAULTS = {
    **V3_DEFAULTS,
    "max_position_embeddings": 163_840,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM_DEFAULTS = {
    **V32_DEFAULTS,
    "index_n_heads": 32,
    "index_skip_topk_offset": 2,
    "index_topk_freq": 1,
    "max_position_embeddings": 202_752,
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
}
_V3 = ModelFamily(_read_v3, V3_DEFAULTS)
_V32 = ModelFamily(_read_v32, V32_DEFAULTS)
FAMILIES = {
    "deepseek_v2": ModelFamily(_read_v2, V2_DEFAULTS),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "deepseek_v32": _V32,
    "deepseek_v3_2": _V32,
    "glm_moe_dsa": ModelFamily(_read_glm, GLM_DEFAULTS),
}
