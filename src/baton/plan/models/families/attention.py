"""Keys and values in every layer, some or all of them with a window."""

from __future__ import annotations

from collections.abc import Callable

from baton.plan.kinds import Paged
from baton.plan.models.fields import CacheFamily, Fields, Placed, placed_by

FULL = "full_attention"
WINDOWED = "sliding_attention"


def heads_and_dim(fields: Fields) -> tuple[int, int]:
    """KV heads and their channels."""
    num_queries = fields.number("num_attention_heads")
    num_heads = fields.number_or_none("num_key_value_heads") or num_queries
    if num_queries % num_heads:
        raise fields.refusal(
            f"num_key_value_heads is {num_heads}; it must divide num_attention_heads, {num_queries}"
        )
    dim = fields.number_or_none("head_dim")
    if dim:
        return num_heads, dim
    width = fields.number("hidden_size")
    if width % num_queries:
        raise fields.refusal(
            f"hidden_size is {width}; without head_dim it must be a multiple of "
            f"num_attention_heads, {num_queries}"
        )
    return num_heads, width // num_queries


def _attention(fields: Fields, is_windowed: Callable[[int], bool]) -> tuple[Placed, ...]:
    """Windowed and full layers, by layer_types where the config has it and by `is_windowed` otherwise."""
    window = fields.number_or_none("sliding_window")
    types = fields.per_layer("layer_types", (FULL, WINDOWED))
    if window is None and types and WINDOWED in types:
        raise fields.refusal(
            f"layer_types has {WINDOWED}, but sliding_window is null; give its size in tokens"
        )
    if types is None:
        types = [WINDOWED if window and is_windowed(i) else FULL for i in range(fields.num_layers)]
    heads, dim = heads_and_dim(fields)
    return placed_by(types, {FULL: Paged(heads, dim), WINDOWED: Paged(heads, dim, window=window or 0)})


def full(fields: Fields) -> tuple[Placed, ...]:
    """No windows, unless layer_types names them."""
    return _attention(fields, lambda _: False)


def windowed(fields: Fields) -> tuple[Placed, ...]:
    """A sliding_window that is not null holds for every layer."""
    return _attention(fields, lambda _: True)


def flagged(fields: Fields) -> tuple[Placed, ...]:
    """As `windowed` where use_sliding_window says so, full otherwise."""
    return windowed(fields) if fields.flag("use_sliding_window") else full(_without_window(fields))


def flagged_from(fields: Fields) -> tuple[Placed, ...]:
    """As `flagged`, but only layers from max_window_layers on have the window."""
    if not fields.flag("use_sliding_window"):
        return full(_without_window(fields))
    first = fields.number("max_window_layers", least=0)
    return _attention(fields, lambda i: i >= first)


def patterned(fields: Fields) -> tuple[Placed, ...]:
    """Every sliding_window_pattern-th layer is full, the others have the window."""
    period = fields.number("sliding_window_pattern")
    return _attention(fields, lambda i: (i + 1) % period != 0)


def _without_window(fields: Fields) -> Fields:
    """The same config with no window and no layer types, which some configs state but do not use."""
    return Fields(fields.where, {**fields.values, "sliding_window": None, "layer_types": None})


_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}

FAMILIES: dict[str, CacheFamily] = {
    "gemma3": CacheFamily(patterned, _GEMMA3),
    "gemma3_text": CacheFamily(patterned, _GEMMA3),
    "glm4_moe": CacheFamily(full),
    "gpt_oss": CacheFamily(patterned, {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}),
    "llama": CacheFamily(full),
    "ministral": CacheFamily(windowed, {"sliding_window": 4096}),
    "mistral": CacheFamily(windowed, {"sliding_window": 4096}),
    "mixtral": CacheFamily(windowed),
    "phi3": CacheFamily(windowed),
    "qwen2": CacheFamily(flagged_from, _QWEN),
    "qwen3": CacheFamily(flagged_from, {**_QWEN, "head_dim": 128}),
    "qwen3_moe": CacheFamily(flagged, {"sliding_window": 4096}),
}
