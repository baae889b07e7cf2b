"""Ministral: Mistral with a window on the layers that its config names, or on all."""

from __future__ import annotations

from dataclasses import replace

from baton.engine.models.blueprint import (
    COMMON_DEFAULTS,
    FULL,
    SLIDING,
    Blueprint,
    Family,
    assemble,
    read_dense,
    read_gqa,
)
from baton.engine.models.config import ModelFields
from baton.engine.models.families.mistral import DEFAULTS


def _read(fields: ModelFields) -> Blueprint:
    mixer, window = read_gqa(fields), fields.number_or_none("sliding_window")
    kinds = fields.per_layer("layer_types", (FULL, SLIDING)) or [SLIDING] * fields.num_layers
    mixers = [replace(mixer, window=window) if kind == SLIDING else mixer for kind in kinds]
    return assemble(fields, mixers, [read_dense(fields)] * fields.num_layers)


FAMILIES = {"ministral": Family(_read, {**COMMON_DEFAULTS, **DEFAULTS})}
