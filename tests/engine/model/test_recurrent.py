"""Recurrent families against `transformers`: logits of all positions, batched, chunked and decoded."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.fp8 import quantised
from tests.engine.hybrids import HYBRIDS, hybrid, multimodal
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
from tests.engine.model.test_broken import reruled, respecified

from baton.checkpoint.opening import open_checkpoint
from baton.engine.models import gated_delta, gqa, mamba2, mlp, moe, recurrence
from baton.engine.models.base import Share
from baton.engine.models.build import describe
from baton.engine.models.recurrence import Convolution
from baton.engine.models.weights import covering, cut_mirrored, cut_units
from baton.errors import ConfigError, LayoutError
from baton.plan.ranges import Range

CLOSE, SEEN = 5e-5, 1e-3
LENGTHS = (1, 70, 6)

VARIANTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    **{family: (family, {}, (1, 2)) for family in HYBRIDS},
    "qwen3_next-uneven": (
        "qwen3_next",
        {"linear_num_key_heads": 5, "linear_num_value_heads": 15, "num_key_value_heads": 6},
        (4,),
    ),
    "qwen3_5_text-mirrored": (
        "qwen3_5_text",
        {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "attention_bias": True},
        (4, 12),
    ),
    "falcon_h1-plain": (
        "falcon_h1",
        {"mamba_rms_norm": False, "projectors_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
        (2,),
    ),
    "falcon_h1-biased": (
        "falcon_h1",
        {"mamba_norm_before_gate": True, "attention_bias": True, "mlp_bias": True, "mamba_d_head": "auto"},
        (2,),
    ),
    "falcon_h1-uneven": (
        "falcon_h1",
        {"mamba_n_groups": 4, "mamba_n_heads": 8, "mamba_d_head": 5, "mamba_d_ssm": 40}
        | {"num_key_value_heads": 6},
        (3,),
    ),
    "falcon_h1-mirrored": ("falcon_h1", {"mamba_n_groups": 1, "num_key_value_heads": 1}, (3, 12)),
    "bamba-biased": (
        "bamba",
        {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 1},
        (6,),
    ),
}
"""With the numbers of tp ranks that each is cut for."""


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_multimodal_checkpoint(family: str, is_fp8: bool, tmp_path: Path) -> None:
    folder = wanted = multimodal(family)
    if is_fp8:
        folder, wanted = quantised(folder, tmp_path)
    checkpoint = open_checkpoint(str(folder))
    assert describe(checkpoint.config).model_type == f"{family}_text"
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    found = whole_logits(Ranks(checkpoint, Plan(tp=2)), sequences)
    assert worst(found, oracle_logits(wanted, sequences)) < CLOSE


@pytest.mark.parametrize("name", named(VARIANTS))
def test_logits_are_those_of_transformers(name: str, models: Path) -> None:
    family, changes, counts = VARIANTS[name]
    folder = hybrid(family, models, **changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], LENGTHS)
    wanted = oracle_logits(folder, sequences)
    for tp in counts:
        found = whole_logits(Ranks(checkpoint, Plan(tp=tp)), sequences, num_chunk=66)
        assert worst(found, wanted) < CLOSE, f"tp{tp}"


@pytest.mark.parametrize("num_chunk", [1, 2, 5])
def test_chunks_of_any_length_carry_the_state(num_chunk: int, models: Path) -> None:
    for family in ("qwen3_5_text", "falcon_h1"):
        folder = hybrid(family, models)
        checkpoint = DiskCheckpoint(folder)
        sequences = prompts(checkpoint.config["vocab_size"], (1, 19, 6))
        found = whole_logits(Ranks(checkpoint), sequences, num_chunk)
        assert worst(found, oracle_logits(folder, sequences)) < CLOSE


@dataclass(frozen=True)
class Broken:
    """A model, and a change to the code that makes it another one."""

    family: str
    apply: Callable[[pytest.MonkeyPatch], None]
    tp: int = 1
    changes: dict[str, Any] = field(default_factory=dict)


def without(target: object, name: str, value: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Has another function or value in place of one."""
    return lambda patch: patch.setattr(target, name, value)


def _forgetful(patch: pytest.MonkeyPatch) -> None:
    advance = Convolution.advance
    patch.setattr(Convolution, "advance", lambda self, x, before: advance(self, x, before * 0))


def _unfaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gated_delta.delta_rule, "decay", lambda log: torch.ones_like(log, dtype=torch.float32))


def _ungated(patch: pytest.MonkeyPatch) -> None:
    feed = mlp.Dense.feed
    patch.setattr(mlp.Dense, "feed", lambda self, x: feed(replace(self, weight=None), x))


def _open(patch: pytest.MonkeyPatch) -> None:
    mix = gqa.Gqa.mix

    def ungated(self: gqa.Gqa, *args: Any) -> torch.Tensor:
        return mix(replace(self, spec=replace(self.spec, is_gated=False)), *args)

    patch.setattr(gqa.Gqa, "mix", ungated)


def _unfactored(branch: str) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        load = gqa.BesideSpec.load

        def plain(self: gqa.BesideSpec, *args: Any) -> gqa.Beside:
            branches = (
                replace(each, factor_in=1.0) if each.name == branch else each for each in self.branches
            )
            return load(replace(self, branches=tuple(branches)), *args)

        patch.setattr(gqa.BesideSpec, "load", plain)

    return apply


def _normed_apart(patch: pytest.MonkeyPatch) -> None:
    """Each rank norms over its own channels only."""
    call = mamba2.GroupNorm.__call__
    patch.setattr(
        mamba2.GroupNorm, "__call__", lambda self, *args: call(replace(self, is_shared=False), *args)
    )


def _added_twice(patch: pytest.MonkeyPatch) -> None:
    """Mirrors of a head each add all of it."""

    def whole(blocks: list[Range], size: int, share: Share) -> Range:
        return blocks[share.index][0] * size, blocks[share.index][1] * size

    patch.setattr(recurrence, "cut_mirrored", whole)


DELTA, SPACE = gated_delta.GatedDeltaSpec, mamba2.Mamba2Spec
CASES: dict[str, Broken] = {
    "no convolution state": Broken("qwen3_5_text", _forgetful),
    "no decay": Broken("qwen3_5_text", _unfaded),
    "attention ungated": Broken("qwen3_5_text", _open),
    "heads normed otherwise": Broken("qwen3_next", respecified(gqa.GqaSpec, is_norm_centred=False)),
    "another epsilon": Broken("qwen3_next", respecified(DELTA, norm_eps=0.1)),
    "another activation": Broken("qwen3_5_text", respecified(DELTA, activation="gelu")),
    "unit vectors by the config's epsilon": Broken("qwen3_5_text", without(gated_delta, "UNIT_EPS", 0.01)),
    "shared expert ungated": Broken("qwen3_next", _ungated),
    "experts not normed": Broken("qwen3_5_moe_text", reruled(moe.Softmax, is_normed=False)),
    "no shared expert": Broken("qwen3_5_moe_text", respecified(moe.MoeSpec, shared=None)),
    "no norm": Broken("falcon_h1", respecified(SPACE, norm=None)),
    "no factors": Broken("falcon_h1", respecified(SPACE, factors=(1.0,) * 5)),
    "no factor into attention": Broken("falcon_h1", _unfactored("self_attn")),
    "no factor into states": Broken("falcon_h1", _unfactored("mamba")),
    "no factor of gates": Broken("falcon_h1", respecified(mlp.DenseSpec, gate_factor=1.0)),
    "no factor of keys": Broken("falcon_h1", respecified(gqa.GqaSpec, scale=None)),
    "gated before the norm": Broken(
        "falcon_h1",
        respecified(SPACE, norm=mamba2.GroupNormSpec(2, 1e-5)),
        changes={"mamba_norm_before_gate": True},
    ),
    "norm over the whole layer": Broken("falcon_h1", respecified(SPACE, norm=mamba2.GroupNormSpec(1, 1e-5))),
    "one group's norm on each rank": Broken("bamba", _normed_apart, tp=2, changes={"mamba_n_groups": 1}),
    "groups normed as one": Broken("bamba", respecified(SPACE, norm=mamba2.GroupNormSpec(1, 1e-6))),
    "mirrors add twice": Broken("falcon_h1", _added_twice, tp=12),
    "deltas added twice": Broken("qwen3_5_text", _added_twice, tp=12),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_seen(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    folder = hybrid(case.family, models, **case.changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"], (1, 19, 6))
    wanted = oracle_logits(folder, sequences)
    assert worst(whole_logits(Ranks(checkpoint, Plan(tp=case.tp)), sequences), wanted) < CLOSE
    case.apply(monkeypatch)
    assert worst(whole_logits(Ranks(checkpoint, Plan(tp=case.tp)), sequences), wanted) > SEEN


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "qwen3_next",
            {"linear_num_value_heads": 7},
            "linear_num_value_heads is 7; .*_key_heads, 3",
        ),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 5}, "layer_types has 'mamba'"),
        ("falcon_h1", {"time_step_limit": [0.0, 0.1]}, "time_step_limit is .* not supported"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers .* must list 5"),
        ("falcon_h1", {"mamba_n_groups": 4}, "mamba_n_groups is 4; it must divide"),
        ("bamba", {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    ],
)
def test_a_config_that_cannot_run_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        describe({"model_type": family, **HYBRIDS[family], **changes})


@pytest.mark.parametrize("num_units", range(1, 8))
@pytest.mark.parametrize("num_each", [1, 2, 3])
def test_every_rank_computes_what_it_keeps_and_what_its_heads_need(num_units: int, num_each: int) -> None:
    num_heads = num_units * num_each
    for tp in [*range(1, num_units + 1), 2 * num_heads]:
        heads = cut_units(num_heads, "head", Share(0, tp))
        kept = cut_units(num_units, "unit", Share(0, tp))
        added = []
        for i, computed in enumerate(covering(heads, kept, num_each)):
            needed = {head // num_each for head in range(*heads[i])}
            assert needed | set(range(*kept[i])) <= set(range(*computed))
            added += range(*cut_mirrored(heads, 7, Share(i, tp)))
        assert added == list(range(7 * num_heads))


def test_more_ranks_than_units_have_to_be_a_multiple() -> None:
    with pytest.raises(LayoutError, match="tp3: the model has 2 groups; use tp up to 2, or a multiple of 2"):
        cut_units(2, "group", Share(0, 3))
