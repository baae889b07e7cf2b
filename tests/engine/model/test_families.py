"""Every family against `transformers` in float32: logits of all positions, batched, chunked and decoded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.model.reference import (
    Altered,
    DiskCheckpoint,
    Place,
    Plan,
    Ranks,
    oracle_logits,
    oracle_model,
    prompts,
    whole_logits,
    worst,
)
from tests.engine.tiny import FAMILIES, tiny

CLOSE = 1e-5

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16}
DEEPSEEK_YARN = {**YARN, "beta_fast": 24, "beta_slow": 2, "mscale": 1.3, "mscale_all_dim": 0.7}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-head-dim": ("llama", {"head_dim": 14, "hidden_act": "gelu"}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
    "llama-dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0}}),
    "mistral-windowed": ("mistral", {"sliding_window": 19, "max_position_embeddings": 19}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2-windowed": ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}),
    "qwen3-biased": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe-some": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [3], "decoder_sparse_step": 2},
    ),
    "deepseek_v2-greedy": (
        "deepseek_v2",
        {"topk_method": "greedy", "q_lora_rank": 14, "routed_scaling_factor": 1.7, "n_shared_experts": 2},
    ),
    "deepseek_v2-yarn": ("deepseek_v2", {"rope_parameters": DEEPSEEK_YARN, "attention_bias": True}),
    "deepseek_v3-yarn": ("deepseek_v3", {"rope_parameters": DEEPSEEK_YARN, "rms_norm_eps": 0.01}),
    "deepseek_v3-plain": (
        "deepseek_v3",
        {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True},
    ),
    "deepseek_v3-ungrouped": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, models: Path) -> None:
    family, changes = VARIANTS[name]
    folder = tiny(family, models, **changes)
    checkpoint = DiskCheckpoint(folder)
    sequences = prompts(checkpoint.config["vocab_size"])
    wanted = oracle_logits(folder, sequences)
    for plan in (Plan(), Plan(tp=2, is_absorbed=True)):
        assert worst(whole_logits(Ranks(checkpoint, plan), sequences), wanted) < CLOSE


@pytest.mark.parametrize(("name", "key"), [("llama-3", "rope_type"), ("deepseek_v3-yarn", "type")])
def test_configs_of_before_rope_parameters_mean_the_same(name: str, key: str, models: Path) -> None:
    family, changes = VARIANTS[name]
    folder = tiny(family, models, **changes)
    scaling = dict(changes["rope_parameters"])
    theta = scaling.pop("rope_theta")
    scaling[key] = scaling.pop("rope_type")
    checkpoint = DiskCheckpoint(
        folder, {"rope_parameters": None, "rope_theta": theta, "rope_scaling": scaling}
    )
    sequences = prompts(checkpoint.config["vocab_size"])
    assert worst(whole_logits(Ranks(checkpoint), sequences), oracle_logits(folder, sequences)) < CLOSE


def test_kimi_k2_is_built_as_deepseek_v3(models: Path) -> None:
    folder = tiny("deepseek_v3", models)
    checkpoint = DiskCheckpoint(folder, {"model_type": "kimi_k2"})
    sequences = prompts(checkpoint.config["vocab_size"])
    assert worst(whole_logits(Ranks(checkpoint), sequences), oracle_logits(folder, sequences)) < CLOSE


@pytest.mark.parametrize("tp", [1, 4])
def test_experts_in_one_tensor_are_those_in_modules(tp: int, models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny("qwen3_moe", models))
    fused: dict[str, torch.Tensor | None] = {}
    for layer in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        experts = [f"{prefix}.{i}" for i in range(6)]
        parts = [[checkpoint.read(f"{e}.{n}_proj.weight") for n in ("gate", "up")] for e in experts]
        fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in parts])
        fused[f"{prefix}.down_proj"] = torch.stack(
            [checkpoint.read(f"{e}.down_proj.weight") for e in experts]
        )
        fused |= {name: None for name in checkpoint.names() if name.startswith(f"{prefix}.")}
    sequences = prompts(checkpoint.config["vocab_size"])
    modules = whole_logits(Ranks(checkpoint, Plan(tp=tp)), sequences)
    assert worst(whole_logits(Ranks(Altered(checkpoint, fused), Plan(tp=tp)), sequences), modules) == 0


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v3-plain"])
def test_what_is_cached_is_what_transformers_caches(name: str, models: Path) -> None:
    family, changes = VARIANTS[name]
    folder = tiny(family, models, **changes)
    checkpoint = DiskCheckpoint(folder)
    (sequence,) = prompts(checkpoint.config["vocab_size"], [17])
    ranks = Ranks(checkpoint)
    whole_logits(ranks, [sequence])
    with torch.inference_mode():
        cached = oracle_model(folder)(torch.tensor([sequence]), use_cache=True).past_key_values
    for layer in range(checkpoint.config["num_hidden_layers"]):
        keys, values = (
            each[0].transpose(0, 1) for each in (cached.layers[layer].keys, cached.layers[layer].values)
        )
        if family == "qwen3":
            wanted = {"k": keys, "v": values}
        else:
            wanted = {"latent": torch.cat((keys, values), dim=-1).squeeze(1)}
        for component, tensor in wanted.items():
            torch.testing.assert_close(ranks.memories[0][0, layer, component], tensor, rtol=1e-4, atol=1e-4)


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_bfloat16_stays_near_float32(family: str, device: str, models: Path) -> None:
    checkpoint = DiskCheckpoint(tiny(family, models, initializer_range=0.1))
    sequences = prompts(checkpoint.config["vocab_size"], [9])
    wanted = whole_logits(Ranks(checkpoint), sequences)
    rough = Ranks(checkpoint, place=Place(torch.bfloat16, torch.device(device)))
    found = [each.cpu() for each in whole_logits(rough, sequences)]
    assert found[0].dtype == torch.float32
    assert 1e-6 < worst(found, wanted) < 0.1


def test_windows_reach_the_attention_of_their_layers(models: Path) -> None:
    folder = tiny("qwen2", models, **VARIANTS["qwen2-windowed"][1])
    ranks = Ranks(DiskCheckpoint(folder))
    whole_logits(ranks, prompts(103, [3]))
    assert [options.window for options in ranks.attentions[0].options] == [None, None, 32, 32, 32]
