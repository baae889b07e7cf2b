"""Folders with a config.json and safetensors files, one or sharded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from baton.engine.checkpoint.base import (
    CONFIG,
    Checkpoint,
    read_config,
    read_generation_config,
    sample_ranges,
)
from baton.engine.model_names import read_object
from baton.errors import ConfigError
from baton.plan.ranges import Range

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_NARROW = ("F8", "F6", "F4", "U8", "I8")
_HEADER_BYTES_MAX = 100 << 20
_LISTED_MAX = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: its file, its type and shape, and its first byte in the file."""

    file: Path
    kind: str
    shape: tuple[int, ...]
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

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFolder:
        """Reads the config and the headers of the weights, and checks that all files are there and whole."""
        config = read_config(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in _files(folder):
            tensors |= _header(file)
        return cls(folder, config, read_generation_config(folder), tensors)

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self.tensors.get(name)
        return found.shape if found else None

    def dtype(self, name: str) -> torch.dtype | None:
        """The type a tensor is stored in, or None."""
        found = self.tensors.get(name)
        return _DTYPES[found.kind] if found else None

    def read_ranges(
        self, name: str, ranges: Sequence[Range], device: torch.device | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        cut = tuple(slice(start, stop) for start, stop in ranges)
        with safe_open(self.tensors[name].file, framework="pt", device="cpu") as file:
            found: torch.Tensor = file.get_slice(name)[cut] if cut else file.get_tensor(name)
            # The copy is made while the file is mapped; without one the weights would stay pages of the file.
            return found.to(device=device, dtype=dtype, copy=True).contiguous()

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
    found = sorted(file for file in folder.iterdir() if file.suffix == SUFFIX)
    if len(found) > 1:
        raise ConfigError(
            f"folder {folder} has {len(found)} {SUFFIX} files and no {INDEX} that names them; "
            "fetch the index too"
        )
    if not found:
        raise ConfigError(
            f"folder {folder} has a {CONFIG} and no {SUFFIX} file; fetch the weights as safetensors "
            f"(for shapes alone, use dummy:{folder})"
        )
    return found


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
    found: dict[str, StoredTensor] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        if start + last > size:
            raise _broken(file, f"{size} bytes where {name} ends at byte {start + last}")
        kind = entry["dtype"]
        if kind.startswith(_NARROW):
            raise ConfigError(
                f"{file}: tensor {name} is {kind}, which is not supported; "
                "use a checkpoint in bf16, fp16 or fp32, or a GGUF file"
            )
        if kind in _DTYPES:
            found[name] = StoredTensor(file, kind, tuple(entry["shape"]), start + first)
    return found


def _broken(file: Path, what: str) -> ConfigError:
    return ConfigError(f"{file}: is not a whole safetensors file (it has {what}); fetch it again")
