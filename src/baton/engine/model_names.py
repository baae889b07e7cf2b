"""What `--model` may be. Nothing here imports torch, so that a wrong path is refused within a moment."""

from __future__ import annotations

import json
import os.path
from contextlib import suppress
from pathlib import Path

from baton.errors import ConfigError
from baton.plan.models import card_names
from baton.plan.models.fields import shown

DEMO, DUMMY = "demo", "dummy:"
MODEL_FORMS = (
    f"use a folder with config.json and safetensors, a .gguf file, '{DEMO}', "
    f"or {DUMMY}CARD for random weights, as in {DUMMY}llama-3-8b"
)

TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float": "fp32", "half": "fp16"}
"""What other engines and checkpoints call them, and our names."""


def find_dtype(model: str) -> str:
    """The dtype that a checkpoint's config.json states; fp32 where it states none, and for GGUF files."""
    path = os.path.expanduser(model.removeprefix(DUMMY))
    file = path if path.endswith(".json") else os.path.join(path, "config.json")
    config: object = None
    with suppress(OSError, ValueError):  # refused later, where the checkpoint is opened
        config = json.loads(Path(file).read_bytes())
    parts = [config, config.get("text_config")] if isinstance(config, dict) else []
    for part in parts:
        if not isinstance(part, dict):
            continue
        stated = str(part.get("dtype") or part.get("torch_dtype") or "").removeprefix("torch.")
        if stated in TORCH_DTYPES:
            return TORCH_DTYPES[stated]
    return "fp32"


def check_model(model: str) -> None:
    """Raises ConfigError if there is nothing by this name."""
    path = os.path.expanduser(model)
    # os.path answers no where a path is malformed.
    if model == DEMO or model.startswith(DUMMY) or os.path.isdir(path) or os.path.isfile(path):
        return
    if model in card_names():
        raise ConfigError(
            f"{model} is a card without weights; name a folder that has them, "
            f"or {DUMMY}{model} for random ones"
        )
    raise ConfigError(f"there is no model {shown(model)} here, neither a folder nor a file; {MODEL_FORMS}")
