"""Attention of several rows of one sequence over contiguous keys.

A first chunk sees only itself, and a chunk without a window goes to the fused causal kernel in one call. With
a window or sinks, rows are computed block by block over the keys that the block can see, so that no
mask or score grows with the square of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.attention import softmax
from baton.engine.attention.softmax import Partial
from baton.engine.models.base import HeadOptions

BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class ChunkInputs:
    """q (rows, heads, c) and the keys and values that it may see, (units, keys, c) each."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def num_rows(self) -> int:
        """Rows that attend."""
        return self.q.shape[0]

    @property
    def num_keys(self) -> int:
        """Keys, the rows' own included."""
        return self.k.shape[1]


def attend(inputs: ChunkInputs, window: int | None, options: HeadOptions, masks: Masks) -> Tensor:
    """(rows, heads, value channels); the last row sits at the last key."""
    if options.sinks is not None:
        return _spelled_out(inputs, window, options, masks)
    if window is None or inputs.num_keys <= window:
        is_first = inputs.num_rows == inputs.num_keys
        if is_first:
            return _fused(inputs, None, options.scale, is_causal=True)
        if inputs.q.is_cuda:
            bias = _lower_right(inputs.num_rows, inputs.num_keys)
            return _fused(inputs, bias, options.scale)
    parts = []
    for block, band in _blocks(inputs, window):
        parts.append(_fused(block, masks.band(band, inputs.q.dtype), options.scale))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def preload(device: torch.device) -> None:
    """Imports what chunks need on a GPU now, not during the first prompt that has two chunks."""
    if device.type == "cuda":
        _lower_right(1, 1)


def attend_chosen(inputs: ChunkInputs, bias: Tensor, scale: float) -> Tensor:
    """The same over the keys that a bias (rows, keys) does not mask."""
    parts = []
    for first in range(0, inputs.num_rows, BLOCK_ROWS):
        block = slice(first, min(first + BLOCK_ROWS, inputs.num_rows))
        parts.append(_fused(ChunkInputs(inputs.q[block], inputs.k, inputs.v), bias[block], scale))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys rows see: those at earlier positions, or those that a bias (rows, keys) does not mask."""

    rows: Tensor
    keys: Tensor
    bias: Tensor | None

    def of_rows(self, first: int, last: int, window: int | None) -> Tensor:
        """(rows, keys) to be added to scores."""
        if self.bias is not None:
            return self.bias[first:last].float()
        return seen(self.rows[first:last], self.keys, window, torch.float32)


def attend_partly(inputs: ChunkInputs, sight: Sight, options: HeadOptions) -> Partial:
    """The same over some of the keys, with their weight, for merging."""
    num_heads, num_units = inputs.q.shape[1], inputs.k.shape[0]
    step = max(1, softmax.SCORES_MAX // max(1, inputs.num_keys * num_heads))
    outs, weights = [], []
    for first in range(0, inputs.num_rows, step):
        last = min(first + step, inputs.num_rows)
        bias = sight.of_rows(first, last, options.window)
        q = _grouped(inputs.q[first:last], num_units)
        part = softmax.attend(q, inputs.k.unsqueeze(0), inputs.v.unsqueeze(0), bias.unsqueeze(0), options)
        outs.append(_by_row(part.out))
        weights.append(part.weight.flatten(0, 2).mT)
    return Partial(torch.cat(outs), torch.cat(weights))


def _fused(inputs: ChunkInputs, mask: Tensor | None, scale: float, *, is_causal: bool = False) -> Tensor:
    num_channels = inputs.v.shape[-1]
    v = inputs.v
    if num_channels < inputs.k.shape[-1]:
        # The fused kernels want as many channels in v as in k.
        v = functional.pad(v, (0, inputs.k.shape[-1] - num_channels))
    mixed = functional.scaled_dot_product_attention(
        inputs.q.transpose(0, 1).unsqueeze(0),
        inputs.k.unsqueeze(0),
        v.unsqueeze(0),
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=inputs.q.shape[1] != inputs.k.shape[0],
    )
    rows = mixed[0].transpose(0, 1)
    return rows if num_channels == mixed.shape[-1] else rows[..., :num_channels]


def _lower_right(num_rows: int, num_keys: int) -> Tensor:
    # By name: its module brings a compiler with it, seconds of import that a host has no use for.
    return cast(Tensor, import_module("torch.nn.attention.bias").causal_lower_right(num_rows, num_keys))


def _spelled_out(inputs: ChunkInputs, window: int | None, options: HeadOptions, masks: Masks) -> Tensor:
    outs = []
    for block, band in _blocks(inputs, window):
        bias = masks.band(band, torch.float32).unsqueeze(0)
        q = _grouped(block.q, block.k.shape[0])
        part = softmax.attend(q, block.k.unsqueeze(0), block.v.unsqueeze(0), bias, options)
        rows = Partial(_by_row(part.out), part.weight.flatten(0, 2).mT)
        outs.append(rows.out if options.sinks is None else softmax.with_sinks(rows, options.sinks))
    return torch.cat(outs).to(inputs.q.dtype)


def _blocks(inputs: ChunkInputs, window: int | None) -> Iterator[tuple[ChunkInputs, Band]]:
    offset = inputs.num_keys - inputs.num_rows
    for first in range(0, inputs.num_rows, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, inputs.num_rows)
        lowest = 0 if window is None else max(0, offset + first - window + 1)
        highest = offset + last
        block = ChunkInputs(inputs.q[first:last], inputs.k[:, lowest:highest], inputs.v[:, lowest:highest])
        yield block, Band(last - first, highest - lowest, offset + first - lowest, window)


def _grouped(q: Tensor, num_units: int) -> Tensor:
    """(rows, heads, c) -> (1, units, group, rows, c)."""
    return torch.unflatten(q.transpose(0, 1), 0, (num_units, -1)).unsqueeze(0)


def _by_row(out: Tensor) -> Tensor:
    """(1, units, group, rows, c) -> (rows, heads, c)."""
    return out.flatten(0, 2).transpose(0, 1)


# What a row may see, as numbers added to its scores; made once per pass.


@dataclass(frozen=True, slots=True)
class Band:
    """Rows that see keys: row i sits `offset` + i keys after the first and looks back `window` keys."""

    num_rows: int
    num_keys: int
    offset: int
    window: int | None


class Masks:
    """Bands by shape: equal blocks of a long prompt share one."""

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
