"""Tiny random checkpoints of odd shapes, and what `transformers` generates from them.

Weights are large and biases and norms are random too, so that greedy tokens vary and every tensor matters.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging

from baton.checkpoint.opening import open_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"
DENSE = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_LATENT = {
    **DENSE,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**DENSE, "vocab_size": 101},
    "mistral": {**DENSE, "vocab_size": 97, "sliding_window": None},
    "qwen2": {**DENSE, "vocab_size": 103, "tie_word_embeddings": True},
    "qwen3": {**DENSE, "vocab_size": 113, "head_dim": 16},
    "qwen3_moe": {
        **DENSE,
        "vocab_size": 109,
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 34,
        "norm_topk_prob": True,
    },
    "deepseek_v2": {
        **_LATENT,
        "vocab_size": 127,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
    },
    "deepseek_v3": {**_LATENT, "vocab_size": 131, "q_lora_rank": 28, "n_group": 3, "topk_group": 2},
    "deepseek_v32": {
        **_LATENT,
        "vocab_size": 137,
        "q_lora_rank": 28,
        "n_group": 3,
        "topk_group": 2,
        # Which of two tokens with equal scores is chosen is chance. The embedding of a padding token is zero,
        # and so are all its scores; with few heads many others are.
        "pad_token_id": None,
        "index_n_heads": 10,
        "index_head_dim": 18,
        "index_topk": 21,
    },
}
# The same for GLM-5, in which every other layer shares the choice of the one before it.
_GLM = {key: value for key, value in FAMILIES["deepseek_v32"].items() if key not in ("n_group", "topk_group")}
GLM: dict[str, Any] = {**_GLM, "vocab_size": 139, "indexer_types": ["full", "shared"] * 2}
WINDOW = 24
"""Half again as long as a page."""
WINDOWED: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **DENSE,
        "vocab_size": 107,
        "head_dim": 14,
        "query_pre_attn_scalar": 11,
        "sliding_window": WINDOW,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 3000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
        "tie_word_embeddings": True,
        # Gemma's norms double what comes out of them.
        "initializer_range": 0.2,
    },
    "gpt_oss": {
        **DENSE,
        "vocab_size": 127,
        "head_dim": 12,
        "intermediate_size": 34,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "swiglu_limit": 2.0,
        # Yarn makes scores large, and with them what rounding does.
        "initializer_range": 0.2,
    },
    "ministral": {
        **DENSE,
        "vocab_size": 101,
        "sliding_window": WINDOW,
        "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "head_dim": 10,
    },
    "mistral": {**DENSE, "vocab_size": 97, "sliding_window": WINDOW},
}
"""Families with windows on some layers or all, which keep no prefixes; see `windowed`."""
_NORM_SPREAD = 0.3
_BIAS_SPREAD = 0.3


@cache
def _session_folder() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="baton-tiny-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def tiny(
    family: str,
    folder: Path | None = None,
    *,
    seed: int = 0,
    shard_bytes: int | None = None,
    **changes: Any,
) -> Path:
    """Writes a checkpoint of the family below `folder`, once for the same arguments, and says where.

    `changes` are fields of its config; with `shard_bytes` the weights are cut into files of about that size.
    Without a folder it goes to one that is removed when the process ends.
    """
    folder = folder or _session_folder()
    config = {**FAMILIES.get(family, {}), **changes}
    told = json.dumps([family, seed, shard_bytes, config], sort_keys=True)
    where = folder / f"{family}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    if (where / "config.json").is_file():
        return where
    model = _model(family, config, seed)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="partial-", dir=folder) as name:
        partial = Path(name) / "saved"
        model.save_pretrained(partial, **({} if shard_bytes is None else {"max_shard_size": shard_bytes}))
        # Another process may have been faster with the same checkpoint.
        if not where.exists():
            partial.rename(where)
    return where


def windowed(family: str, folder: Path | None = None, **changes: Any) -> Path:
    """The same for one of WINDOWED."""
    return tiny(family, folder, **{**WINDOWED[family], **changes})


def _model(family: str, config: dict[str, Any], seed: int) -> Any:
    kind = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind.from_config(AutoConfig.for_model(family, **config), dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            is_vector = tensor.dim() == 1 or name.endswith("_bias")
            if not is_vector or not tensor.is_floating_point():
                continue
            if name.endswith("A_log"):
                # Recurrent state that lasts for some dozens of tokens.
                tensor.copy_(_BIAS_SPREAD * torch.randn_like(tensor) - 2.5)
            elif name.endswith("norm.weight"):
                tensor.copy_(1 + _NORM_SPREAD * torch.randn_like(tensor))
            else:
                tensor.copy_(_BIAS_SPREAD * torch.randn_like(tensor))
    return model


def oracle(folder: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of `transformers` in float32, one prompt at a time, without a stop at eos."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [list(_generated(str(folder), tuple(prompt), num_tokens)) for prompt in prompts]
    finally:
        torch.set_num_threads(num_threads)


@cache
def _generated(folder: str, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = _loaded(folder)
    with torch.inference_mode():
        answer = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
    return tuple(answer[0, len(prompt) :].tolist())


def oracle_logprobs(folder: Path, prompt: Sequence[int]) -> torch.Tensor:
    """What `transformers` gives every token of the vocabulary after each token of a prompt, in float32."""
    with torch.inference_mode():
        return torch.log_softmax(_loaded(str(folder))(torch.tensor([prompt])).logits[0].float(), dim=-1)


@cache
def _loaded(folder: str) -> Any:
    logging.disable_progress_bar()
    # Experts one by one: the grouped kernel refuses odd widths.
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    if Path(folder).suffix == ".gguf":
        model = _of_gguf(Path(folder), options)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
    model.eval()
    # Generation goes on past eos: what is compared is the model.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _of_gguf(path: Path, options: dict[str, Any]) -> Any:
    """The model of a GGUF file; test_gguf.py compares such weights with those that `transformers` reads."""
    checkpoint = open_checkpoint(str(path))
    config = dict(checkpoint.config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config), **options
    )
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    absent = model.load_state_dict(weights, strict=False).missing_keys
    assert absent == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    model.tie_weights()
    return model
