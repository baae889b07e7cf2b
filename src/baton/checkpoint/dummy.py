"""Random weights of a model's shapes, made up when they are read: for benchmarks, where no file is needed.

Every row of a tensor is a window of one long table of random numbers, at a place that the tensor's name and
the row decide. So a slice has the numbers that the whole has there, on every rank, and making it is one copy.
Shapes are those of the same model in `transformers`, built without memory.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from baton.checkpoint.base import Checkpoint, TensorInfo
from baton.checkpoint.configs import read_dummy_config
from baton.checkpoint.names import DUMMY
from baton.errors import ConfigError
from baton.plan.ranges import Range

# A prime, so that rows one after the other do not come round to the same windows.
_NUM_WINDOWS = (1 << 21) - 9
_ROW_STRIDE = 1_140_671
_NORM_SPREAD = 0.1
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DummyWeights(Checkpoint):
    """A checkpoint that lies nowhere."""

    path = None
    text: str
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    num_columns_max: int
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, text: str) -> DummyWeights:
        """`text` is a built-in card, a config.json or a folder with one."""
        config = read_dummy_config(text)
        shapes = _shapes(config, f"{DUMMY}{text}")
        dtype = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.bfloat16)
        tensors = {name: TensorInfo(shape, dtype) for name, shape in shapes.items()}
        return cls(text, config, tensors, max(shape[-1] for shape in shapes.values()))

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"{DUMMY}{self.text}"

    def read_ranges(self, name: str, ranges: Sequence[Range], device: torch.device | None) -> torch.Tensor:
        info, where = self.tensors[name], device or torch.device("cpu")
        shape = info.shape
        *leading, (first, last) = ranges
        sizes = [stop - start for start, stop in (*leading, (first, last))]
        if 0 in sizes:
            return torch.empty(sizes, device=where, dtype=info.dtype)
        table = _table(_NUM_WINDOWS + self.num_columns_max, where)
        table = 1 + _NORM_SPREAD * table if _is_norm(name, shape) else table * shape[-1] ** -0.5
        starts = (_row_numbers(shape, leading, where) * _ROW_STRIDE + _seed(name)) % _NUM_WINDOWS
        return table.to(info.dtype)[first:].unfold(0, last - first, 1)[starts].reshape(sizes)

    def sample(self, name: str, *, is_read: bool) -> tuple[str, bytes]:
        return "dummy", b""


@cache
def _table(num_numbers: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_numbers, generator=generator).to(device)


def _row_numbers(shape: tuple[int, ...], leading: list[Range], device: torch.device) -> torch.Tensor:
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
