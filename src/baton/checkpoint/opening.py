"""From the name of a model to its checkpoint."""

from __future__ import annotations

from pathlib import Path

from baton.checkpoint.base import CONFIG, Checkpoint
from baton.checkpoint.demo import fetch_demo
from baton.checkpoint.dummy import DummyWeights
from baton.checkpoint.gguf import SUFFIX, GgufFile
from baton.checkpoint.names import DEMO, DUMMY, MODEL_FORMS, check_model, find_model
from baton.checkpoint.safetensors import SafetensorsFolder
from baton.errors import ConfigError

_FORMER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(model: str) -> Checkpoint:
    """The checkpoint that `model` names; ConfigError in one line where there is none that can be run."""
    if model == DEMO:
        return GgufFile.open(fetch_demo())
    if model.startswith(DUMMY):
        return DummyWeights.open(model.removeprefix(DUMMY))
    check_model(model)
    path = find_model(model)
    assert path is not None  # as check_model has found
    return _open_folder(path) if path.is_dir() else _open_file(path)


def _open_folder(folder: Path) -> Checkpoint:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    packed = [file for file in files if file.suffix == SUFFIX]
    has_safetensors = any(file.suffix == ".safetensors" for file in files)
    if packed and not has_safetensors:
        if len(packed) > 1:
            raise ConfigError(
                f"folder {folder} has {len(packed)} {SUFFIX} files ({packed[0].name}, {packed[1].name}...); "
                "name one of them"
            )
        return GgufFile.open(packed[0])
    former = [file.name for file in files if file.suffix in _FORMER_WEIGHTS]
    if (folder / CONFIG).is_file() and former and not has_safetensors:
        raise ConfigError(
            f"folder {folder} has its weights in {former[0]}, which cannot be read; "
            "fetch or save them as safetensors"
        )
    return SafetensorsFolder.open(folder)


def _open_file(path: Path) -> Checkpoint:
    if path.suffix == SUFFIX:
        return GgufFile.open(path)
    if path.suffix == ".safetensors" or path.name == CONFIG:
        raise ConfigError(f"{path} is one file of a checkpoint; name its folder, {path.parent}")
    raise ConfigError(f"{path} is no checkpoint; {MODEL_FORMS}")
