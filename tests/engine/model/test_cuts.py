"""However a model is cut, the parts sum to the whole, and each rank reads its own part only."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import CPU, DiskCheckpoint, Plan, Ranks, prompts, whole_logits, worst
from tests.engine.tiny import tiny

from baton.engine.models.base import Cut, Share
from baton.engine.models.build import build
from baton.engine.models.weights import cut_evenly, cut_heads
from baton.errors import ConfigError
from baton.plan.layout import parse_layout

CLOSE = 1e-5
UNEVEN = {"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 40, "intermediate_size": 71}
BIASED = {"attention_bias": True, "mlp_bias": True}

CASES: dict[str, tuple[str, dict[str, Any], Plan]] = {
    "2 ranks for 5 kv heads": ("llama", {**UNEVEN, **BIASED}, Plan(tp=2)),
    "3 ranks for 5 kv heads": ("llama", {**UNEVEN, **BIASED}, Plan(tp=3)),
    "4 ranks for 2 kv heads of 3 query heads": ("qwen3", {"attention_bias": True}, Plan(tp=4)),
    "8 ranks for 6 query heads": ("qwen2", {}, Plan(tp=8)),
    "width over dp too": ("llama", {**UNEVEN, **BIASED}, Plan(tp=2, dp=3)),
    "experts over dp too": ("qwen3_moe", {}, Plan(tp=2, dp=2)),
    "more ranks than experts": ("qwen3_moe", {}, Plan(tp=4, dp=2)),
    "latent over 4 ranks": ("deepseek_v2", {"attention_bias": True, "mlp_bias": False}, Plan(tp=4)),
    "latent with more ranks than heads": ("deepseek_v3", {}, Plan(tp=8, is_absorbed=True)),
    "stages": ("llama", {"tie_word_embeddings": True}, Plan(stages=(1, 3, 1))),
    "stages of cut ranks": ("deepseek_v3", {}, Plan(tp=3, dp=2, stages=(3, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_parts_sum_to_the_whole(name: str, models: Path) -> None:
    family, changes, plan = CASES[name]
    checkpoint = DiskCheckpoint(tiny(family, models, **changes))
    sequences = prompts(checkpoint.config["vocab_size"])
    whole = whole_logits(Ranks(checkpoint), sequences)
    assert worst(whole_logits(Ranks(checkpoint, plan), sequences), whole) < CLOSE


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("tp", [1, 3])
def test_absorbed_is_plain(family: str, tp: int, models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny(family, models))
    sequences = prompts(checkpoint.config["vocab_size"])
    plain = whole_logits(Ranks(checkpoint, Plan(tp=tp)), sequences)
    assert worst(whole_logits(Ranks(checkpoint, Plan(tp=tp, is_absorbed=True)), sequences), plain) < CLOSE


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_a_rank_reads_its_slices_only(family: str, models: Path) -> None:
    folder = tiny(family, models)
    whole = DiskCheckpoint(folder)
    Ranks(whole)
    names = set(whole.num_read)
    assert names == set(whole.names())
    assert all(count == torch.Size(whole.shape(name)).numel() for name, count in whole.num_read.items())
    cut = DiskCheckpoint(folder)
    Ranks(cut, Plan(tp=2))
    kept_whole = ("layernorm", "norm.weight", "_a_proj", "mlp.gate.", "k_norm", "q_norm")
    for name in names:
        times = 2 if any(part in name for part in kept_whole) else 1
        assert cut.num_read[name] == times * whole.num_read[name], name


def test_a_stage_reads_its_layers_only(models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny("llama", models))
    stage = build(checkpoint, Cut((1, 3), Share(), Share(), torch.float32, CPU))
    assert (stage.embedding, stage.head) == (None, None)
    assert [layer.index for layer in stage.layers] == [1, 2]
    assert {name.split(".")[2] for name in checkpoint.num_read} == {"1", "2"}


def test_a_tied_head_shares_the_embedding(models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny("qwen2", models))
    (rank,) = Ranks(checkpoint).stages[0]
    assert rank.head.output.weight is rank.embedding.weight


@pytest.mark.parametrize("num_kv_heads", range(1, 7))
@pytest.mark.parametrize("group", [1, 3, 4])
def test_kv_heads_are_where_the_plan_puts_them(num_kv_heads: int, group: int) -> None:
    for tp in [*range(1, num_kv_heads + 1), 2 * num_kv_heads, 5 * num_kv_heads]:
        blocks = parse_layout(f"tp{tp}").unit_blocks(num_kv_heads, component="k", unit="kv head", side="this")
        dealt = []
        for i in range(tp):
            q, kv = cut_heads(num_kv_heads * group, num_kv_heads, Share(i, tp))
            assert kv == blocks[i]
            assert all(kv[0] <= head // group < kv[1] for head in range(*q))
            dealt += range(*q)
        assert dealt == list(range(num_kv_heads * group))


def test_shares_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp3 .* 2 kv heads .* multiple of 2"):
        cut_heads(4, 2, Share(0, 3))
    assert [cut_evenly(7, Share(i, 3)) for i in range(3)] == [(0, 3), (3, 5), (5, 7)]
