"""Tiny random checkpoints of families with recurrent state, in odd sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.tiny import DENSE, FULL, WINDOWED, tiny

LINEAR = "linear_attention"
REACH = 3
"""Tokens that a convolution looks back."""
_DELTA = {
    **DENSE,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
    "linear_conv_kernel_dim": REACH + 1,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "partial_rotary_factor": 0.25,
    "initializer_range": 0.2,
}
_MIXTURE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
    "shared_expert_intermediate_size": 26,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_DELTA, **_MIXTURE, "vocab_size": 103, "mlp_only_layers": [1]},
    "qwen3_5_text": {**_DELTA, "vocab_size": 107, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {**_DELTA, **_MIXTURE, "vocab_size": 109},
    "falcon_h1": {
        **DENSE,
        "vocab_size": 101,
        "num_hidden_layers": 4,
        "mamba_d_ssm": 42,
        "mamba_n_heads": 6,
        "mamba_d_head": 7,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "mamba_d_conv": REACH + 1,
        "mamba_chunk_size": 16,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "initializer_range": 0.2,
        "lm_head_multiplier": 0.7,
        "embedding_multiplier": 2.5,
        "key_multiplier": 0.6,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.9,
        "mlp_multipliers": [0.7, 0.4],
        "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.6],
    },
    "bamba": {
        **DENSE,
        "vocab_size": 113,
        "attn_layer_indices": [1, 4],
        "mamba_n_heads": 6,
        "mamba_d_head": 16,
        "mamba_n_groups": 2,
        "mamba_d_state": 10,
        "mamba_d_conv": REACH + 1,
        "mamba_chunk_size": 16,
        "initializer_range": 0.2,
    },
}


def multimodal(family: str) -> Path:
    """A checkpoint of a family with images, which has the language model of `hybrid` or `windowed` in it."""
    text = {**HYBRIDS, **WINDOWED}[f"{family}_text"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": text["hidden_size"], "num_position_embeddings": 16}
    if family == "gemma3":
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    is_tied = text["tie_word_embeddings"]
    return tiny(family, text_config=text, vision_config=vision, tie_word_embeddings=is_tied)


def hybrid(family: str, folder: Path | None = None, **changes: Any) -> Path:
    """Writes a checkpoint of the family, once for the same arguments, and says where."""
    return tiny(family, folder, **{**HYBRIDS[family], **changes})
