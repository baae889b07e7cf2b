"""That reading a slice is slicing the whole, for any checkpoint, and how large one is."""

import math

import torch

from baton.checkpoint.base import Checkpoint

PARTS = (slice(None), slice(0, 1), slice(3, 11), slice(5, None), slice(2, 2))


def check_slices(checkpoint: Checkpoint, names: list[str]) -> None:
    """Rows, columns and both, also nothing at all; each is its own memory and no larger than it looks."""
    for name in names:
        whole = checkpoint.read(name)
        assert whole.shape == checkpoint.shape(name)
        assert whole.dtype == checkpoint.dtype(name)
        indices = [(part,) for part in PARTS]
        if whole.dim() > 1:
            indices += [(rows, columns) for rows in PARTS for columns in PARTS]
        for index in indices:
            part = checkpoint.read(name, index)
            assert torch.equal(part, whole[index]), (name, index)
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.numel() * part.itemsize
        cast = checkpoint.read(name, (PARTS[2],), dtype=torch.float16, device=torch.device("cpu"))
        assert torch.equal(cast, whole[PARTS[2]].to(torch.float16))


def num_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors; a tied head counts once."""
    return sum(math.prod(checkpoint.shape(name) or (0,)) for name in checkpoint.names())


def weight_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of the tensors as `read` gives them."""
    dtypes = {name: checkpoint.dtype(name) for name in checkpoint.names()}
    return sum(math.prod(checkpoint.shape(name)) * dtype.itemsize for name, dtype in dtypes.items())
