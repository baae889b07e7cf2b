"""Mamba2 beside attention in every layer, or instead of it in most."""

from __future__ import annotations

from baton.plan.cache import Units
from baton.plan.kinds import Conv, Paged, Recurrent
from baton.plan.models.families.attention import FULL, heads_and_dim
from baton.plan.models.families.delta import LINEAR, STATE_DTYPES
from baton.plan.models.fields import Family, Fields, placed_by
from baton.plan.models.parts import Placed
from baton.plan.models.quoting import shown


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


FAMILIES: dict[str, Family] = {"bamba": Family(listed, {"mamba_expand": 2}), "falcon_h1": Family(parallel)}
