"""What `--model` may be. Nothing here imports torch, so that a wrong path is refused within a moment."""

from __future__ import annotations

import os.path

from baton.errors import ConfigError
from baton.plan.models import card_names
from baton.plan.models.fields import shown

DEMO, DUMMY = "demo", "dummy:"
MODEL_FORMS = (
    f"use a folder with config.json and safetensors, a .gguf file, '{DEMO}', "
    f"or {DUMMY}CARD for random weights, as in {DUMMY}llama-3-8b"
)


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
