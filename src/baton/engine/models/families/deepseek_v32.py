"""DeepSeek-V3.2: DeepSeek-V3 with an indexer on every layer, which picks the tokens to attend to."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import COMMON_DEFAULTS, Blueprint, Family, assemble_latent
from baton.engine.models.config import ModelFields
from baton.engine.models.families.deepseek_v3 import DEFAULTS as V3_DEFAULTS
from baton.engine.models.families.deepseek_v3 import read_mixer, read_rule
from baton.engine.models.mla import IndexerSpec


def _read(fields: ModelFields) -> Blueprint:
    fields.require("rope_interleave", True)
    fields.require("mlp_bias", False)
    mixer = read_mixer(fields)
    indexer = IndexerSpec(
        hidden_size=fields.number("hidden_size"),
        query_rank=fields.number("q_lora_rank"),
        num_heads=fields.number("index_n_heads"),
        dim=fields.number("index_head_dim", least=mixer.rope.dim),
        # In halves, unlike the attention that it picks for.
        rope=replace(mixer.rope, is_paired_in=False),
        num_chosen=fields.number("index_topk"),
    )
    return assemble_latent(fields, replace(mixer, indexer=indexer), read_rule(fields))


DEFAULTS = {
    **V3_DEFAULTS,
    "max_position_embeddings": 163_840,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
_FAMILY = Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})
FAMILIES = {"deepseek_v32": _FAMILY, "deepseek_v3_2": _FAMILY}
