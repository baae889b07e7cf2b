"""GGUF files made from Hugging Face folders with the format's own package."""

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize

from baton.checkpoint.opening import open_checkpoint

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FIXED = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def pack(
    folder: Path,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    more: dict[str, Any] | None = None,
    factors: list[float] | None = None,
) -> Path:
    """Writes the folder's model as GGUF: matrices of `kind`, vectors in float32, keys in `more` besides."""
    checkpoint = open_checkpoint(str(folder))
    config = checkpoint.config
    writer = GGUFWriter(path, config["model_type"])
    writer.add_name(folder.name)
    writer.add_custom_alignment(64)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_key_length(head_dim(config))
    for key, value in {"tokenizer.ggml.eos_token_id": 2, **(more or {})}.items():
        writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name in checkpoint.names():
        values = checkpoint.read(name).numpy()
        if config["model_type"] == "llama":
            values = turned(values, name, config)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def head_dim(config: Any) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def turned(values: np.ndarray, name: str, config: Any) -> np.ndarray:
    """Rows of q and k with the two rotary halves of each head interleaved."""
    if not re.search(r"\.[qk]_proj\.", name):
        return values
    halves = values.reshape(-1, 2, head_dim(config) // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def gguf_name(name: str) -> str:
    if name in FIXED:
        return FIXED[name]
    layer, inner, last = re.fullmatch(r"model\.layers\.(\d+)\.(.*)\.(weight|bias)", name).groups()
    return f"blk.{layer}.{NAMES[inner]}.{last}"
