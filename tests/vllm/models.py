"""Tiny models with random weights, saved as vLLM and SGLang read them; run by a Python that has either.

python tests/vllm/models.py llama FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCAB = 1000
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    # Large enough that the output depends on the whole cache.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 6,
            "sliding_window": 256,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 32,
            "initializer_range": 0.05,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_n_groups": 1,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "initializer_range": 0.05,
        },
    ),
    "mellum": (
        "MellumConfig",
        "MellumForCausalLM",
        {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense"] * 4,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 128,
            # All layers dense: the router of experts on CPUs wants groups of them.
            "first_k_dense_replace": 4,
        },
    ),
}


def make(name: str, folder: Path) -> None:
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, config_class)(**COMMON | options)
    model = getattr(transformers, model_class)(config).to(torch.float32)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "eos_token": "w2"}
    settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
