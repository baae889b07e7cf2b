"""From the name of a model to its checkpoint."""

from __future__ import annotations

from baton.checkpoint.base import Checkpoint
from baton.checkpoint.configs import find_checkpoint
from baton.checkpoint.demo import fetch_demo
from baton.checkpoint.dummy import DummyWeights
from baton.checkpoint.gguf import GgufFile
from baton.checkpoint.names import DEMO, DUMMY
from baton.checkpoint.safetensors import SafetensorsFolder


def open_checkpoint(model: str) -> Checkpoint:
    """The checkpoint that `model` names; ConfigError in one line where there is none that can be run."""
    if model.startswith(DUMMY):
        return DummyWeights.open(model.removeprefix(DUMMY))
    path = fetch_demo() if model == DEMO else find_checkpoint(model)
    return SafetensorsFolder.open(path) if path.is_dir() else GgufFile.open(path)
