"""What `--model` may be. Nothing here imports torch, so that a wrong path is refused within a moment."""

from __future__ import annotations

import json
import os.path
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from baton.errors import ConfigError
from baton.plan.models import card_names
from baton.plan.models.fields import shown

DEMO, DUMMY = "demo", "dummy:"
MODEL_FORMS = (
    "use a folder with config.json and safetensors, a .gguf file, the id of a model in the Hugging Face "
    f"cache, '{DEMO}', or {DUMMY}CARD for random weights, as in {DUMMY}llama-3-8b"
)
GENERATION = "generation_config.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

DTYPES = ("fp32", "bf16", "fp16")
"""That the engine computes in."""
TORCH_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float": "fp32", "half": "fp16"}
"""What other engines and checkpoints call them, and our names."""
KV_DTYPES = (*DTYPES, "fp8")
"""That the KV cache is stored in; fp8 is e4m3 with a scale of 1."""


def find_model(model: str) -> Path | None:
    """The folder or file of a path, or of an `org/name` that `hf download` has fetched; None without one."""
    path = os.path.expanduser(model)
    if os.path.isdir(path) or os.path.isfile(path):  # they answer no where a path is malformed
        return Path(path)
    if not _HUB_ID.fullmatch(model):
        return None
    from huggingface_hub.constants import HF_HUB_CACHE

    # The cache's documented layout: the library's own functions take a quarter of a second to import.
    folder = Path(HF_HUB_CACHE, f"models--{model.replace('/', '--')}")
    with suppress(OSError):
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text().strip()
        return snapshot if snapshot.is_dir() else None
    return None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file that must exist."""
    try:
        fields = json.loads(path.read_text("utf-8"))
    except OSError as cause:
        raise ConfigError(
            f"{path}: cannot be read ({cause.strerror}); check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as cause:
        raise ConfigError(f"{path}: is not JSON ({str(cause)!a}); fetch the file again") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path}: holds a {type(fields).__name__}, not an object; fetch the file again")
    return fields


def find_dtype(model: str) -> str:
    """The dtype that a checkpoint's config.json states; fp32 where it states none, and for GGUF files."""
    path = str(find_model(model) or os.path.expanduser(model.removeprefix(DUMMY)))
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


def check_dtype(dtype: str) -> None:
    """Raises ConfigError on a dtype that the engine does not compute in."""
    if dtype != "auto" and TORCH_DTYPES.get(dtype, dtype) not in DTYPES:
        names = "auto, bfloat16 (bf16), float16 (fp16) or float32 (fp32)"
        raise ConfigError(f"dtype {dtype!r} is not supported; use {names}")


def check_model(model: str) -> None:
    """Raises ConfigError if there is nothing by this name."""
    if model == DEMO or model.startswith(DUMMY) or find_model(model) is not None:
        return
    if model in card_names():
        raise ConfigError(
            f"{model} is a card without weights; name a folder that has them, "
            f"or {DUMMY}{model} for random ones"
        )
    remedy = f"if it is on the Hugging Face Hub, fetch it with `hf download {model}`; else "
    raise ConfigError(
        f"there is no model {shown(model)} here, neither a folder nor a file; "
        f"{remedy if _HUB_ID.fullmatch(model) else ''}{MODEL_FORMS}"
    )
