"""Triton kernels for what layers do between their matrices: norm, rotation, gate.

Each is one launch where torch needs two to four, which is what a decode step of a small batch waits for.
Sums and products are in float32, and rounded once. `kernels_for` in `baton.engine.models.fused` says where
they are used.
"""

# ruff: noqa: N803 - constants of kernels are written as Triton users write them

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (rows, channels) scaled to unit mean square, times weight."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_channels = x.shape[-1]
    block = triton.next_power_of_2(num_channels)
    warps = min(16, max(1, block // 512))
    _rms_norm[(len(x),)](
        x, weight, out, x.stride(0), eps, CHANNELS=num_channels, BLOCK=block, num_warps=warps
    )
    return out


def rotate(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """x (rows, heads, channels) turned by each row's position; table (positions, cosines | sines)."""
    num_rows, num_heads, num_channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate[(num_rows,)](
        x,
        positions,
        table,
        out,
        *x.stride()[:2],
        HEADS=num_heads,
        BLOCK_HEADS=triton.next_power_of_2(num_heads),
        HALF=num_channels // 2,
        BLOCK=triton.next_power_of_2(num_channels // 2),
        num_warps=4,
    )
    return out


def silu_gate(x: Tensor) -> Tensor:
    """x is gates beside values, (rows, 2 n): silu of the gates times the values, (rows, n)."""
    num_rows, size = len(x), x.shape[-1] // 2
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    _silu_gate[num_rows, triton.cdiv(size, 1024)](x, out, x.stride(0), size, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _rms_norm(x, weight, out, row_stride, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    is_in = channel < CHANNELS
    values = tl.load(x + row * row_stride + channel, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / CHANNELS + eps)
    factor = tl.load(weight + channel, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * CHANNELS + channel, (values * scale * factor).to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _rotate(
    x, positions, table, out, row_stride, head_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK)
    is_channel = channel < HALF
    is_in = (head < HEADS)[:, None] & is_channel[None]
    angles = table + tl.load(positions + row) * 2 * HALF + channel
    cos = tl.load(angles, mask=is_channel, other=0.0).to(tl.float32)[None]
    sin = tl.load(angles + HALF, mask=is_channel, other=0.0).to(tl.float32)[None]
    at = x + row * row_stride + head[:, None] * head_stride + channel[None]
    a = tl.load(at, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=is_in, other=0.0).to(tl.float32)
    to = out + (row * HEADS + head[:, None]) * 2 * HALF + channel[None]
    tl.store(to, (a * cos - b * sin).to(out.dtype.element_ty), mask=is_in)
    tl.store(to + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=is_in)


@triton.jit
def _silu_gate(x, out, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = place < size
    gate = tl.load(x + row * row_stride + place, mask=is_in, other=0.0).to(tl.float32)
    value = tl.load(x + row * row_stride + size + place, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + row * size + place, (gate * tl.sigmoid(gate) * value).to(out.dtype.element_ty), mask=is_in)
