"""Folders with a config.json and safetensors files, one or sharded.

fp8 weights (e4m3) in blocks are dequantised as they are read: a tensor `X` is multiplied with `X_scale_inv`,
which has one scale for each block of the last two dims. Blocks begin at the tensor's first row and column;
the last ones may be cut short. Which tensors are quantised is seen from their stored dtype.

Of a multimodal checkpoint this is the language model: the config is its text part, and tensors have the names
that they have in a checkpoint of the language model alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.checkpoint.base import Checkpoint, TensorInfo, sample_ranges
from baton.checkpoint.configs import CONFIG, read_folder_config, read_generation_config
from baton.checkpoint.names import read_object
from baton.errors import ConfigError
from baton.plan.ranges import Range

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"

_FP8 = "F8_E4M3"
# What `read` gives; fp8 is multiplied with its scales in float32.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, _FP8: torch.float32}
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, _FP8: 1}
_NARROW = ("F8", "F6", "F4", "U8", "I8")
_SCALES = "_scale_inv"
_LANGUAGE_MODEL = "language_model."
_REMEDY = "use a checkpoint in bf16, fp16, fp32 or fp8 with block scales (weight_block_size), or a GGUF file"
_HEADER_BYTES_MAX = 100 << 20
_LISTED_MAX = 8


@dataclass(frozen=True, slots=True)
class StoredTensor(TensorInfo):
    """Where one tensor lies: its file and name there, its type there, and its first byte in the file."""

    file: Path
    name: str
    kind: str
    start: int

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * _ITEM_BYTES[self.kind]


@dataclass(frozen=True, slots=True)
class SafetensorsFolder(Checkpoint):
    """A checkpoint as the Hugging Face Hub has them."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor] = field(repr=False)
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale in fp8 weights."""

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFolder:
        """Reads the config and the headers of the weights, and checks that all files are there and whole."""
        config = read_folder_config(folder)
        block = _block_size(config, f"{folder / CONFIG}")
        tensors: dict[str, StoredTensor] = {}
        for file in _files(folder):
            tensors |= _header(file)
        tensors = {name.replace(_LANGUAGE_MODEL, "", 1): stored for name, stored in tensors.items()}
        for name, stored in tensors.items():
            if stored.kind == _FP8:
                _check_scales(name, tensors, block)
        return cls(folder, config, read_generation_config(folder), tensors, block)

    def read_ranges(self, name: str, ranges: Sequence[Range], device: torch.device | None) -> torch.Tensor:
        cut = tuple(slice(start, stop) for start, stop in ranges)
        stored = self.tensors[name]
        with safe_open(stored.file, framework="pt", device="cpu") as file:
            raw: torch.Tensor = file.get_slice(stored.name)[cut] if cut else file.get_tensor(stored.name)
            # The copy is made while the file is mapped; without one the weights would stay pages of the file.
            values = raw.to(device=device, dtype=stored.dtype, copy=True).contiguous()
        return values.mul_(self._scales(name, ranges).to(device)) if stored.kind == _FP8 else values

    def _scales(self, name: str, ranges: Sequence[Range]) -> torch.Tensor:
        """The scale of every element of a slice, which may begin and end inside a block."""
        assert self.block is not None
        *leading, rows, columns = ranges
        blocks = [
            (start // size, -(-stop // size))
            for (start, stop), size in zip((rows, columns), self.block, strict=True)
        ]
        scales = self.read_ranges(name + _SCALES, (*leading, *blocks), None).to(torch.float32)
        for dim, (start, stop), size in zip((-2, -1), (rows, columns), self.block, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, start % size, stop - start)
        return scales

    def sample(self, name: str, *, is_read: bool) -> tuple[str, bytes]:
        stored = self.tensors[name]
        parts = []
        with stored.file.open("rb", buffering=0) as file:
            for start, stop in sample_ranges(stored.num_bytes) if is_read else ():
                file.seek(stored.start + start)
                parts.append(file.read(stop - start))
        return stored.kind, b"".join(parts)


def _files(folder: Path) -> list[Path]:
    """The weight files of a folder, as its index lists them where it has one."""
    if (folder / INDEX).is_file():
        return _shards(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    files = sorted(file for file in folder.iterdir() if file.suffix == SUFFIX)
    if len(files) > 1:
        raise ConfigError(
            f"folder {folder} has {len(files)} {SUFFIX} files and no {INDEX} that names them; "
            "fetch the index too"
        )
    if not files:
        raise ConfigError(
            f"folder {folder} has a {CONFIG} and no {SUFFIX} file; fetch the weights as safetensors "
            f"(for shapes alone, use dummy:{folder})"
        )
    return files


def _shards(folder: Path) -> list[Path]:
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{folder / INDEX}: has no weight_map from tensors to files; fetch the file again")
    files = sorted(set(weight_map.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - _LISTED_MAX} more" if len(missing) > _LISTED_MAX else ""
        raise ConfigError(
            f"folder {folder} lacks {len(missing)} of the {len(files)} files that {INDEX} names: "
            f"{', '.join(missing[:_LISTED_MAX])}{more}; fetch them"
        )
    return [folder / name for name in files]


def _header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one file; a file that is cut short is refused here and not at the first read."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        num_bytes = int.from_bytes(opened.read(8), "little")
        if not 0 < num_bytes <= min(_HEADER_BYTES_MAX, size - 8):
            raise _broken(file, f"a header of {num_bytes} bytes in a file of {size}")
        try:
            entries: dict[str, Any] = json.loads(opened.read(num_bytes))
            return _entries(file, entries, 8 + num_bytes, size)
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise _broken(file, f"a header that cannot be read, {str(cause)!a}") from None


def _entries(file: Path, entries: dict[str, Any], start: int, size: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if start + last > size:
            raise _broken(file, f"{size} bytes where {name} ends at byte {start + last}")
        kind = entry["dtype"]
        if kind in _DTYPES:
            tensors[name] = StoredTensor(
                tuple(entry["shape"]), _DTYPES[kind], file, name, kind, start + first
            )
        elif kind.startswith(_NARROW):
            raise ConfigError(f"{file}: tensor {name} is {kind}, which is not supported; {_REMEDY}")
    return tensors


def _block_size(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Rows and columns of a block of fp8 weights, None without fp8; other quantisations are refused."""
    stated = config.get("quantization_config")
    if not stated:
        return None
    fields = stated if isinstance(stated, Mapping) else {"quant_method": stated}
    match fields.get("quant_method"), fields.get("weight_block_size"):
        case "fp8", [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case method, block:
            raise ConfigError(
                f"{where}: the weights are quantised ({method}, weight_block_size {block}), "
                f"which is not supported; {_REMEDY}"
            )


def _check_scales(name: str, tensors: Mapping[str, StoredTensor], block: tuple[int, int] | None) -> None:
    """Raises ConfigError where an fp8 tensor has no scale for each of its blocks."""
    stored, scales = tensors[name], tensors.get(name + _SCALES)
    if block is None or len(stored.shape) < 2:
        raise ConfigError(
            f"{stored.file}: tensor {name} is {stored.kind} {stored.shape} without block scales; {_REMEDY}"
        )
    *leading, rows, columns = stored.shape
    wanted = (*leading, -(-rows // block[0]), -(-columns // block[1]))
    if scales is None or scales.shape != wanted or scales.kind == _FP8:
        state = f"is {scales.kind} {scales.shape}" if scales else "is missing"
        raise ConfigError(
            f"{stored.file}: {name}{_SCALES} {state}, {wanted} is expected for blocks of {block}; "
            "the files are incomplete or belong to another config: fetch the checkpoint again"
        )


def _broken(file: Path, fault: str) -> ConfigError:
    return ConfigError(f"{file}: is not a whole safetensors file (it has {fault}); fetch it again")
