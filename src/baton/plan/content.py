"""Steps run on numpy buffers, and content of such buffers in which every byte is known.

`execute` runs steps plainly; it is the reference for every transport.

Content is a hash of salt, component, layer, token, unit and offset. It is the same on every rank and in every
layout and differs by salt, so that bytes of one request in the pages of another are detected. Ownership is
taken from `baton.plan.checker`, which shares no code with the planner. One layer is made at a time: a pool
may be most of a machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.plan.cache import Component
from baton.plan.checker import Holdings, has_tokens
from baton.plan.dtypes import convert, item_bytes
from baton.plan.ownership import Spec, buffers, placements
from baton.plan.routes import Prompt
from baton.plan.steps import STAGING, Copy, Pack, Spans, Step, Unpack
from baton.plan.tokens import Ints

Bytes: TypeAlias = NDArray[np.uint8]
Memory: TypeAlias = dict[tuple[int, str], Bytes]
"""Buffers by rank and name."""


def allocate(spec: Spec, dp: int, side: str, fill: int = 0) -> Memory:
    """Every buffer of the ranks of one dp group, each byte set to `fill`."""
    return {
        (rank, name): np.full(num_bytes, fill, dtype=np.uint8)
        for rank in spec.layout.group(dp)
        for name, num_bytes in buffers(spec, rank, side).items()
    }


def execute(steps: Iterable[Step], source: Memory, target: Memory) -> None:
    """Runs steps in order; staging lives for one call."""
    packed: dict[tuple[int, int], Bytes] = {}
    landed: dict[tuple[int, int], Bytes] = {}
    for step in steps:
        ends = (step.source, step.target)
        match step:
            case Pack():
                _move(step.spans, source[step.source, step.buffer], _room(packed, ends, step.spans))
            case Copy():
                giver = (
                    packed[ends] if step.source_buffer == STAGING else source[step.source, step.source_buffer]
                )
                if step.target_buffer == STAGING:
                    _move(step.spans, giver, _room(landed, ends, step.spans))
                else:
                    _move(step.spans, giver, target[step.target, step.target_buffer])
            case Unpack():
                _unpack(step, landed[ends], target[step.target, step.buffer])


def _room(staging: dict[tuple[int, int], Bytes], ends: tuple[int, int], spans: Spans) -> Bytes:
    """Staging of a pair, grown to hold what the spans write."""
    needed = int((spans.target + spans.length).max())
    room = staging.get(ends, np.zeros(0, dtype=np.uint8))
    if len(room) < needed:
        room = np.concatenate([room, np.zeros(needed - len(room), dtype=np.uint8)])
        staging[ends] = room
    return room


def _move(spans: Spans, source: Bytes, target: Bytes) -> None:
    triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    for read, write, length in triples:
        target[write : write + length] = source[read : read + length]


def _unpack(step: Unpack, staging: Bytes, target: Bytes) -> None:
    source_dtype, target_dtype = step.dtypes
    source_item, target_item = item_bytes(source_dtype), item_bytes(target_dtype)
    triples = zip(
        step.spans.source.tolist(), step.spans.target.tolist(), step.spans.length.tolist(), strict=True
    )
    for read, write, length in triples:
        converted = convert(staging[read : read + length], source_dtype, target_dtype)
        target[write : write + length // source_item * target_item] = converted


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EXPONENT_KEPT = 0xBF
"""Conversion may change a NaN, so elements that are converted are kept finite."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many bytes a target should have received, and how many of them are right."""

    num_bytes: int
    num_right: int


@dataclass(frozen=True, slots=True)
class RankPools:
    """The pools of one rank of one side."""

    spec: Spec
    rank: int
    pools: Mapping[str, Bytes]


@dataclass(frozen=True, slots=True)
class _LayerRows:
    """One layer of one component on one rank: where its rows are, and their tokens and units."""

    component: Component
    number: int
    layer: int
    units: Ints
    tokens: Ints
    view: Bytes
    """Pages, units, tokens of a page, bytes."""
    pages: Ints
    rest: Ints


def fill(
    rank_pools: RankPools, prompt: Prompt, pages: Mapping[str, Ints], salt: int, is_finite: bool
) -> None:
    """Writes every byte that a rank holds of a prompt."""
    for rows in _layers(rank_pools, prompt, pages):
        dtype = rank_pools.spec.storage.dtype_of(rows.component)
        rows.view[rows.pages, :, rows.rest] = _rows(rows, dtype, salt, is_finite)


def compare(
    rank_pools: RankPools, source: Spec, prompt: Prompt, pages: Mapping[str, Ints], salt: int
) -> Verdict:
    """Compares every byte that a target rank should have received."""
    num_bytes = num_right = 0
    for rows in _layers(rank_pools, prompt, pages):
        held = prompt.held.get(rows.component.group, 0)
        start, stop = rows.component.extent.wanted(prompt.num_tokens, held)
        keep = (rows.tokens >= start) & (rows.tokens < stop)
        kept = replace(rows, tokens=rows.tokens[keep])
        dtypes = source.storage.dtype_of(rows.component), rank_pools.spec.storage.dtype_of(rows.component)
        wanted = _rows(kept, dtypes[0], salt, is_finite=dtypes[0] != dtypes[1])
        wanted = convert(wanted.reshape(-1), *dtypes).reshape(*wanted.shape[:2], -1)
        num_bytes += wanted.size
        num_right += int(np.count_nonzero(rows.view[rows.pages[keep], :, rows.rest[keep]] == wanted))
    return Verdict(num_bytes, num_right)


def _layers(rank_pools: RankPools, prompt: Prompt, pages: Mapping[str, Ints]) -> Iterator[_LayerRows]:
    spec, rank = rank_pools.spec, rank_pools.rank
    holdings, at = Holdings(spec), placements(spec, rank, "pool")
    cp = spec.layout.coordinates(rank)["cp"]
    for number, component in enumerate(spec.cache.components):
        if component.name not in at:
            continue
        held, place = holdings.of(component.name, rank), at[component.name]
        entries = component.extent.num_entries(prompt.num_tokens)
        tokens = np.flatnonzero(has_tokens(spec, component, cp, entries)).astype(np.int64)
        index, rest = np.divmod(np.arange(len(tokens)), place.page_entries)
        row_bytes = component.num_elements * place.item_bytes
        sizes = [dim.size for dim in component.dims]
        inner = [prod(sizes[i + 1 :]) * place.item_bytes for i in range(len(sizes))]
        assert [place.stride(dim.name) for dim in component.dims] == inner, "a unit lies in one piece"
        pool = rank_pools.pools[place.buffer]
        shape = (spec.storage.pages_of(component.group), len(held.units), place.page_entries, row_bytes)
        strides = (place.stride("page"), place.stride("unit"), place.strides.get("token", 0), 1)
        layers = sorted(held.layers)
        starts = place.layer_starts(np.arange(len(layers))).tolist()
        for start, layer in zip(starts, layers, strict=True):
            first = pool[start:]
            view = np.lib.stride_tricks.as_strided(first, shape, strides)
            units = np.array(sorted(held.units))
            table = pages[component.group][index]
            yield _LayerRows(component, number, layer, units, tokens, view, table, rest)


def _rows(rows: _LayerRows, dtype: str, salt: int, is_finite: bool) -> Bytes:
    """The bytes of every token and unit in an element type."""
    item = item_bytes(dtype)
    row_bytes = rows.component.num_elements * item
    seed = np.asarray(salt, dtype=np.uint64)
    for value in (rows.number + 1, rows.layer):
        seed = mix(seed * _GOLDEN + np.uint64(value))
    hashes = mix(seed * _GOLDEN + rows.tokens.astype(np.uint64))
    hashes = mix(hashes[:, None] * _GOLDEN + rows.units.astype(np.uint64))
    words = hashes[:, :, None] + np.arange(-(-row_bytes // 8), dtype=np.uint64) * _GOLDEN
    raw: Bytes = mix(words).view(np.uint8)[:, :, :row_bytes]
    if is_finite:
        raw[:, :, item - 1 :: item] &= _EXPONENT_KEPT
    return raw


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads neighbouring values apart (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)), dtype=np.uint64)
