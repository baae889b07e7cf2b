"""What a checkpoint promises, whatever it is stored as: a config, and named tensors, read in slices."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from baton.errors import ConfigError
from baton.plan.ranges import Range

Index: TypeAlias = tuple[slice, ...]
"""One slice per dim, of step 1; dims after the last slice are whole."""

_SAMPLED_TENSORS_MAX = 512
_SAMPLE_BYTES = 64
# What a config says about the program that wrote it, or about where it lay.
_CONFIG_NOISE = frozenset({"_name_or_path", "transformers_version", "_attn_implementation", "baton"})


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's metadata, known before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    """That `read` gives unless told."""


class Checkpoint(ABC):
    """A model's config and weights; tensors carry the names that Hugging Face gives them."""

    path: Path | None
    """The folder or file that it lies in; None where nothing lies anywhere."""
    config: Mapping[str, Any]
    """What config.json says, or would say."""
    generation_config: Mapping[str, Any]
    """What generation_config.json says; empty without one."""
    tensors: Mapping[str, TensorInfo]
    """By name, in the order of storage."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"checkpoint {self.path}"

    def names(self) -> Iterable[str]:
        """Every tensor, in the order of storage."""
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape, or None where there is no such tensor."""
        stored = self.tensors.get(name)
        return stored.shape if stored else None

    def dtype(self, name: str) -> torch.dtype | None:
        """The type that `read` gives unless told, or None where there is no such tensor."""
        stored = self.tensors.get(name)
        return stored.dtype if stored else None

    def read(
        self,
        name: str,
        index: Index = (),
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A slice of a tensor, contiguous and the caller's own; nothing else is read."""
        shape = self.shape(name)
        if shape is None:
            raise ConfigError(
                f"{self.title} has no tensor {name}, which its config asks for; "
                "the files are incomplete or belong to another config: fetch the checkpoint again"
            )
        return self.read_ranges(name, bounds(shape, index, name), device).to(dtype)

    @abstractmethod
    def read_ranges(self, name: str, ranges: Sequence[Range], device: torch.device | None) -> torch.Tensor:
        """The same of a tensor that is there, by the half-open range of each dim."""

    def fingerprint(self) -> str:
        """Hex, equal for equal configs and weights, wherever they lie and however the files are cut."""
        stated = {key: value for key, value in self.config.items() if key not in _CONFIG_NOISE}
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True, default=str).encode())
        ordered = sorted(self.names())
        # The content of some tensors counts: evenly spread where there are very many.
        looked_at = set(ordered[:: -(-len(ordered) // _SAMPLED_TENSORS_MAX) or 1])
        for name in ordered:
            kind, sample = self.sample(name, is_read=name in looked_at)
            digest.update(repr((name, kind, tuple(self.shape(name) or ()), sample)).encode())
        return digest.hexdigest()

    @abstractmethod
    def sample(self, name: str, *, is_read: bool) -> tuple[str, bytes]:
        """The stored type of a tensor, and some bytes of it if they are to be read."""


def bounds(shape: Sequence[int], index: Index, name: str) -> tuple[Range, ...]:
    """The half-open range of each dim that `index` asks for."""
    assert len(index) <= len(shape), f"{name} has {len(shape)} dims, {len(index)} slices were asked for"
    whole = (slice(None),) * (len(shape) - len(index))
    ranges = [cut.indices(size) for cut, size in zip(index + whole, shape, strict=True)]
    assert all(step == 1 for _, _, step in ranges), f"{name}: slices have step 1, not {index}"
    return tuple((start, max(start, stop)) for start, stop, _ in ranges)


def sample_ranges(num_bytes: int) -> list[Range]:
    """Where a tensor of so many bytes is looked at: its beginning, its middle and its end."""
    starts = {0, num_bytes // 2, max(0, num_bytes - _SAMPLE_BYTES)}
    return [(start, min(num_bytes, start + _SAMPLE_BYTES)) for start in sorted(starts)]
