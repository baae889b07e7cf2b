"""Pool content in which every byte is known: a hash of salt, component, layer, token, unit and offset.

The content is the same on every rank and in every layout and differs by salt, so that bytes of one request
in the pages of another are detected. Ownership is taken from `baton.plan.checker`, which shares no code with
the planner. One layer is made at a time: a pool may be most of a machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from baton.plan.cache import Component
from baton.plan.checker import Holdings, has_tokens
from baton.plan.dtypes import convert, item_bytes
from baton.plan.execution import Bytes
from baton.plan.ownership import Spec, placements
from baton.plan.routes import Prompt
from baton.plan.tokens import Ints

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
