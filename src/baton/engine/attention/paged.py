"""Attention of decoding sequences over the pages of the pools, in place (Triton; CUDA only).

Every sequence of a batch has one row. Its new entries are stored, then it attends over all of its tokens, or
those of a window. The keys of a sequence are divided into splits, so that a batch of one keeps the whole GPU
busy; a second kernel merges the splits, and adds sinks. Nothing depends on the host: which pages and how many
tokens are tensors, so that a CUDA graph of these kernels serves any step of its batch size. A row whose
length is 0 is padding: it stores nothing, and its result is zero.

One kernel attends with the query heads of a kv head (GQA); the other with all heads over one latent (MLA),
whose first channels are its values too.
"""

# ruff: noqa: N803 - constants of kernels are written as Triton users write them

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.engine.models.base import HeadOptions

BLOCK_KEYS = 64
SPLITS_MAX = 32
PROGRAMS_PER_PROCESSOR = 4
"""Splits are made until every multiprocessor has this many programs, where there are keys for it."""


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the tokens of a batch lie."""

    pages: Tensor
    """(rows, pages of the longest context) int32."""
    lengths: Tensor
    """(rows,) int32: tokens of each sequence, its new one included; 0 for padding."""
    page_tokens: int


def num_splits(num_programs: int, device: torch.device) -> int:
    """How many parts the keys of a sequence are attended to in, given the programs of one part."""
    wanted = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    fitting = max(1, wanted // num_programs)
    return min(SPLITS_MAX, 1 << (fitting.bit_length() - 1))


def store(rows: Tensor, pool: Tensor, table: PageTable) -> None:
    """Stores rows (rows, units, channels), each at the last token of its sequence, in (pages, units, tokens,
    channels)."""
    num_rows, num_units, num_channels = rows.shape
    if not num_units:
        return
    _store[num_rows, num_units](
        rows,
        pool,
        table.pages,
        table.lengths,
        *rows.stride()[:2],
        *pool.stride()[:3],
        table.pages.stride(0),
        PAGE=table.page_tokens,
        CHANNELS=num_channels,
        BLOCK=triton.next_power_of_2(num_channels),
        num_warps=1,
    )


def attend(q: Tensor, k: Tensor, v: Tensor, table: PageTable, options: HeadOptions, splits: int) -> Tensor:
    """q (rows, heads, c), pools k and v (pages, units, tokens, c) -> (rows, heads, value channels)."""
    num_rows, num_heads, num_channels = q.shape
    num_units, num_values = k.shape[1], v.shape[-1]
    group = num_heads // num_units
    parts = q.new_empty((num_rows, num_heads, splits, num_values), dtype=torch.float32)
    weights = q.new_empty((num_rows, num_heads, splits), dtype=torch.float32)
    _attend_heads[num_rows, num_units, splits](
        q,
        k,
        v,
        table.pages,
        table.lengths,
        parts,
        weights,
        options.scale,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        table.pages.stride(0),
        GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        PAGE=table.page_tokens,
        CHANNELS=num_channels,
        BLOCK_CHANNELS=max(16, triton.next_power_of_2(num_channels)),
        VALUES=num_values,
        BLOCK_VALUES=max(16, triton.next_power_of_2(num_values)),
        WINDOW=options.window or 0,
        SPLITS=splits,
        BLOCK_KEYS=BLOCK_KEYS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=2,
    )
    return _merged(parts, weights, options.sinks, q.dtype)


def attend_latent(
    q: Tensor, latent: Tensor, num_values: int, table: PageTable, options: HeadOptions, splits: int
) -> Tensor:
    """q (rows, heads, c), the pool (pages, tokens, c) -> (rows, heads, value channels)."""
    num_rows, num_heads, num_channels = q.shape
    block_heads = 16
    parts = q.new_empty((num_rows, num_heads, splits, num_values), dtype=torch.float32)
    weights = q.new_empty((num_rows, num_heads, splits), dtype=torch.float32)
    _attend_latent[num_rows, triton.cdiv(num_heads, block_heads), splits](
        q,
        latent,
        table.pages,
        table.lengths,
        parts,
        weights,
        options.scale,
        *q.stride()[:2],
        *latent.stride()[:2],
        table.pages.stride(0),
        HEADS=num_heads,
        BLOCK_HEADS=block_heads,
        PAGE=table.page_tokens,
        VALUES=num_values,
        BLOCK_VALUES=max(16, triton.next_power_of_2(num_values)),
        REST=num_channels - num_values,
        BLOCK_REST=max(16, triton.next_power_of_2(num_channels - num_values)),
        WINDOW=options.window or 0,
        SPLITS=splits,
        BLOCK_KEYS=32,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=1,
    )
    return _merged(parts, weights, None, q.dtype)


def _merged(parts: Tensor, weights: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    num_rows, num_heads, splits, num_values = parts.shape
    out = parts.new_empty((num_rows, num_heads, num_values), dtype=dtype)
    _merge[num_rows, num_heads](
        parts,
        weights,
        weights if sinks is None else sinks,
        out,
        num_heads,
        HAS_SINKS=sinks is not None,
        SPLITS=splits,
        VALUES=num_values,
        BLOCK_VALUES=triton.next_power_of_2(num_values),
        num_warps=2,
    )
    return out


@triton.jit
def _store(
    rows, pool, pages, lengths,
    row_stride, row_unit_stride, page_stride, unit_stride, token_stride, table_stride,
    PAGE: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, unit = tl.program_id(0), tl.program_id(1)
    token = tl.load(lengths + row) - 1
    if token >= 0:
        page = tl.load(pages + row * table_stride + token // PAGE).to(tl.int64)
        channel = tl.arange(0, BLOCK)
        is_in = channel < CHANNELS
        values = tl.load(rows + row * row_stride + unit * row_unit_stride + channel, mask=is_in)
        at = page * page_stride + unit * unit_stride + (token % PAGE) * token_stride
        tl.store(pool + at + channel, values.to(pool.dtype.element_ty), mask=is_in)


@triton.jit
def _span(lengths, row, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The keys [first, last) of one split; empty where there are fewer keys than splits."""
    length = tl.load(lengths + row)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(0, length - WINDOW)
    share = tl.cdiv(tl.cdiv(length - lowest, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
    first = lowest + split * share
    return first, tl.minimum(first + share, length)


@triton.jit
def _attend_heads(
    q, k, v, pages, lengths, parts, weights, scale,
    q_row_stride, q_head_stride,
    k_page_stride, k_unit_stride, k_token_stride, v_page_stride, v_unit_stride, v_token_stride, table_stride,
    GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, PAGE: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK_CHANNELS: tl.constexpr, VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, unit, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = _span(lengths, row, split, WINDOW, SPLITS, BLOCK_KEYS)
    member = tl.arange(0, BLOCK_GROUP)
    is_member = member < GROUP
    head = unit * GROUP + member
    at = (row * tl.num_programs(1) * GROUP + head) * SPLITS + split
    if first >= last:
        tl.store(weights + at, tl.full((BLOCK_GROUP,), float("-inf"), tl.float32), mask=is_member)
    else:
        channel, value = tl.arange(0, BLOCK_CHANNELS), tl.arange(0, BLOCK_VALUES)
        queries = tl.load(
            q + row * q_row_stride + head[:, None] * q_head_stride + channel[None],
            mask=is_member[:, None] & (channel < CHANNELS)[None],
            other=0.0,
        )
        top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_GROUP,), tl.float32)
        mixed = tl.zeros((BLOCK_GROUP, BLOCK_VALUES), tl.float32)
        for start in range(first, last, BLOCK_KEYS):
            token = start + tl.arange(0, BLOCK_KEYS)
            is_key = token < last
            page = tl.load(pages + row * table_stride + token // PAGE, mask=is_key, other=0).to(tl.int64)
            slot = token % PAGE
            k_at = page * k_page_stride + unit * k_unit_stride + slot * k_token_stride
            keys = tl.load(
                k + k_at[None] + channel[:, None],
                mask=is_key[None] & (channel < CHANNELS)[:, None],
                other=0.0,
            ).to(queries.dtype)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            scores = tl.where(is_key[None], scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            shares = tl.exp(scores - highest[:, None])
            rescale = tl.exp(top - highest)
            total = total * rescale + tl.sum(shares, 1)
            v_at = page * v_page_stride + unit * v_unit_stride + slot * v_token_stride
            values = tl.load(
                v + v_at[:, None] + value[None], mask=is_key[:, None] & (value < VALUES)[None], other=0.0
            ).to(queries.dtype)
            mixed = mixed * rescale[:, None]
            mixed = tl.dot(shares.to(queries.dtype), values, acc=mixed, input_precision=PRECISION)
            top = highest
        tl.store(weights + at, top + tl.log(total), mask=is_member)
        tl.store(
            parts + at[:, None] * VALUES + value[None],
            mixed / total[:, None],
            mask=is_member[:, None] & (value < VALUES)[None],
        )


@triton.jit
def _attend_latent(
    q, latent, pages, lengths, parts, weights, scale,
    q_row_stride, q_head_stride, page_stride, token_stride, table_stride,
    HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr, PAGE: tl.constexpr,
    VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, last = _span(lengths, row, split, WINDOW, SPLITS, BLOCK_KEYS)
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = head < HEADS
    at = (row * HEADS + head) * SPLITS + split
    if first >= last:
        tl.store(weights + at, tl.full((BLOCK_HEADS,), float("-inf"), tl.float32), mask=is_head)
    else:
        value, rest = tl.arange(0, BLOCK_VALUES), tl.arange(0, BLOCK_REST)
        q_at = q + row * q_row_stride + head[:, None] * q_head_stride
        q_value = tl.load(q_at + value[None], mask=is_head[:, None] & (value < VALUES)[None], other=0.0)
        q_rest = tl.load(q_at + VALUES + rest[None], mask=is_head[:, None] & (rest < REST)[None], other=0.0)
        top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_HEADS,), tl.float32)
        mixed = tl.zeros((BLOCK_HEADS, BLOCK_VALUES), tl.float32)
        for start in range(first, last, BLOCK_KEYS):
            token = start + tl.arange(0, BLOCK_KEYS)
            is_key = token < last
            page = tl.load(pages + row * table_stride + token // PAGE, mask=is_key, other=0).to(tl.int64)
            key_at = latent + page * page_stride + (token % PAGE) * token_stride
            values = tl.load(
                key_at[:, None] + value[None], mask=is_key[:, None] & (value < VALUES)[None], other=0.0
            ).to(q_value.dtype)
            others = tl.load(
                key_at[:, None] + VALUES + rest[None], mask=is_key[:, None] & (rest < REST)[None], other=0.0
            ).to(q_value.dtype)
            scores = tl.dot(q_value, tl.trans(values), input_precision=PRECISION)
            scores = tl.dot(q_rest, tl.trans(others), acc=scores, input_precision=PRECISION) * scale
            scores = tl.where(is_key[None], scores, float("-inf"))
            highest = tl.maximum(top, tl.max(scores, 1))
            shares = tl.exp(scores - highest[:, None])
            rescale = tl.exp(top - highest)
            total = total * rescale + tl.sum(shares, 1)
            mixed = mixed * rescale[:, None]
            mixed = tl.dot(shares.to(q_value.dtype), values, acc=mixed, input_precision=PRECISION)
            top = highest
        tl.store(weights + at, top + tl.log(total), mask=is_head)
        tl.store(
            parts + at[:, None] * VALUES + value[None],
            mixed / total[:, None],
            mask=is_head[:, None] & (value < VALUES)[None],
        )


@triton.jit
def _merge(
    parts, weights, sinks, out, num_heads,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, VALUES: tl.constexpr, BLOCK_VALUES: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    at = row * num_heads + head
    split, value = tl.arange(0, SPLITS), tl.arange(0, BLOCK_VALUES)
    weight = tl.load(weights + at * SPLITS + split)
    top = tl.max(weight, 0)
    # Padding has no keys: everything is zero, and the answer is too.
    top = tl.where(top == float("-inf"), 0.0, top)
    shares = tl.exp(weight - top)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    is_used = (weight > float("-inf"))[:, None] & (value < VALUES)[None]
    outputs = tl.load(parts + (at * SPLITS + split)[:, None] * VALUES + value[None], mask=is_used, other=0.0)
    mixed = tl.sum(outputs * shares[:, None], 0) / tl.maximum(total, 1e-30)
    tl.store(out + at * VALUES + value, mixed.to(out.dtype.element_ty), mask=value < VALUES)
