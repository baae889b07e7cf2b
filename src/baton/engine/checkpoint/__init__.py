"""Checkpoints: a model's config and weights by the name that a user gives.

MODEL is a folder with config.json and safetensors, a GGUF file or a folder with one, `demo`, or
`dummy:CARD_OR_CONFIG` for random weights.
"""

from __future__ import annotations

from baton.engine.checkpoint.opening import open_checkpoint
from baton.engine.checkpoint.seam import Checkpoint, Index
from baton.engine.checkpoint.sizes import num_parameters, weight_bytes

__all__ = ["Checkpoint", "Index", "num_parameters", "open_checkpoint", "weight_bytes"]
