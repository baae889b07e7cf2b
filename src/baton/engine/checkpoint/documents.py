"""JSON files of a checkpoint, read with one clear line for each way in which they can be wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.errors import ConfigError

CONFIG = "config.json"
GENERATION = "generation_config.json"

_PLAIN_QUANTISATION: tuple[object, ...] = (None, {})


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that must exist."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as cause:
        raise ConfigError(
            f"{path}: cannot be read ({cause.strerror}); check the path and its rights"
        ) from None
    except (ValueError, RecursionError) as cause:
        raise ConfigError(f"{path}: is not JSON ({str(cause)!a}); fetch the file again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds a {type(found).__name__}, not an object; fetch the file again")
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The config of a folder, of weights that are not quantised."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"folder {folder} has no {CONFIG}; name the folder that holds it beside the weights, "
            "as a download from the Hugging Face Hub has them"
        )
    config = read_object(path)
    refuse_quantised(config, str(path))
    return config


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The defaults for generating, empty where the folder has none."""
    path = folder / GENERATION
    return read_object(path) if path.is_file() else {}


def refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    """Weights with scales beside them are no plain numbers, so they are not read as such."""
    quantisation = config.get("quantization_config")
    if quantisation in _PLAIN_QUANTISATION:
        return
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
    raise ConfigError(
        f"{where}: the weights are quantised ({method}), which is not supported; "
        "use a checkpoint in bf16, fp16 or fp32, or a GGUF file"
    )
