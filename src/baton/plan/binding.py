"""A plan, a prompt, page tables and a chunk become steps.

Most pairs of ranks need a Copy alone. Where the dtype differs the bytes land in the target's staging and an
Unpack converts them; where the copies would be many and small (by `PackCost`) a Pack gathers them first.
The choice looks at shapes, not at page tables, so both ends come to the same one on their own.

Staging holds the parts of a pair one after another, each in canonical order: layer, token, unit, dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from baton.plan.ends import PageTables, PlanRoute, Tables
from baton.plan.lowering import Lowered
from baton.plan.packing import PackCost
from baton.plan.parts import Known, Part, PromptRoute, joined
from baton.plan.prompt import Chunk, Prompt, check_held
from baton.plan.routes import Plan
from baton.plan.steps import STAGING, Copy, Pack, Spans, Step, Unpack

__all__ = ["PageTables", "Part", "Tables", "bind", "is_packed", "parts_by_pair", "unpacked"]


def bind(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk, cost: PackCost | None = None
) -> list[Step]:
    """The steps that move one chunk of one prompt between every pair of ranks that the plan names."""
    steps: list[Step] = []
    for parts in parts_by_pair(plan, prompt, tables, chunk).values():
        steps.extend(packed(parts) if is_packed(parts, cost or PackCost()) else unpacked(parts))
    return steps


def parts_by_pair(
    plan: Plan, prompt: Prompt, tables: Tables, chunk: Chunk
) -> dict[tuple[int, int], list[Part]]:
    """What a chunk consists of, by source and target rank."""
    check_held(plan.target, prompt)
    pairs: dict[tuple[int, int], list[Part]] = {}
    known = Known()
    for route in plan.routes:
        part = PromptRoute(PlanRoute(plan, route), prompt, known).part(tables, chunk)
        if part is not None:
            pairs.setdefault((route.source, route.target), []).append(part)
    return pairs


def is_packed(parts: list[Part], cost: PackCost) -> bool:
    """Whether a pair's copies are gathered into one; tokens that only move together are never taken apart."""
    if parts[0].fixed.plan.source.storage.granule > 1:
        return False
    num_spans = sum(part.num_spans for part in parts)
    return cost.prefers_packing(num_spans, sum(part.num_bytes for part in parts))


def unpacked(parts: Sequence[Part]) -> Iterator[Step]:
    """A pair's steps without packing: plain copies, and conversion at the target where the dtype differs."""
    yield from direct([part for part in parts if not part.fixed.is_converted])
    for part, base in staged([part for part in parts if part.fixed.is_converted]):
        yield landing(part, base)
        yield unpack(part, base)


def packed(parts: Sequence[Part]) -> Iterator[Step]:
    """A pair's steps with packing: gathered at the source, one copy, scattered at the target."""
    places = staged(parts)
    yield from (pack(part, base) for part, base in places)
    yield staging_copy(parts)
    yield from (unpack(part, base) for part, base in places)


def direct(parts: Sequence[Part]) -> Iterator[Copy]:
    """Plain copies of parts of one pair, one for each pair of buffers."""
    together: dict[tuple[str, str], list[Lowered]] = {}
    for part in parts:
        spans = part.lower("source", "target")
        together.setdefault(part.buffers, []).append(spans)
    ends = (parts[0].route.source, parts[0].route.target) if parts else (0, 0)
    for buffers, found in together.items():
        yield Copy(*ends, *buffers, joined(found))


def staged(parts: Sequence[Part]) -> list[tuple[Part, int]]:
    """Parts with where they begin in staging, one after another."""
    found, base = [], 0
    for part in parts:
        found.append((part, base))
        base += part.num_bytes
    return found


def landing(part: Part, base: int) -> Copy:
    """From the source's buffer straight into the target's staging."""
    spans = joined([part.lower("source", "staging", base)])
    return Copy(part.route.source, part.route.target, part.buffers[0], STAGING, spans)


def pack(part: Part, base: int) -> Pack:
    """From the source's buffer into its own staging."""
    spans = joined([part.lower("source", "staging", base)])
    return Pack(part.route.source, part.route.target, part.component.name, part.buffers[0], spans)


def staging_copy(parts: Sequence[Part]) -> Copy:
    """All of a pair's staging from one end to the other."""
    num_bytes = sum(part.num_bytes for part in parts)
    whole = (np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.array([num_bytes], dtype=np.int64))
    return Copy(parts[0].route.source, parts[0].route.target, STAGING, STAGING, Spans(*whole))


def unpack(part: Part, base: int) -> Unpack:
    """From the target's staging to its buffer, in the target's dtype."""
    items = (part.fixed.wire_item_bytes, part.fixed.target.at.item_bytes)
    spans = joined([part.lower("staging", "target", base)], *items)
    route = part.route
    return Unpack(route.source, route.target, part.component.name, part.buffers[1], spans, part.fixed.dtypes)
