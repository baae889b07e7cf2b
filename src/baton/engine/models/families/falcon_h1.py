"""Falcon-H1: attention and Mamba2 side by side in every layer, with factors nearly everywhere."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble,
    read_activation,
    read_dense,
    read_gqa,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.gqa import BesideSpec, Branch, GqaSpec
from baton.engine.models.layers import Names
from baton.engine.models.mamba2 import GroupNormSpec, Mamba2Spec
from baton.plan.models.families.recurrent import mamba2

UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Steps of any length, as JSON has it."""
NAMES = Names(mixer="", mlp_norm="pre_ff_layernorm", mlp="feed_forward")


def read_mamba2(fields: ModelFields, norm: GroupNormSpec | None) -> Mamba2Spec:
    """The state space, in the sizes that its cache has."""
    # A limit on steps would change prefill; decoding, as it is published, knows none.
    fields.require("time_step_limit", *UNLIMITED)
    return Mamba2Spec(
        hidden_size=fields.number("hidden_size"),
        kind=mamba2(fields),
        activation=read_activation(fields),
        has_input_bias=fields.flag("mamba_proj_bias"),
        has_conv_bias=fields.flag("mamba_conv_bias"),
        norm=norm,
    )


def _read(fields: ModelFields) -> Blueprint:
    attention = read_gqa(fields, is_partly_turned=True)
    # Keys times a factor score as keys without it under a scale that has it.
    attention = replace(attention, scale=attention.head_dim**-0.5 * fields.real("key_multiplier"))
    gate_factor, output_factor = _factors(fields, "mlp_multipliers", 2)
    mlp = replace(
        read_dense(fields, fields.flag("mlp_bias")), gate_factor=gate_factor, output_factor=output_factor
    )
    mixers = [_mixer(fields, attention)] * fields.num_layers
    return replace(
        assemble(fields, mixers, [mlp] * fields.num_layers, [NAMES] * fields.num_layers),
        embedding_factor=fields.real("embedding_multiplier"),
        norm_name="model.final_layernorm",
        head_factor=fields.real("lm_head_multiplier"),
    )


def _mixer(fields: ModelFields, attention: GqaSpec) -> BesideSpec:
    norm = None
    if fields.flag("mamba_rms_norm"):
        is_before = fields.flag("mamba_norm_before_gate")
        norm = GroupNormSpec(fields.number("mamba_n_groups"), fields.real("rms_norm_eps"), is_before)
    states = replace(
        read_mamba2(fields, norm),
        has_output_bias=fields.flag("projectors_bias"),
        factors=_factors(fields, "ssm_multipliers", 5),
    )
    ssm = Branch("mamba", states, fields.real("ssm_in_multiplier"), fields.real("ssm_out_multiplier"))
    factors = fields.real("attention_in_multiplier"), fields.real("attention_out_multiplier")
    return BesideSpec((ssm, Branch("self_attn", attention, *factors)))


def _factors(fields: ModelFields, name: str, count: int) -> tuple[float, ...]:
    listed = fields.values.get(name)
    if listed is None:
        return (1.0,) * count
    if not isinstance(listed, list | tuple) or len(listed) != count:
        raise fields.refusal(f"{name} is {listed}; it must list {count} numbers")
    inner = ModelFields(f"{fields.where}: {name}", {str(i): number for i, number in enumerate(listed)})
    return tuple(inner.real(str(i)) for i in range(count))


MAMBA_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
FACTORS = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
DEFAULTS = {
    **MAMBA_DEFAULTS,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    **{f"{name}_multiplier": 1.0 for name in FACTORS},
}
FAMILIES = {"falcon_h1": ModelFamily(_read, DEFAULTS)}
