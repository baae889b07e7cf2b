"""Runs steps on numpy buffers: the reference for every transport.

`fill` gives every element of a pool a value that says what it is: a hash of (component, layer, token, unit,
place inside the unit), the same on every rank and in every layout. `compare` then checks a hand-over byte by
byte. What each rank holds is taken from `baton.plan.checker`, not from the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.plan.cache import Component
from baton.plan.checker import Holdings, has_tokens
from baton.plan.chunks import PageTables
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


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many bytes a target should have received, and how many of them are right."""

    num_bytes: int
    num_right: int


@dataclass(frozen=True, slots=True)
class _Elements:
    """All elements of one component on one rank: byte offsets and hashes, tokens along dim 1."""

    component: Component
    key: tuple[int, str]
    offsets: Ints
    hashes: NDArray[np.uint64]
    tokens: Ints


def fill(spec: Spec, dp: int, prompt: Prompt, tables: PageTables, memory: Memory) -> None:
    """Writes every element that the ranks of a dp group hold of a prompt."""
    for elements in _elements(spec, dp, prompt, tables):
        raw = _raw(elements.hashes, item_bytes(spec.storage.dtype_of(elements.component)))
        offsets = elements.offsets.reshape(-1, 1) + np.arange(raw.shape[1])
        memory[elements.key][offsets] = raw


def compare(specs: tuple[Spec, Spec], dp: int, prompt: Prompt, tables: PageTables, memory: Memory) -> Verdict:
    """Looks at every element that a target was to be sent, in the target's dtype."""
    source, target = specs
    num_bytes = num_right = 0
    for elements in _elements(target, dp, prompt, tables):
        start, stop = elements.component.extent.wanted(
            prompt.num_tokens, prompt.held.get(elements.component.group, 0)
        )
        keep = np.flatnonzero((elements.tokens >= start) & (elements.tokens < stop))
        dtypes = (source.storage.dtype_of(elements.component), target.storage.dtype_of(elements.component))
        raw = _raw(elements.hashes.take(keep, axis=1), item_bytes(dtypes[0]))
        wanted = convert(raw.reshape(-1), *dtypes).reshape(-1, item_bytes(dtypes[1]))
        offsets = elements.offsets.take(keep, axis=1).reshape(-1, 1) + np.arange(wanted.shape[1])
        num_bytes += wanted.size
        num_right += int(np.count_nonzero(memory[elements.key][offsets] == wanted))
    return Verdict(num_bytes, num_right)


def _elements(spec: Spec, dp: int, prompt: Prompt, tables: PageTables) -> Iterator[_Elements]:
    side = "pool"
    holdings = Holdings(spec)
    for rank in spec.layout.group(dp):
        at = placements(spec, rank, side)
        for number, component in enumerate(spec.cache.components):
            if component.name not in at:
                continue
            held, place = holdings.of(component.name, rank), at[component.name]
            entries = component.extent.num_entries(prompt.num_tokens)
            cp = spec.layout.coordinates(rank)["cp"]
            tokens = np.flatnonzero(has_tokens(spec, component, cp, entries)).astype(np.int64)
            pages, rest = np.divmod(np.arange(len(tokens)), place.page_entries)
            along = [
                (np.array(sorted(held.layers)), np.arange(len(held.layers)) * place.stride("layer")),
                (
                    tokens,
                    tables[rank][component.group][pages] * place.stride("page")
                    + rest * place.strides.get("token", 0),
                ),
                (np.array(sorted(held.units)), np.arange(len(held.units)) * place.stride("unit")),
                *(
                    (np.arange(dim.size), np.arange(dim.size) * place.stride(dim.name))
                    for dim in component.dims
                ),
            ]
            offsets, hashes = (
                np.asarray(place.offset, dtype=np.int64),
                np.asarray(number + 1, dtype=np.uint64),
            )
            for names, steps in along:
                offsets = np.add.outer(offsets, steps)
                hashes = _mix(np.add.outer(hashes * np.uint64(0x9E3779B97F4A7C15), names.astype(np.uint64)))
            yield _Elements(component, (rank, place.buffer), offsets, hashes, tokens)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection that spreads neighbouring values apart."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(values ^ (values >> np.uint64(27)), dtype=np.uint64)


def _raw(hashes: NDArray[np.uint64], size: int) -> Bytes:
    """The last bytes of each hash, one row per element."""
    rows = np.ascontiguousarray(hashes.reshape(-1, 1)).view(np.uint8)
    return np.ascontiguousarray(rows[:, 8 - size :])
