"""Families with windows against `transformers`: logits of all positions, batched, chunked and decoded."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import (
    DiskCheckpoint,
    Plan,
    Ranks,
    named,
    oracle_logits,
    prompts,
    whole_logits,
    worst,
)
from tests.engine.model.test_broken import reruled, respecified, turned_otherwise
from tests.engine.tiny import FULL, SLIDING, WINDOW, WINDOWED, windowed

from baton.engine.models import gqa, layers, moe
from baton.engine.models.build import describe
from baton.engine.models.layers import NormSpec, VocabularyEmbedding
from baton.errors import ConfigError

CLOSE, SEEN = 1e-5, 1e-3
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 5)

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in WINDOWED},
    "gemma3_text-biased": ("gemma3_text", {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3_text-pattern": ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 3}),
    "ministral-all": ("ministral", {"layer_types": None}),
    "gpt_oss-unbiased": ("gpt_oss", {"attention_bias": False, "rope_parameters": {"rope_theta": 50.0}}),
    "gpt_oss-types": ("gpt_oss", {"layer_types": [FULL, SLIDING, SLIDING, FULL, FULL]}),
}


@pytest.mark.parametrize("name", named(VARIANTS))
def test_logits_are_those_of_transformers(name: str, models: Path) -> None:
    family, changes = VARIANTS[name]
    folder = windowed(family, models, **changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    wanted = oracle_logits(folder, sequences)
    for plan in (Plan(), Plan(tp=2, dp=2, stages=(2, 3)), Plan(tp=4)):
        assert worst(whole_logits(Ranks(checkpoint, plan), sequences), wanted) < CLOSE


def test_gemma3_configs_of_before_rope_parameters_mean_the_same(models: Path) -> None:
    folder = windowed("gemma3_text", models)
    before = {
        "rope_parameters": None,
        "rope_theta": 3000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }
    checkpoint = DiskCheckpoint(folder, before)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    assert worst(whole_logits(Ranks(checkpoint), sequences), oracle_logits(folder, sequences)) < CLOSE


def test_bases_are_published_ones_unless_told(models: Path) -> None:
    bare = {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}
    ranks = Ranks(DiskCheckpoint(windowed("gemma3_text", models), bare))
    thetas = [layer.mixer.rope.spec.theta for layer in ranks.stages[0][0].layers]  # type: ignore[attr-defined]
    assert thetas == [10_000.0, 10_000.0, 1_000_000.0, 10_000.0, 1_000_000.0]


@pytest.mark.parametrize("family", WINDOWED)
def test_a_window_is_no_limit_of_the_context(family: str, models: Path) -> None:
    config = DiskCheckpoint(windowed(family, models)).config
    assert describe(config, max_context=4096).max_positions == 4096
    with pytest.raises(ConfigError, match="beyond max_position_embeddings; use at most 4096"):
        describe(config, max_context=4097)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"layer_types": [FULL]}, "it must list 5 words"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit is 0"),
    ],
)
def test_a_config_that_cannot_run_is_refused(
    family: str, changes: dict[str, Any], reason: str, models: Path
) -> None:
    config = DiskCheckpoint(windowed(family, models), changes).config
    with pytest.raises(ConfigError, match=reason):
        describe(config)


@dataclass(frozen=True)
class Broken:
    """A model, and a change to the code that makes it another one."""

    family: str
    apply: Callable[[pytest.MonkeyPatch], None]
    plan: Plan | None = None
    changes: dict[str, Any] = field(default_factory=dict)


def reoptioned(change: Callable[[gqa.HeadOptions], gqa.HeadOptions]) -> Callable[[pytest.MonkeyPatch], None]:
    """Attends with other options."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        made = gqa.GqaSpec._options
        patch.setattr(gqa.GqaSpec, "_options", lambda self, *args: change(made(self, *args)))

    return apply


def _wider(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    return reoptioned(
        lambda options: replace(options, window=options.window + by if options.window else None)
    )


def _unscaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VocabularyEmbedding, "scale", lambda self, x: x)


def _unbiased_experts(patch: pytest.MonkeyPatch) -> None:
    run = moe.ClampedExperts.run
    patch.setattr(
        moe.ClampedExperts,
        "run",
        lambda self, i, block: run(replace(self, output_bias=0 * self.output_bias), i, block),
    )


def _bare(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layers.Decoder, "join_feed", lambda self, x, fed: x + fed)


def _first_sinks(patch: pytest.MonkeyPatch) -> None:
    """Every tp rank takes the sinks of the first."""
    made = gqa.GqaSpec._options
    patch.setattr(
        gqa.GqaSpec,
        "_options",
        lambda self, loader, prefix, heads: made(self, loader, prefix, (0, heads[1] - heads[0])),
    )


CASES: dict[str, Broken] = {
    "window one too short": Broken("mistral", _wider(-1)),
    "window one too long": Broken("mistral", _wider(1)),
    "window one too short, gemma": Broken("gemma3_text", _wider(-1)),
    "window one too long, gpt-oss": Broken("gpt_oss", _wider(1)),
    "no window": Broken("gemma3_text", respecified(gqa.GqaSpec, window=None)),
    "the full layers' base on all": Broken("gemma3_text", turned_otherwise(theta=3000.0)),
    "the windowed layers' base on all": Broken("gemma3_text", turned_otherwise(theta=100.0)),
    "full layers unstretched": Broken("gemma3_text", turned_otherwise(kind="default")),
    "embedding unscaled": Broken("gemma3_text", _unscaled),
    "norms not centred": Broken("gemma3_text", respecified(NormSpec, is_centred=False)),
    "norms of heads not centred": Broken("gemma3_text", respecified(gqa.GqaSpec, is_norm_centred=False)),
    "scores scaled by the channels": Broken("gemma3_text", respecified(gqa.GqaSpec, scale=None)),
    "no norm after the MLP": Broken("gemma3_text", _bare),
    "sinks left out": Broken("gpt_oss", reoptioned(lambda options: replace(options, sinks=None))),
    "sinks of other heads": Broken("gpt_oss", _first_sinks, Plan(tp=2)),
    "gates not clamped": Broken("gpt_oss", respecified(moe.ClampedSpec, limit=1e9)),
    "another gain": Broken("gpt_oss", respecified(moe.ClampedSpec, gain=1.0)),
    "experts without bias": Broken("gpt_oss", _unbiased_experts),
    "weights not normed": Broken("gpt_oss", reruled(moe.Softmax, is_normed=False)),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_seen(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    folder = windowed(case.family, models, **case.changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    wanted = oracle_logits(folder, sequences)
    case.apply(monkeypatch)
    assert worst(whole_logits(Ranks(checkpoint, case.plan), sequences), wanted) > SEEN


def test_a_window_of_all_matters_only_beyond_it(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = DiskCheckpoint(windowed("gemma3_text", models))
    within, beyond = prompts(checkpoint.config["vocab_size"], [WINDOW, WINDOW + 1])
    with_window = [whole_logits(Ranks(checkpoint), [tokens])[0] for tokens in (within, beyond)]
    respecified(gqa.GqaSpec, window=None)(monkeypatch)
    without = [whole_logits(Ranks(checkpoint), [tokens])[0] for tokens in (within, beyond)]
    assert torch.equal(with_window[0], without[0])
    assert worst([with_window[1]], [without[1]]) > SEEN
