"""What a row may see, as numbers added to its scores; made once per pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Band:
    """Rows that see keys: row i sits `offset` + i keys after the first and looks back `window` keys."""

    num_rows: int
    num_keys: int
    offset: int
    window: int | None


class Masks:
    """Bands by their shape: alike blocks of a long prompt share one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bands: dict[tuple[Band, torch.dtype], Tensor] = {}

    def band(self, band: Band, dtype: torch.dtype) -> Tensor:
        """(rows, keys): zero where a row sees a key, minus infinity elsewhere."""
        key = (band, dtype)
        if key not in self._bands:
            self._bands[key] = self._make(band, dtype)
        return self._bands[key]

    def _make(self, band: Band, dtype: torch.dtype) -> Tensor:
        rows = torch.arange(band.offset, band.offset + band.num_rows, device=self._device)
        keys = torch.arange(band.num_keys, device=self._device)
        return seen(rows, keys, band.window, dtype)


def seen(rows: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """(rows, keys): zero where the row at a position sees the key at another, minus infinity elsewhere."""
    distance = rows[:, None] - keys[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, dtype=dtype, device=rows.device).masked_fill_(hidden, float("-inf"))
