"""How large a checkpoint is, from names and shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from baton.engine.checkpoint.seam import Checkpoint


def num_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors; a tied head counts once."""
    return sum(math.prod(checkpoint.shape(name) or (0,)) for name in checkpoint.names())


def weight_bytes(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    is_counted: Callable[[str], bool] = lambda name: True,
) -> int:
    """Bytes of the tensors in memory as `dtype`, or as `read` gives them; some tensors only, if asked."""
    total = 0
    for name in checkpoint.names():
        each = dtype or checkpoint.dtype(name)
        if each is not None and is_counted(name):
            total += math.prod(checkpoint.shape(name) or (0,)) * each.itemsize
    return total
