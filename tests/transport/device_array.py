"""Bytes on a GPU that a check can use like a numpy array; every access copies to or from the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

OFFSET = 4096 + 16
"""Of each array in its tensor: a pool is rarely at the start of an allocation."""


class DeviceArray:
    def __init__(self, content: np.ndarray) -> None:
        flat = content.reshape(-1).view(np.uint8)
        whole = torch.zeros(OFFSET + len(flat) + 999, dtype=torch.uint8, device="cuda")
        self.tensor = whole[OFFSET : OFFSET + len(flat)]
        self[:] = flat

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.tensor.cpu().numpy()

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, index: slice) -> np.ndarray:
        return self.tensor[index].cpu().numpy()

    def __setitem__(self, index: slice, value: Any) -> None:
        self.tensor[index] = torch.as_tensor(np.asarray(value, dtype=np.uint8)).cuda()
        torch.cuda.current_stream().synchronize()

    def __rsub__(self, value: int) -> np.ndarray:
        return value - np.asarray(self)
