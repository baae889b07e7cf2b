"""What built-in cards leave out of a model's config, since a cache does not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_LLAMA3 = {
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
_QWEN3 = {
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
_QWEN3_MOE = {**_QWEN3, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}

CARD_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v3": {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "vocab_size": 129280,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    },
    "llama-3-8b": {**_LLAMA3, "intermediate_size": 14336},
    "llama-3-70b": {**_LLAMA3, "intermediate_size": 28672},
    "llama-3-405b": {**_LLAMA3, "intermediate_size": 53248, "max_position_embeddings": 131072},
    "mistral-7b-v0.1": {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
    },
    "qwen2.5-72b": {
        "vocab_size": 152064,
        "intermediate_size": 29568,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
    },
    "qwen3-8b": {**_QWEN3, "hidden_size": 4096, "intermediate_size": 12288},
    "qwen3-32b": {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25600},
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": {
        **_QWEN3_MOE,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "smollm2-135m": {
        "vocab_size": 49152,
        "intermediate_size": 1536,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}
