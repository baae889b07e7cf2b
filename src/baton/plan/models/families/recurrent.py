"""Recurrent layers: gated delta net or Mamba2 beside attention, or instead of it in most layers."""

from __future__ import annotations

from baton.plan.cache import Units
from baton.plan.kinds import Conv, Paged, Recurrent
from baton.plan.models.families.attention import FULL, heads_and_dim
from baton.plan.models.fields import CacheFamily, Fields, Placed, placed_by, shown

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


def layer_types(fields: Fields) -> list[str]:
    """By layer_types, or attention in every full_attention_interval-th."""
    if (types := fields.per_layer("layer_types", (LINEAR, FULL))) is not None:
        return types
    period = fields.number("full_attention_interval")
    return [LINEAR if (i + 1) % period else FULL for i in range(fields.num_layers)]


def hybrid(fields: Fields) -> tuple[Placed, ...]:
    """A gated delta net or attention, by layer."""
    return placed_by(layer_types(fields), {FULL: Paged(*heads_and_dim(fields)), LINEAR: delta_net(fields)})


def mamba2(fields: Fields) -> Recurrent:
    """A state per head, and the packed convolution over x by heads and B and C by groups."""
    num_heads, num_groups = fields.number("mamba_n_heads"), fields.number("mamba_n_groups")
    if num_heads % num_groups:
        raise fields.refusal(f"mamba_n_groups is {num_groups}; it must divide mamba_n_heads, {num_heads}")
    dim = _head_dim(fields, num_heads)
    state_dim = fields.number("mamba_d_state")
    taps = fields.number("mamba_d_conv", least=2) - 1
    heads, groups = Units(num_heads, "head"), Units(num_groups, "group")
    return Recurrent(
        heads=num_heads,
        state=dim * state_dim,
        convs=(
            Conv("x", heads, dim, taps),
            Conv("B", groups, state_dim, taps),
            Conv("C", groups, state_dim, taps),
        ),
        unit=heads.name,
        dtype=fields.choice("mamba_ssm_dtype", STATE_DTYPES),
    )


def _head_dim(fields: Fields, num_heads: int) -> int:
    """mamba_d_head, which may be left to follow from the width of the whole."""
    width = fields.number_or_none("mamba_d_ssm")
    if fields.values.get("mamba_d_head") == "auto":
        width = width or fields.number("mamba_expand") * fields.number("hidden_size")
        dim = width // num_heads
    else:
        dim = fields.number("mamba_d_head")
    if width is not None and dim * num_heads != width:
        raise fields.refusal(f"mamba_n_heads is {num_heads}; heads of {dim} channels do not make up {width}")
    return dim


def parallel(fields: Fields) -> tuple[Placed, ...]:
    """Attention and Mamba2 in every layer."""
    layers = ((0, fields.num_layers),)
    return ((Paged(*heads_and_dim(fields)), layers), (mamba2(fields), layers))


def listed(fields: Fields) -> tuple[Placed, ...]:
    """Attention in the layers of attn_layer_indices, Mamba2 in the others."""
    indices = fields.values.get("attn_layer_indices") or []
    if not isinstance(indices, list) or any(i not in range(fields.num_layers) for i in indices):
        raise fields.refusal(
            f"attn_layer_indices is {shown(indices)}; it must list layers below {fields.num_layers}"
        )
    words = [FULL if i in indices else LINEAR for i in range(fields.num_layers)]
    return placed_by(words, {FULL: Paged(*heads_and_dim(fields)), LINEAR: mamba2(fields)})


_DELTA = CacheFamily(hybrid, {"head_dim": 256, "full_attention_interval": 4})

FAMILIES: dict[str, CacheFamily] = {
    "bamba": CacheFamily(listed, {"mamba_expand": 2}),
    "falcon_h1": CacheFamily(parallel),
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
}
