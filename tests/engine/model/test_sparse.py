"""The indexers of DeepSeek-V3.2 and GLM-5 against `transformers`: all logits, and what is cached."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import (
    DiskCheckpoint,
    PlainAttention,
    Plan,
    Ranks,
    oracle_logits,
    oracle_model,
    prompts,
    whole_logits,
    worst,
)
from tests.engine.model.test_broken import respecified
from tests.engine.model.test_families import DEEPSEEK_YARN
from tests.engine.tiny import FAMILIES, GLM, tiny

from baton.engine.models import mla
from baton.engine.models.base import IndexQuery
from baton.engine.models.build import describe
from baton.errors import ConfigError

FAMILY = "deepseek_v32"
NUM_CHOSEN = FAMILIES[FAMILY]["index_topk"]
LENGTHS = (1, NUM_CHOSEN, NUM_CHOSEN + 1, 3 * NUM_CHOSEN + 8)
CLOSE, SEEN = 1e-5, 1e-3

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"rope_parameters": DEEPSEEK_YARN},
    "biased": {"attention_bias": True, "norm_topk_prob": False},
    "layers": {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]},
    "few": {"index_topk": 7},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, models: Path) -> None:
    folder = tiny(FAMILY, models, **VARIANTS[name])
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    wanted = oracle_logits(folder, sequences)
    for plan in (Plan(), Plan(tp=2, dp=2, stages=(1, 3), is_absorbed=True)):
        assert worst(whole_logits(Ranks(checkpoint, plan), sequences), wanted) < CLOSE


@pytest.mark.parametrize("types", ["full", "shared"])
def test_logits_of_glm(types: str, models: Path) -> None:
    folder = tiny("glm_moe_dsa", models, **{**GLM, "indexer_types": ["full", "full", "full", types]})
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    for plan in (Plan(), Plan(tp=2, dp=2, stages=(1, 3), is_absorbed=True)):
        found = whole_logits(Ranks(checkpoint, plan), sequences)
        assert worst(found, oracle_logits(folder, sequences)) < CLOSE


def test_index_keys_are_those_that_transformers_caches(models: Path) -> None:
    folder = tiny(FAMILY, models)
    ranks = Ranks(DiskCheckpoint(folder))
    (sequence,) = prompts(137, [30])
    whole_logits(ranks, [sequence])
    with torch.inference_mode():
        cached = oracle_model(folder)(torch.tensor([sequence]), use_cache=True).past_key_values
    for layer in range(4):
        found = ranks.memories[0][0, layer, "index_k"]
        torch.testing.assert_close(found, cached.layers[layer].indexer_keys[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index_head_dim": 6}, "index_head_dim is 6; it must be a whole number from 8"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"mlp_layer_types": ["dense"]}, "it must list 4 words"),
    ],
)
def test_a_config_that_cannot_run_is_refused(changes: dict[str, Any], reason: str, models: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe(DiskCheckpoint(tiny(FAMILY, models), changes).config)


def requeried(change: Callable[[IndexQuery], IndexQuery]) -> Callable[[pytest.MonkeyPatch], None]:
    """Chooses by something else."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = mla.Indexer.query
        patch.setattr(mla.Indexer, "query", lambda self, *args: change(made(self, *args)))

    return apply


def _turned(patch: pytest.MonkeyPatch, *, is_paired_in: bool) -> None:
    load = mla.IndexerSpec.load
    patch.setattr(
        mla.IndexerSpec,
        "load",
        lambda self, *args: load(replace(self, rope=replace(self.rope, is_paired_in=is_paired_in)), *args),
    )


def _unnormed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mla.functional, "layer_norm", lambda x, *args: x)


def _dense(patch: pytest.MonkeyPatch) -> None:
    latent = PlainAttention.latent
    patch.setattr(PlainAttention, "latent", lambda self, *args: latent(self, *args[:4]))


CASES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "everything attended to": _dense,
    "one token too many": respecified(mla.IndexerSpec, num_chosen=NUM_CHOSEN + 1),
    "one token too few": respecified(mla.IndexerSpec, num_chosen=NUM_CHOSEN - 1),
    "index channels turned in pairs": lambda patch: _turned(patch, is_paired_in=True),
    "index keys not normed": _unnormed,
    "heads not weighted": requeried(lambda query: replace(query, weights=torch.ones_like(query.weights))),
    "keys of nothing": requeried(lambda query: replace(query, keys=torch.zeros_like(query.keys))),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_seen(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny(FAMILY, models)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    wanted = oracle_logits(folder, sequences)
    CASES[name](monkeypatch)
    found = whole_logits(Ranks(checkpoint), sequences)
    assert worst(found, wanted) > SEEN
    if name != "one token too few":
        assert worst(found[:2], wanted[:2]) < CLOSE, "prompts that are chosen whole are as they were"


GLM_CASES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no choice where it is shared": respecified(mla.MlaSpec, is_choice_shared=False),
    "index channels turned in halves": lambda patch: _turned(patch, is_paired_in=False),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GLM_CASES)
def test_a_broken_rule_of_glm_is_seen(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("glm_moe_dsa", models, **GLM)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    GLM_CASES[name](monkeypatch)
    assert worst(whole_logits(Ranks(checkpoint), sequences), oracle_logits(folder, sequences)) > SEEN
