"""The header of a GGUF file: its metadata, and where its tensors lie.

Written out here because every rank opens the file: the package's own reader takes seconds for the hundred
thousand strings of a vocabulary. Little-endian, version 2 and 3:

    "GGUF", version u32, number of tensors u64, number of keys u64
    keys:     key string, type u32, value     (string: length u64, bytes; array: type u32, length u64, values)
    tensors:  name string, number of dims u32, dims u64 (fastest first), type u32, offset u64
    padding to the alignment, then the tensors' bytes at their offsets
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

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
            raise ConfigError(f"{path}: cannot be read ({cause}); check the path and its rights") from None
        try:
            return cls(path, memory, *_parsed(_Cursor(memory)))
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as cause:
            raise ConfigError(
                f"{path}: is not a GGUF file of version 2 or 3 that is whole ({cause}); fetch it again"
            ) from None


class _Cursor:
    """A place in the file that moves on with what is read."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.at = 0

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = struct.Struct(f"<{count}{code}")
        found = layout.unpack_from(self.memory, self.at)
        self.at += layout.size
        return found

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


def _parsed(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, Listed]]:
    if cursor.memory[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    (version,) = cursor.numbers("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}")
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
        name: Listed(found.kind, found.shape, begin + found.start) for name, found in listed.items()
    }
