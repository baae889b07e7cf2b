"""Pools whose every byte says what it is: a hash of salt, component, layer, token, unit and place.

The content is the same on every rank and in every layout, and another for each salt, so that the bytes of one
request in the pages of another are seen. Who holds what is taken from `baton.plan.checker`, which shares no
code with the planner. One layer is made at a time: a pool may be most of a machine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.plan.cache import Component
from baton.plan.checker import Holdings, has_tokens
from baton.plan.dtypes import convert, item_bytes
from baton.plan.execution import Verdict
from baton.plan.ownership import Spec, placements
from baton.plan.routes import Prompt
from baton.plan.tokens import Ints

Bytes: TypeAlias = NDArray[np.uint8]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EXPONENT_KEPT = 0xBF
"""A converted NaN may come out as another one, so elements that are converted are kept finite."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One rank of one side, with its pools."""

    spec: Spec
    rank: int
    pools: Mapping[str, Bytes]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer of one component on one rank: where its rows are, and what tells them apart."""

    component: Component
    number: int
    layer: int
    units: Ints
    tokens: Ints
    view: Bytes
    """Pages, units, tokens of a page, bytes."""
    pages: Ints
    rest: Ints


def fill(holder: Holder, prompt: Prompt, pages: Mapping[str, Ints], salt: int, is_finite: bool) -> None:
    """Writes every byte that a rank holds of a prompt."""
    for found in _layers(holder, prompt, pages):
        dtype = holder.spec.storage.dtype_of(found.component)
        found.view[found.pages, :, found.rest] = _rows(found, dtype, salt, is_finite)


def compare(holder: Holder, source: Spec, prompt: Prompt, pages: Mapping[str, Ints], salt: int) -> Verdict:
    """Looks at every byte that a target rank was to be sent."""
    num_bytes = num_right = 0
    for found in _layers(holder, prompt, pages):
        held = prompt.held.get(found.component.group, 0)
        start, stop = found.component.extent.wanted(prompt.num_tokens, held)
        keep = (found.tokens >= start) & (found.tokens < stop)
        kept = replace(found, tokens=found.tokens[keep])
        dtypes = source.storage.dtype_of(found.component), holder.spec.storage.dtype_of(found.component)
        wanted = _rows(kept, dtypes[0], salt, is_finite=dtypes[0] != dtypes[1])
        wanted = convert(wanted.reshape(-1), *dtypes).reshape(*wanted.shape[:2], -1)
        num_bytes += wanted.size
        num_right += int(np.count_nonzero(found.view[found.pages[keep], :, found.rest[keep]] == wanted))
    return Verdict(num_bytes, num_right)


def _layers(holder: Holder, prompt: Prompt, pages: Mapping[str, Ints]) -> Iterator[_Layer]:
    spec, rank = holder.spec, holder.rank
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
        pool = holder.pools[place.buffer]
        shape = (spec.storage.pages_of(component.group), len(held.units), place.page_entries, row_bytes)
        strides = (place.stride("page"), place.stride("unit"), place.strides.get("token", 0), 1)
        for local, layer in enumerate(sorted(held.layers)):
            first = pool[place.offset + local * place.stride("layer") :]
            view = np.lib.stride_tricks.as_strided(first, shape, strides)
            units = np.array(sorted(held.units))
            table = pages[component.group][index]
            yield _Layer(component, number, layer, units, tokens, view, table, rest)


def _rows(found: _Layer, dtype: str, salt: int, is_finite: bool) -> Bytes:
    """The bytes of every token and unit in an element type."""
    item = item_bytes(dtype)
    row_bytes = found.component.num_elements * item
    seed = np.asarray(salt, dtype=np.uint64)
    for value in (found.number + 1, found.layer):
        seed = _mix(seed * _GOLDEN + np.uint64(value))
    rows = _mix(seed * _GOLDEN + found.tokens.astype(np.uint64))
    rows = _mix(rows[:, None] * _GOLDEN + found.units.astype(np.uint64))
    words = rows[:, :, None] + np.arange(-(-row_bytes // 8), dtype=np.uint64) * _GOLDEN
    raw: Bytes = _mix(words).view(np.uint8)[:, :, :row_bytes]
    if is_finite:
        raw[:, :, item - 1 :: item] &= _EXPONENT_KEPT
    return raw


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads neighbouring values apart."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(values ^ (values >> np.uint64(31)), dtype=np.uint64)
