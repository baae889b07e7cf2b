"""The header of a GGUF file: its metadata, its list of tensors, and its model's config.json.

Nothing here imports torch. The format is written out because every rank opens the file: the package's own
reader takes seconds for the hundred thousand strings of a vocabulary. Little-endian, version 2 and 3:

    "GGUF", version u32, number of tensors u64, number of keys u64
    keys:     key string, type u32, value  (string: length u64, bytes; array: type u32, length u64, value
    tensors:  name string, number of dims u32, dims u64 (fastest first), type u32, offset u64
    padding to the alignment, then the tensors' bytes at their offsets
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

SUFFIX = ".gguf"

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_ALIGNMENT_DEFAULT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9
_DIMS_MAX = 4


@dataclass(frozen=True, slots=True)
class Listed:
    """One tensor as the header lists it: shape slowest dim first, and its first byte in the file."""

    kind: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A mapped file with what its header says."""

    path: Path
    memory: mmap.mmap = field(repr=False)
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, Listed] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufHeader:
        """Maps the file and reads its header."""
        try:
            with path.open("rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as cause:
            raise ConfigError(
                f"{path}: cannot be read ({cause}); check the path and its permissions"
            ) from None
        try:
            return cls(path, memory, *_parsed(_Cursor(memory), str(path)))
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as cause:
            raise ConfigError(
                f"{path}: is not a GGUF file, or is incomplete ({cause}); fetch it again"
            ) from None


class _Cursor:
    """A place in the file that moves on with what is read."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.at = 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        values = layout.unpack_from(self.memory, self.at)
        self.at += layout.size
        return values

    def string(self) -> str:
        (num_bytes,) = struct.unpack_from("<Q", self.memory, self.at)
        start = self.at + 8
        self.at = start + num_bytes
        if self.at > len(self.memory):
            raise ValueError("a string goes past its end")
        # A vocabulary may hold bytes that are no text of their own; the tokenizer never meets them.
        return self.memory[start : self.at].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.numbers(_SCALARS[kind])[0]
        (inner,) = self.numbers("I")
        (count,) = self.numbers("Q")
        if count > len(self.memory):
            raise ValueError("an array goes past its end")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count))
        return [self.value(inner) for _ in range(count)]


def _parsed(cursor: _Cursor, where: str) -> tuple[dict[str, Any], dict[str, Listed]]:
    if cursor.memory[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version not in _VERSIONS:
        raise ConfigError(
            f"{where}: GGUF version {version} is not supported; convert the model to version 2 or 3"
        )
    num_tensors, num_keys = cursor.numbers("Q", 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.numbers("I")[0])
    listed: dict[str, Listed] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        (num_dims,) = cursor.numbers("I")
        if not 0 < num_dims <= _DIMS_MAX:
            raise ValueError(f"tensor {name} has {num_dims} dims")
        dims = cursor.numbers("Q", num_dims)
        (kind,) = cursor.numbers("I")
        (offset,) = cursor.numbers("Q")
        listed[name] = Listed(kind, tuple(reversed(dims)), offset)
    alignment = metadata.get(_ALIGNMENT, _ALIGNMENT_DEFAULT)
    begin = -(-cursor.at // alignment) * alignment
    return metadata, {
        name: Listed(entry.kind, entry.shape, begin + entry.start) for name, entry in listed.items()
    }


# From the metadata of a GGUF file to a Hugging Face config, and from its tensors' names to theirs.


EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

_FIXED = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    OUTPUT: "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Llama 3 scales its frequencies by a rule with these numbers; the file has only what the rule gave.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
_FACTOR_TOLERANCE = 1e-3


ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""That are read; Hugging Face has the same names for them."""


def architecture(metadata: Mapping[str, Any], where: str) -> str:
    """The file's architecture, if it is one of those that are read."""
    name: str | None = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: GGUF architecture {name!r} is not supported; use one of {', '.join(ARCHITECTURES)}, "
            "or the model's safetensors"
        )
    return name


def hub_name(name: str, where: str) -> str:
    """What Hugging Face calls a tensor of the file."""
    if name in _FIXED:
        return _FIXED[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        raise ConfigError(
            f"{where}: tensor {name} has no place in the models that are read from GGUF; "
            "use the model's safetensors"
        )
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


@dataclass(frozen=True, slots=True)
class _Keys:
    """Metadata of one architecture."""

    metadata: Mapping[str, Any]
    prefix: str
    where: str

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.where}: has no {self.prefix}.{key}; convert the model again")
        return value

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.prefix}.{key}")


def hub_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: str
) -> dict[str, Any]:
    """The config.json that the file's model would have; shapes by the file's own names."""
    named = architecture(metadata, where)
    keys = _Keys(metadata, named, where)
    num_heads = keys["attention.head_count"]
    hidden_size = keys["embedding_length"]
    head_dim = keys.get("attention.key_length") or hidden_size // num_heads
    rotary_dim = keys.get("rope.dimension_count") or head_dim
    if rotary_dim != head_dim:
        raise ConfigError(
            f"{where}: rotates {rotary_dim} of {head_dim} channels of a head, which is not supported; "
            "use the model's safetensors"
        )
    if EMBEDDING not in shapes:
        raise ConfigError(
            f"{where}: has no tensor {EMBEDDING}; it is a part of a split file: merge the parts"
        )
    return {
        "architectures": [f"{named.capitalize()}ForCausalLM"],
        "model_type": named,
        "hidden_size": hidden_size,
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.get("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
        "rope_theta": keys.get("rope.freq_base") or 10000.0,
        "rope_scaling": _rope_scaling(keys),
        "max_position_embeddings": keys["context_length"],
        "vocab_size": shapes[EMBEDDING][0],
        "tie_word_embeddings": OUTPUT not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_up.bias" in shapes,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def _rope_scaling(keys: _Keys) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(
            f"{keys.where}: rope scaling {kind!r} is not supported; use the model's safetensors"
        )
    scaling = {"rope_type": kind, "factor": keys["rope.scaling.factor"]}
    original = keys.get("rope.scaling.original_context_length")
    return scaling | ({"original_max_position_embeddings": original} if original else {})


def llama3_scaling(factors: Sequence[float], theta: float, where: str) -> dict[str, Any]:
    """The rule that gave these factors; refused where it was another one."""
    # The file has float32, and what was stated was a round number.
    factor = round(max(factors), 4)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    expected = [_llama3_factor(i / len(factors), theta, factor) for i in range(len(factors))]
    if any(abs(a - b) > _FACTOR_TOLERANCE * b for a, b in zip(factors, expected, strict=True)):
        raise ConfigError(
            f"{where}: {ROPE_FACTORS} does not follow the rule of Llama 3; use the model's safetensors"
        )
    return scaling


def _llama3_factor(exponent: float, theta: float, factor: float) -> float:
    """By how much the wave at `exponent` (0 to 1) of theta is slowed down."""
    turns = _LLAMA3_CONTEXT / (2 * math.pi * math.pow(theta, exponent))
    if turns < _LLAMA3_LOW:
        return factor
    if turns > _LLAMA3_HIGH:
        return 1.0
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1 / ((1 - smooth) / factor + smooth)
