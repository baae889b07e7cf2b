"""Gated delta net in most layers and attention in the others."""

from __future__ import annotations

from baton.plan.cache import Units
from baton.plan.kinds import Conv, Paged, Recurrent
from baton.plan.models.families.attention import FULL, heads_and_dim
from baton.plan.models.fields import Family, Fields, placed_by
from baton.plan.models.parts import Placed

LINEAR = "linear_attention"
STATE_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def delta_net(fields: Fields) -> Recurrent:
    """A state per value head, and the packed convolution over queries, keys and values."""
    num_keys, key_dim = fields.number("linear_num_key_heads"), fields.number("linear_key_head_dim")
    num_values, value_dim = fields.number("linear_num_value_heads"), fields.number("linear_value_head_dim")
    if num_values % num_keys:
        raise fields.refusal(
            f"linear_num_value_heads is {num_values}; "
            f"it must be a multiple of linear_num_key_heads, {num_keys}"
        )
    taps = fields.number("linear_conv_kernel_dim", least=2) - 1
    keys, values = Units(num_keys, "key head"), Units(num_values, "value head")
    return Recurrent(
        heads=num_values,
        state=key_dim * value_dim,
        convs=(
            Conv("q", keys, key_dim, taps),
            Conv("k", keys, key_dim, taps),
            Conv("v", values, value_dim, taps),
        ),
        unit=values.name,
        dtype=fields.choice("mamba_ssm_dtype", STATE_DTYPES),
    )


def hybrid(fields: Fields) -> tuple[Placed, ...]:
    """Layers by layer_types, or attention in every full_attention_interval-th."""
    types = fields.per_layer("layer_types", (LINEAR, FULL))
    if types is None:
        period = fields.number("full_attention_interval")
        types = [LINEAR if (i + 1) % period else FULL for i in range(fields.num_layers)]
    return placed_by(types, {FULL: Paged(*heads_and_dim(fields)), LINEAR: delta_net(fields)})


_DEFAULTS = {"head_dim": 256, "full_attention_interval": 4}

FAMILIES: dict[str, Family] = {
    name: Family(hybrid, _DEFAULTS)
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
}
