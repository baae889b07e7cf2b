"""Checkpoints: a model's config and weights by the name that a user gives.

MODEL is a folder with config.json and safetensors, a GGUF file or a folder with one, `demo`, or
`dummy:CARD_OR_CONFIG` for random weights.
"""

from __future__ import annotations

from baton.engine.checkpoint.base import Checkpoint, Index
from baton.engine.checkpoint.opening import open_checkpoint

__all__ = ["Checkpoint", "Index", "open_checkpoint"]
