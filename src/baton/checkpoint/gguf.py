"""GGUF files: block-quantised weights, turned back into numbers for the slice that is asked for.

A block is a stretch of one row, so rows are independent and columns are cut at the blocks around them. In
files of Llama models the rows of q and k are stored with their rotary halves interleaved: row 2i + j of a
head is row i + j * head_dim / 2 of the Hugging Face tensor.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from baton.checkpoint.base import Checkpoint, TensorInfo, sample_ranges
from baton.checkpoint.configs import gguf_config
from baton.checkpoint.gguf_header import (
    ROPE_FACTORS,
    GgufHeader,
    Listed,
    architecture,
    hub_name,
    llama3_scaling,
)
from baton.errors import ConfigError
from baton.plan.ranges import Range

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_ENDS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_TURNED_IN = "llama"
_TURNED = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")


@dataclass(frozen=True, slots=True)
class Packed(TensorInfo):
    """One tensor of the file; `block` numbers take `block_bytes`."""

    kind: int
    start: int
    block: int
    block_bytes: int
    head_dim: int | None
    """Where rows are interleaved, over how many."""

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dim."""
        return self.shape[-1] // self.block * self.block_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile(Checkpoint):
    """A checkpoint in one file."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    header: GgufHeader = field(repr=False)
    tensors: Mapping[str, Packed] = field(repr=False)

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Reads the header; what cannot be run is refused here."""
        header = GgufHeader.open(path)
        where = str(path)
        has_turned_rows = architecture(header.metadata, where) == _TURNED_IN
        config = gguf_config(header)
        tensors: dict[str, Packed] = {}
        for stored_name, listed in header.tensors.items():
            if stored_name == ROPE_FACTORS:
                continue
            name = hub_name(stored_name, where)
            is_turned = has_turned_rows and name.endswith(_TURNED)
            tensors[name] = _packed(listed, stored_name, config["head_dim"] if is_turned else None, header)
        if ROPE_FACTORS in header.tensors:
            packed = _packed(header.tensors[ROPE_FACTORS], ROPE_FACTORS, None, header)
            factors = _numbers(_raw(header, packed), packed.kind).tolist()
            config["rope_scaling"] = llama3_scaling(factors, config["rope_theta"], where)
        # The tokens that end an answer or a turn: all that the file says of generating.
        tokens = [header.metadata.get(key) for key in _ENDS]
        ends = list(dict.fromkeys(token for token in tokens if token is not None))
        return cls(path, config, {"eos_token_id": ends} if ends else {}, header, tensors)

    def read_ranges(self, name: str, ranges: Sequence[Range], device: torch.device | None) -> torch.Tensor:
        packed = self.tensors[name]
        *leading, (first, last) = ranges
        shape = (*(stop - start for start, stop in leading), last - first)
        if 0 in shape:
            return torch.empty(shape, device=device, dtype=packed.dtype)
        raw = _raw(self.header, packed)
        if packed.head_dim is None:
            raw = raw[tuple(slice(start, stop) for start, stop in leading)]
        elif leading:
            raw = raw[_stored_rows(*leading[0], packed.head_dim)]
        else:
            raw = raw.reshape(-1, packed.block_bytes)[_stored_rows(first, last, packed.head_dim)].reshape(-1)
            first, last = 0, last - first
        before = first // packed.block
        cut = raw[..., before * packed.block_bytes : -(-last // packed.block) * packed.block_bytes]
        numbers = _numbers(np.ascontiguousarray(cut), packed.kind)
        kept = numbers[..., first - before * packed.block : last - before * packed.block]
        return kept.to(device=device, copy=True).contiguous()

    def sample(self, name: str, *, is_read: bool) -> tuple[str, bytes]:
        packed = self.tensors[name]
        start, ranges = packed.start, sample_ranges(packed.num_bytes) if is_read else ()
        return str(packed.kind), b"".join(self.header.memory[start + a : start + b] for a, b in ranges)


def _packed(listed: Listed, name: str, head_dim: int | None, header: GgufHeader) -> Packed:
    block, block_bytes = _block(listed.kind, f"{header.path}: tensor {name}")
    dtype = _FLOATS.get(listed.kind, torch.float32)  # as which what is quantised is given
    packed = Packed(listed.shape, dtype, listed.kind, listed.start, block, block_bytes, head_dim)
    end = listed.start + packed.num_bytes
    if listed.shape[-1] % block or end > len(header.memory):
        raise ConfigError(
            f"{header.path}: is cut short, it has {len(header.memory)} bytes where {name} ends at {end}; "
            "fetch it again"
        )
    return packed


def _block(kind: int, where: str) -> tuple[int, int]:
    if kind in _FLOATS:
        return 1, _FLOATS[kind].itemsize
    gguf = _package(where)
    try:
        sizes: tuple[int, int] = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ConfigError(f"{where} has the unknown type {kind}; use another quantisation") from None
    return sizes


def _package(where: str) -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError:
        raise ConfigError(
            f"{where} is quantised, and the package that reads it is not installed; run: pip install gguf"
        ) from None


def _raw(header: GgufHeader, packed: Packed) -> NDArray[np.uint8]:
    """A view of the file: all dims but the last, then the bytes of a row."""
    rows = np.frombuffer(header.memory, np.uint8, packed.num_bytes, packed.start)
    return rows.reshape(*packed.shape[:-1], packed.row_bytes)


def _stored_rows(start: int, stop: int, head_dim: int) -> NDArray[np.int64]:
    """Where the file keeps rows [start, stop) of a q or k projection."""
    rows = np.arange(start, stop)
    head, channel = rows // head_dim, rows % head_dim
    half, pair = channel // (head_dim // 2), channel % (head_dim // 2)
    return head * head_dim + 2 * pair + half


def _numbers(raw: NDArray[np.uint8], kind: int) -> torch.Tensor:
    if kind in _FLOATS:
        # A copy, since the file is mapped for reading only and a tensor can be written to.
        return torch.from_numpy(raw.copy()).view(_FLOATS[kind])
    gguf = importlib.import_module("gguf")
    dequantize = importlib.import_module("gguf.quants").dequantize
    try:
        return torch.from_numpy(dequantize(raw, gguf.GGMLQuantizationType(kind)))
    except NotImplementedError as cause:
        raise ConfigError(f"{cause}; use another quantisation") from None
