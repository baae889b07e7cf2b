"""Tiny checkpoints in block-quantised fp8, and the same with the weights that this stands for."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (20, 12)
"""Divides few sizes and few cuts, and differs by dim, so that every mistake shows."""
_QUANTISED = re.compile(r"_proj(_with_mqa|_\w)?(\.weight)?$")
_FP8_MAX = 448.0


def quantised(plain: Path, folder: Path, block: tuple[int, int] = BLOCK) -> tuple[Path, Path]:
    """An fp8 checkpoint of the model in `plain`, and one in fp32 with the dequantised weights."""
    fp8, dequantised = (
        Path(shutil.copytree(plain, folder / name, dirs_exist_ok=True)) for name in ("fp8", "fp32")
    )
    narrow: dict[str, Tensor] = {}
    wide: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.dim() < 2 or not _QUANTISED.search(name):
            narrow[name] = wide[name] = tensor
        else:
            narrow[name], narrow[f"{name}_scale_inv"], wide[name] = _quantise(tensor, block)
    save_file(narrow, fp8 / "model.safetensors")
    save_file(wide, dequantised / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }
    (fp8 / "config.json").write_text(json.dumps(config))
    return fp8, dequantised


def _quantise(tensor: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The fp8 values, their scales by block and what both mean, block by block."""
    *leading, num_rows, num_columns = tensor.shape
    firsts = [range(0, size, step) for size, step in zip((num_rows, num_columns), block, strict=True)]
    scales = torch.empty(*leading, *map(len, firsts))
    narrow = torch.empty_like(tensor, dtype=torch.float8_e4m3fn)
    wide = torch.empty_like(tensor)
    for (i, row), (j, column) in itertools.product(*map(enumerate, firsts)):
        where = (..., slice(row, row + block[0]), slice(column, column + block[1]))
        scale = tensor[where].abs().amax((-2, -1)) / _FP8_MAX
        scales[..., i, j] = scale
        narrow[where] = (tensor[where] / scale[..., None, None]).to(torch.float8_e4m3fn)
        wide[where] = narrow[where].float() * scale[..., None, None]
    return narrow, scales, wide
