"""gpt-oss: every other layer has a window, all have sinks and a mixture of experts with biases."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    Blueprint,
    ModelFamily,
    assemble,
    read_gqa,
    read_windows,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.moe import ClampedSpec, Softmax
from baton.plan.models.families.attention import patterned


def _read(fields: ModelFields) -> Blueprint:
    fields.require("hidden_act", "silu")
    mixer = replace(read_gqa(fields), has_sinks=True)
    mixers = [replace(mixer, window=window) for window in read_windows(fields, patterned)]
    num_experts = fields.number("num_local_experts")
    mlp = ClampedSpec(
        hidden_size=fields.number("hidden_size"),
        num_experts=num_experts,
        width=fields.number("intermediate_size"),
        # A softmax over the chosen alone is one over all, normed.
        rule=Softmax(fields.number("num_experts_per_tok", num_experts), is_normed=True),
        gain=fields.positive("swiglu_alpha"),
        limit=fields.positive("swiglu_limit"),
    )
    return assemble(fields, mixers, [mlp] * fields.num_layers)


YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": YARN,
    "rope_theta": 150_000.0,
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
FAMILIES = {"gpt_oss": ModelFamily(_read, DEFAULTS)}
