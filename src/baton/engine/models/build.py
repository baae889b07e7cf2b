"""From a config to a description of the model, and from a checkpoint to what one rank runs.

`describe` and `check_weights` read no weights, so that what cannot run is refused before any worker starts.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from baton.checkpoint.base import Checkpoint
from baton.engine.models import families
from baton.engine.models.base import Cut, Share
from baton.engine.models.blueprint import COMMON_DEFAULTS, Blueprint, ModelFamily
from baton.engine.models.config import ModelFields
from baton.engine.models.layers import ModelStage, VocabularyEmbedding, VocabularyHead
from baton.engine.models.weights import (
    DryLoader,
    Linear,
    Loader,
    ShapesOnly,
    cut_evenly,
    laid_out,
    rows,
)
from baton.errors import ConfigError
from baton.plan.models.fields import shown

PROBLEMS_SHOWN = 3
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts about a model that the engine needs before any weight is read."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str
    """The name of the dtype that the weights were published in."""
    eos_ids: tuple[int, ...]
    num_experts: int
    """Routed experts of a mixture layer, 0 where there is none."""
    stage_starts: tuple[int, ...] | None
    """Layers that a pipeline stage may begin with, where not every one can."""


def describe(config: Mapping[str, Any], max_context: int | None = None) -> Architecture:
    """What a config describes; raises ConfigError where it cannot be run up to `max_context` tokens."""
    fields, blueprint = _read(config)
    fields.check_context(max_context or 0)
    dtype = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if dtype not in DTYPES:
        raise fields.refusal(f"dtype is {shown(dtype)}; use one of {', '.join(DTYPES)}")
    return Architecture(
        model_type=str(config["model_type"]),
        num_layers=len(blueprint.layers),
        hidden_size=blueprint.norm.size,
        vocab_size=blueprint.vocab_size,
        max_positions=fields.max_positions,
        dtype=str(dtype),
        eos_ids=fields.numbers("eos_token_id"),
        num_experts=blueprint.num_experts,
        stage_starts=blueprint.stage_starts,
    )


def build(
    checkpoint: Checkpoint,
    cut: Cut,
    *,
    max_context: int | None = None,
    has_draft: bool = False,
) -> ModelStage:
    """What one rank runs, with its slices of the weights and nothing else read.

    No position may reach `max_context`, if given; with `has_draft` the last stage has the model's draft
    layer.
    """
    blueprint = _blueprint(checkpoint.config, has_draft)
    return _load(blueprint, Loader(checkpoint, cut, max_context))


def check_weights(checkpoint: Checkpoint, cut: Cut | None = None, *, has_draft: bool = False) -> int:
    """The bytes of the weights of a rank, or of the model; reads none.

    Raises ConfigError where tensors are missing or of a wrong shape.
    """
    blueprint = _blueprint(checkpoint.config, has_draft)
    loader = DryLoader(checkpoint, cut or _whole(blueprint))
    with ShapesOnly():
        _load(blueprint, loader)
    if loader.problems:
        listed = "; ".join(list(loader.problems)[:PROBLEMS_SHOWN])
        further = len(loader.problems) - PROBLEMS_SHOWN
        more = f"; and {further} more" if further > 0 else ""
        raise ConfigError(f"the checkpoint does not match its config: {listed}{more}")
    return loader.num_bytes


def _whole(blueprint: Blueprint) -> Cut:
    return Cut((0, len(blueprint.layers)), Share(), Share(), torch.float32, torch.device("meta"))


def _load(blueprint: Blueprint, loader: Loader) -> ModelStage:
    first, last = loader.cut.layers
    num_layers = len(blueprint.layers)
    if not 0 <= first < last <= num_layers:
        raise ConfigError(f"layers {first} to {last} of a model with {num_layers}; use a part of these")
    layers = tuple(blueprint.layers[i].load(loader, i) for i in range(first, last))
    vocabulary = (blueprint.vocab_size, blueprint.norm.size)
    span = cut_evenly(blueprint.vocab_size, loader.cut.heads)
    embedding, head, draft = None, None, None
    if first == 0 or (blueprint.draft is not None and last == num_layers):
        weight = loader.take(rows(EMBEDDING, vocabulary, span))
        # A head that shares it is multiplied with at every step, which weighs more than looking rows up.
        weight = laid_out(weight) if blueprint.is_tied and last == num_layers else weight
        is_whole = loader.cut.heads.count == 1
        embedding = VocabularyEmbedding(weight, span[0], is_whole, blueprint.embedding_factor)
    if last == num_layers:
        norm = blueprint.norm.load(loader, f"{blueprint.norm_name}.weight")
        if blueprint.is_tied and embedding is not None:
            output = embedding.weight
        else:
            name = EMBEDDING if blueprint.is_tied else HEAD
            output = laid_out(loader.take(rows(name, vocabulary, span)))
        head = VocabularyHead(norm, Linear(output), blueprint.head_factor)
        if blueprint.draft is not None and embedding is not None:
            draft = blueprint.draft.load(loader, num_layers, (embedding, head))
    return ModelStage(layers, embedding if first == 0 else None, head, draft)


def _blueprint(config: Mapping[str, Any], has_draft: bool) -> Blueprint:
    """A model with its draft layer or without."""
    fields, blueprint = _read(config)
    if has_draft and blueprint.draft is None:
        raise fields.refusal(
            "there is no draft layer that can be run (num_nextn_predict_layers, mtp_num_hidden_layers); "
            "decode without drafts"
        )
    return blueprint if has_draft else replace(blueprint, draft=None)


def _read(config: Mapping[str, Any]) -> tuple[ModelFields, Blueprint]:
    model_type = config.get("model_type")
    known = _families()
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            f"config: model_type {shown(model_type)} is not supported; "
            f"use a model of one of {', '.join(known)}"
        )
    family = known[model_type]
    fields = ModelFields(f"config of a {model_type} model", {**COMMON_DEFAULTS, **family.defaults, **config})
    return fields, family.read(fields)


@cache
def _families() -> dict[str, ModelFamily]:
    """Every family by model_type: what the modules of the folder list."""
    by_type: dict[str, ModelFamily] = {}
    for module in pkgutil.iter_modules(families.__path__):
        by_type |= importlib.import_module(f"{families.__name__}.{module.name}").FAMILIES
    return dict(sorted(by_type.items()))
