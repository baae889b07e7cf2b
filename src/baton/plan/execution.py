"""Runs steps on numpy buffers: the reference for every transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.plan.dtypes import convert, item_bytes
from baton.plan.ownership import Spec, buffers
from baton.plan.steps import STAGING, Copy, Pack, Spans, Step, Unpack

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
