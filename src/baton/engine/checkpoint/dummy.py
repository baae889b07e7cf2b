"""Random weights of a model's shapes, made up when they are read: for benchmarks, where no file is needed.

Every row of a tensor is a window of one long table of random numbers, at a place that the tensor's name and
the row decide. So a slice has the numbers that the whole has there, on every rank, and making it is one copy.
Shapes are those of the same model in `transformers`, built without memory.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from baton.engine.checkpoint.base import CONFIG, Fingerprint, Index, absent, bounds, read_object
from baton.errors import ConfigError
from baton.plan.models import card_names

SCHEME = "dummy:"

# A prime, so that rows one after the other do not come round to the same windows.
_NUM_WINDOWS = (1 << 21) - 9
_ROW_STRIDE = 1_140_671
_NORM_SPREAD = 0.1
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """A checkpoint that lies nowhere."""

    text: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    num_columns_max: int

    @classmethod
    def open(cls, text: str) -> DummyWeights:
        """`text` is a built-in card, a config.json or a folder with one."""
        config = _config(text)
        shapes = _shapes(config, f"{SCHEME}{text}")
        return cls(text, config, shapes, max(shape[-1] for shape in shapes.values()))

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{SCHEME}{self.text}"

    @property
    def path(self) -> Path | None:
        """It lies nowhere."""
        return None

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """Random weights have none."""
        return {}

    def names(self) -> Iterable[str]:
        """Every tensor."""
        return self.shapes.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape, or None."""
        return self.shapes.get(name)

    def dtype(self, name: str) -> torch.dtype | None:
        """The type that the config names, bf16 without one."""
        stated = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        return _DTYPES.get(stated, torch.bfloat16) if name in self.shapes else None

    def read(
        self,
        name: str,
        index: Index = (),
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor, made on the device that it is for."""
        shape = self.shapes.get(name)
        if shape is None:
            raise absent(self.title, name)
        where = device or torch.device("cpu")
        *leading, (first, last) = bounds(shape, index, name)
        sizes = [stop - start for start, stop in (*leading, (first, last))]
        kind = dtype or self.dtype(name)
        if 0 in sizes:
            return torch.empty(sizes, device=where, dtype=kind)
        table = _table(_NUM_WINDOWS + self.num_columns_max, where)
        table = 1 + _NORM_SPREAD * table if _is_norm(name, shape) else table * shape[-1] ** -0.5
        starts = (_row_numbers(shape, leading, where) * _ROW_STRIDE + _seed(name)) % _NUM_WINDOWS
        return table.to(kind)[first:].unfold(0, last - first, 1)[starts].reshape(sizes)

    def fingerprint(self) -> str:
        """Equal for equal configs."""
        identity = Fingerprint(self.config)
        for name, shape in sorted(self.shapes.items()):
            identity.add(name, "dummy", shape, b"")
        return identity.hex()


@cache
def _table(num_numbers: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_numbers, generator=generator).to(device)


def _row_numbers(
    shape: tuple[int, ...], leading: list[tuple[int, int]], device: torch.device
) -> torch.Tensor:
    """The rows of the slice, numbered as in the whole tensor with all dims but the last flattened."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for size, (start, stop) in zip(shape[:-1], leading, strict=True):
        here = torch.arange(start, stop, dtype=torch.int64, device=device)
        rows = (rows[:, None] * size + here).flatten()
    return rows


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def _is_norm(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 and name.endswith(("norm.weight", "norm1.weight", "norm2.weight"))


def _config(text: str) -> dict[str, Any]:
    if text in card_names():
        if text not in CARD_SHAPES:
            raise ConfigError(
                f"{SCHEME}{text}: the card has the shape of the cache only; use a config.json, "
                f"or one of {', '.join(sorted(CARD_SHAPES))}"
            )
        card = json.loads(
            (resources.files("baton.plan.models") / "cards" / f"{text}.json").read_text("utf-8")
        )
        return {**card, **CARD_SHAPES[text]}
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"{SCHEME}{text}: is neither a built-in card ({', '.join(sorted(CARD_SHAPES))}) "
            "nor a config.json or a folder with one"
        )
    return read_object(path)


def _shapes(config: Mapping[str, Any], where: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model that the config describes; a tied head is no tensor of its own."""
    transformers: Any = importlib.import_module("transformers")
    stated = {key: value for key, value in config.items() if key not in ("quantization_config", "baton")}
    model_type = stated.pop("model_type", None)
    try:
        filled = transformers.AutoConfig.for_model(model_type, **stated)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(filled)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as cause:
        reason = str(cause).strip().splitlines() or [type(cause).__name__]
        raise ConfigError(f"{where}: its config makes no model ({reason[0]}); check it") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if tensor.dim() > 0}
    if filled.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    return shapes


# What built-in cards leave out of a model's config, since a cache does not depend on it.


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
