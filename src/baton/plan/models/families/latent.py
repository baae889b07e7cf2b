"""Multi-head latent attention, with or without an indexer that picks the tokens to attend to."""

from __future__ import annotations

from baton.plan.kinds import Index, Latent
from baton.plan.models.fields import CacheFamily, Fields, Placed, shown
from baton.plan.ranges import from_ids

INDEXED = "full"
SHARED = "shared"


def dense(fields: Fields) -> tuple[Placed, ...]:
    """One latent per token in every layer: the compressed part and the rotary part."""
    dim = fields.number("kv_lora_rank") + fields.number("qk_rope_head_dim")
    return ((Latent(dim), ((0, fields.num_layers),)),)


def sparse(fields: Fields) -> tuple[Placed, ...]:
    """As `dense`, and index keys in every layer."""
    return (*dense(fields), (Index(fields.number("index_head_dim")), ((0, fields.num_layers),)))


def indexer_types(fields: Fields) -> list[str]:
    """INDEXED or SHARED by layer: whether it chooses by itself, or follows the last one that does."""
    types = fields.per_layer("indexer_types", (INDEXED, SHARED))
    if types is None:
        if (pattern := fields.values.get("index_topk_pattern")) is not None:
            raise fields.refusal(f"index_topk_pattern is {shown(pattern)}; spell it out as indexer_types")
        period = fields.number("index_topk_freq")
        first = fields.number("index_skip_topk_offset", least=0)
        types = [SHARED if max(i - first + 1, 0) % period else INDEXED for i in range(fields.num_layers)]
    if types[0] != INDEXED:
        raise fields.refusal(f"indexer_types begins with {types[0]!r}; the first layer must be {INDEXED!r}")
    return types


def shared_sparse(fields: Fields) -> tuple[Placed, ...]:
    """As `sparse`, but a layer that follows the choice of an earlier one keeps no index keys."""
    layers = from_ids(i for i, word in enumerate(indexer_types(fields)) if word == INDEXED)
    return (*dense(fields), (Index(fields.number("index_head_dim")), layers))


FAMILIES: dict[str, CacheFamily] = {
    "deepseek_v2": CacheFamily(dense),
    "deepseek_v3": CacheFamily(dense),
    "deepseek_v32": CacheFamily(sparse),
    "deepseek_v3_2": CacheFamily(sparse),
    "glm_moe_dsa": CacheFamily(shared_sparse, {"index_topk_freq": 1, "index_skip_topk_offset": 2}),
    "kimi_k2": CacheFamily(dense),
}
