"""The comparison with `transformers` catches each rule of a family that is left out or taken wrongly."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import (
    DiskCheckpoint,
    Plan,
    Ranks,
    oracle_logits,
    prompts,
    whole_logits,
    worst,
)
from tests.engine.model.test_families import DEEPSEEK_YARN, YARN
from tests.engine.tiny import tiny

from baton.engine.models import gqa, mla, mlp, moe, weights
from baton.engine.models.base import Share
from baton.engine.models.rope import Rope

SEEN = 1e-3


@dataclass(frozen=True)
class Broken:
    """A model, and a change to the code that makes it another one."""

    family: str
    apply: Callable[[pytest.MonkeyPatch], None]
    changes: dict[str, Any]
    plan: Plan | None = None


def respecified(spec: type, **values: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Loads every spec of the class with other values."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        load = spec.load
        patch.setattr(spec, "load", lambda self, *args: load(replace(self, **values), *args))

    return apply


def reruled(rule: type, **values: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Routes by every rule of the class with other values."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        route = rule.route
        patch.setattr(rule, "route", lambda self, *args: route(replace(self, **values), *args))

    return apply


def turned_otherwise(**values: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Makes every rotation with other values."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        make = Rope.__init__
        patch.setattr(Rope, "__init__", lambda self, spec, *args: make(self, replace(spec, **values), *args))

    return apply


def _uncorrected(patch: pytest.MonkeyPatch) -> None:
    route = moe.Sigmoid.route
    patch.setattr(moe.Sigmoid, "route", lambda self, logits, bias: route(self, logits, bias * 0))


def _weighted_by_correction(patch: pytest.MonkeyPatch) -> None:
    route = moe.Sigmoid.route

    def wrong(self: moe.Sigmoid, logits: torch.Tensor, bias: torch.Tensor) -> moe.Routed:
        return route(self, (logits.sigmoid() + bias).logit(1e-6), bias * 0)

    patch.setattr(moe.Sigmoid, "route", wrong)


def _unscaled(patch: pytest.MonkeyPatch) -> None:
    load = mla.MlaSpec.load
    patch.setattr(
        mla.MlaSpec, "load", lambda self, *args: load(replace(self, scale=self.key_dim**-0.5), *args)
    )


def _biased_everywhere(patch: pytest.MonkeyPatch) -> None:
    for module in (gqa, mlp):
        patch.setattr(
            module,
            "load_partial",
            lambda loader, part: weights.load_partial(loader, replace(part, share=Share())),
        )


CASES: dict[str, Broken] = {
    "rope in pairs": Broken("llama", turned_otherwise(is_paired_in=True), {}),
    "rope in halves": Broken("deepseek_v3", turned_otherwise(is_paired_in=False), {}),
    "rope in halves, v2": Broken(
        "deepseek_v2", turned_otherwise(is_paired_in=False, is_paired_out=False), {}
    ),
    "yarn without amplitude": Broken("qwen2", turned_otherwise(amplitude=1.0), {"rope_parameters": YARN}),
    "yarn as default": Broken("qwen2", turned_otherwise(kind="default"), {"rope_parameters": YARN}),
    "mscale left out": Broken("deepseek_v2", _unscaled, {"rope_parameters": DEEPSEEK_YARN}),
    "no bias": Broken("qwen2", respecified(gqa.GqaSpec, has_input_bias=False), {}),
    "no norm of heads": Broken("qwen3", respecified(gqa.GqaSpec, norm_eps=None), {}),
    "bias of a sum on each rank": Broken(
        "llama", _biased_everywhere, {"attention_bias": True, "mlp_bias": True}, Plan(tp=2)
    ),
    "latent normed by the config's epsilon": Broken(
        "deepseek_v3", lambda patch: patch.setattr(mla, "LATENT_EPS", 0.01), {"initializer_range": 0.1}
    ),
    "no correction": Broken("deepseek_v3", _uncorrected, {}),
    "weights with correction": Broken("deepseek_v3", _weighted_by_correction, {}),
    "sigmoid without groups": Broken("deepseek_v3", reruled(moe.Sigmoid, num_groups_chosen=3), {}),
    "sigmoid unscaled": Broken("deepseek_v3", reruled(moe.Sigmoid, factor=1.0), {}),
    "sigmoid not normed": Broken("deepseek_v3", reruled(moe.Sigmoid, is_normed=False), {}),
    "softmax without groups": Broken("deepseek_v2", reruled(moe.Softmax, num_groups=1), {"topk_group": 1}),
    "softmax unscaled": Broken(
        "deepseek_v2", reruled(moe.Softmax, factor=1.0), {"routed_scaling_factor": 1.7}
    ),
    "softmax normed": Broken("deepseek_v2", reruled(moe.Softmax, is_normed=True), {}),
    "softmax not normed": Broken("qwen3_moe", reruled(moe.Softmax, is_normed=False), {}),
    "no shared experts": Broken("deepseek_v2", respecified(moe.MoeSpec, shared=None), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_broken_rule_is_seen(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    folder = tiny(case.family, models, **case.changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"])
    wanted = oracle_logits(folder, sequences)
    assert worst(whole_logits(Ranks(checkpoint, case.plan), sequences), wanted) < SEEN / 100
    case.apply(monkeypatch)
    assert worst(whole_logits(Ranks(checkpoint, case.plan), sequences), wanted) > SEEN
