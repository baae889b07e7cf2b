"""Where a checkpoint lies, and its config. Nothing here imports torch: a bad layout is refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from baton.checkpoint.demo import find_demo
from baton.checkpoint.gguf_header import SUFFIX, GgufHeader, hub_config
from baton.checkpoint.names import (
    DEMO,
    DUMMY,
    GENERATION,
    MODEL_FORMS,
    check_model,
    find_model,
    read_object,
)
from baton.errors import ConfigError
from baton.plan.models import card_names, read_card
from baton.plan.models.config import text_config

CONFIG = "config.json"
_FORMER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt")


def read_model_config(model: str) -> Mapping[str, Any] | None:
    """What config.json says, or would say, as far as layouts and contexts depend on it.

    None for the demo model before it is fetched.
    """
    if model.startswith(DUMMY):
        return read_dummy_config(model.removeprefix(DUMMY))
    path = find_demo() if model == DEMO else find_checkpoint(model)
    if path is None:
        return None
    if path.is_dir():
        return read_folder_config(path)
    stat = path.stat()
    return _read_gguf_config(path, stat.st_size, stat.st_mtime_ns)


def find_checkpoint(model: str) -> Path:
    """The GGUF file, or the folder with safetensors, of a model with files; ConfigError if there is none."""
    check_model(model)
    path = find_model(model)
    assert path is not None  # as check_model has found
    return _find_in_folder(path) if path.is_dir() else _check_file(path)


def _find_in_folder(folder: Path) -> Path:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    packed = [file for file in files if file.suffix == SUFFIX]
    has_safetensors = any(file.suffix == ".safetensors" for file in files)
    if packed and not has_safetensors:
        if len(packed) > 1:
            raise ConfigError(
                f"folder {folder} has {len(packed)} {SUFFIX} files ({packed[0].name}, {packed[1].name}...); "
                "name one of them"
            )
        return packed[0]
    former = [file.name for file in files if file.suffix in _FORMER_WEIGHTS]
    if (folder / CONFIG).is_file() and former and not has_safetensors:
        raise ConfigError(
            f"folder {folder} has its weights in {former[0]}, which cannot be read; "
            "fetch or save them as safetensors"
        )
    return folder


def _check_file(path: Path) -> Path:
    if path.suffix == SUFFIX:
        return path
    if path.suffix == ".safetensors" or path.name == CONFIG:
        raise ConfigError(f"{path} is one file of a checkpoint; name its folder, {path.parent}")
    raise ConfigError(f"{path} is no checkpoint; {MODEL_FORMS}")


def read_folder_config(folder: Path) -> Mapping[str, Any]:
    """The config of a folder's language model."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"folder {folder} has no {CONFIG}; name the folder that holds it beside the weights, "
            "as a download from the Hugging Face Hub has them"
        )
    return text_config(read_object(path), f"{path}")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The defaults for generating, empty where the folder has none."""
    path = folder / GENERATION
    return read_object(path) if path.is_file() else {}


def read_dummy_config(text: str) -> dict[str, Any]:
    """The config of a built-in card, of a config.json, or of a folder with one."""
    cards = {name: read_card(name) for name in card_names()}
    complete = [name for name, card in cards.items() if "vocab_size" in card]
    if text in complete:
        return cards[text]
    if text in cards:
        raise ConfigError(
            f"{DUMMY}{text}: the card has the shape of the cache only; use a config.json, "
            f"or one of {', '.join(complete)}"
        )
    path = Path(text).expanduser()
    if path.is_dir():
        path = path / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"{DUMMY}{text}: is neither a built-in card ({', '.join(complete)}) "
            "nor a config.json or a folder with one"
        )
    return read_object(path)


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """The config of a GGUF file, but for what only its tensors tell."""
    shapes = {name: listed.shape for name, listed in header.tensors.items()}
    return hub_config(header.metadata, shapes, str(header.path))


@lru_cache(maxsize=1)
def _read_gguf_config(path: Path, num_bytes: int, changed_ns: int) -> Mapping[str, Any]:
    """Of the file as it is: its vocabulary takes a tenth of a second, and instances of `up` share it."""
    return gguf_config(GgufHeader.open(path))
