"""Llama 2 and 3, and models in their shape, such as SmolLM2."""

from __future__ import annotations

from baton.engine.models.blueprint import Blueprint, ModelFamily, assemble, read_dense, read_gqa
from baton.engine.models.config import ModelFields


def _read(fields: ModelFields) -> Blueprint:
    mlp = read_dense(fields, fields.flag("mlp_bias"))
    return assemble(fields, [read_gqa(fields)] * fields.num_layers, [mlp] * fields.num_layers)


FAMILIES = {"llama": ModelFamily(_read, {"max_position_embeddings": 2048})}
