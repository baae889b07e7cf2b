"""What the DeepSeek families share: latent attention, and mixtures that begin after some dense layers."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.model.blueprint import Blueprint, assemble, read_activation, read_dense
from baton.engine.model.fields import ModelFields
from baton.engine.model.mixers.mla import MlaSpec
from baton.engine.model.mlps.dense import DenseSpec
from baton.engine.model.mlps.moe import MoeSpec
from baton.engine.model.mlps.routing import Rule
from baton.engine.model.rope import RopeSpec, read_rope, rope_values, yarn_amplitude

DENSE, SPARSE = "dense", "sparse"


def read_mla(fields: ModelFields) -> MlaSpec:
    """Latent attention; channels turn in pairs and stay in that order."""
    rope = replace(
        read_rope(fields, fields.number("qk_rope_head_dim")), is_paired_in=True, is_paired_out=True
    )
    plain_dim = fields.number("qk_nope_head_dim")
    return MlaSpec(
        hidden_size=fields.number("hidden_size"),
        num_heads=fields.number("num_attention_heads"),
        query_rank=fields.number_or_none("q_lora_rank"),
        latent_rank=fields.number("kv_lora_rank"),
        plain_dim=plain_dim,
        rope=rope,
        value_dim=fields.number("v_head_dim"),
        scale=(plain_dim + rope.dim) ** -0.5 * _amplification(fields, rope),
        has_bias=fields.flag("attention_bias"),
    )


def _amplification(fields: ModelFields, rope: RopeSpec) -> float:
    """What stretched positions add to the scale of scores, by DeepSeek's mscale_all_dim."""
    weight = rope_values(fields).get("mscale_all_dim")
    if rope.kind == "default" or not weight:
        return 1.0
    return (
        yarn_amplitude(
            rope.scaling.factor, ModelFields(fields.where, {"mscale_all_dim": weight}).real("mscale_all_dim")
        )
        ** 2
    )


def read_groups(fields: ModelFields) -> tuple[int, int]:
    """How many groups the experts are in, and how many of them a token may use."""
    num_groups = fields.number_or_none("n_group") or 1
    chosen = fields.number_or_none("topk_group", num_groups) or num_groups
    num_experts = fields.number("n_routed_experts")
    if num_experts % num_groups:
        raise fields.refusal(f"n_group is {num_groups}; it must divide the {num_experts} n_routed_experts")
    return num_groups, chosen


def assemble_latent(fields: ModelFields, mixer: MlaSpec, rule: Rule, has_mlp_bias: bool = False) -> Blueprint:
    """The model, its first layers dense."""
    dense, sparse = read_dense(fields, has_mlp_bias), _read_moe(fields, rule, has_mlp_bias)
    first = fields.number("first_k_dense_replace", least=0)
    step = fields.number("moe_layer_freq")
    types = fields.per_layer("mlp_layer_types", (DENSE, SPARSE))
    if types is None:
        types = [SPARSE if i >= first and i % step == 0 else DENSE for i in range(fields.num_layers)]
    mlps = [sparse if each == SPARSE else dense for each in types]
    made = assemble(fields, [mixer] * fields.num_layers, mlps)
    has_draft = bool(fields.number_or_none("num_nextn_predict_layers", least=0))
    return replace(made, num_experts=sparse.num_experts, draft=made.layers[-1] if has_draft else None)


def _read_moe(fields: ModelFields, rule: Rule, has_mlp_bias: bool) -> MoeSpec:
    hidden, width = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    activation, shared = read_activation(fields), fields.number_or_none("n_shared_experts", least=0)
    return MoeSpec(
        hidden_size=hidden,
        num_experts=fields.number("n_routed_experts"),
        width=width,
        activation=activation,
        rule=rule,
        is_routed_in_float32=True,
        shared=DenseSpec(hidden, width * shared, activation, has_mlp_bias) if shared else None,
    )
