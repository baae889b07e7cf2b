"""Room for what a layer reads out of the pools, used again by every layer and step.

Fresh memory would be touched for the first time at every layer, which costs more than the reading itself.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """A buffer by name that grows; what was read under a name before is overwritten."""

    def __init__(self) -> None:
        self._rooms: dict[str, Tensor] = {}

    def read(self, name: str, pool: Tensor, slots: Tensor) -> Tensor:
        """The pool's rows at `slots`."""
        count = slots.numel() * pool.shape[-1]
        room = self._rooms.get(name)
        if room is None or room.numel() < count or room.dtype != pool.dtype:
            # Half as much again: contexts grow by a token per step.
            room = torch.empty(count + count // 2, dtype=pool.dtype, device=pool.device)
            self._rooms[name] = room
        out = room[:count].view(-1, pool.shape[-1])
        return torch.index_select(pool, 0, slots, out=out)
