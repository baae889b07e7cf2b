"""What a rank has to move for one chunk, from the terms of a grant.

Offsets into staging count from the chunk's own place in the lease, which the driver adds (`placed`). Page
tables travel as little-endian 32-bit integers; what a peer sends is checked against the pools that it named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from baton.errors import ConfigError, RemoteProtocolError
from baton.plan.ends import PageTables, Tables
from baton.plan.outline import Pair, outline
from baton.plan.ownership import Spec
from baton.plan.parts import Part
from baton.plan.prompt import TOKENS_MAX, Chunk, Prompt
from baton.plan.routes import Plan
from baton.plan.sides import (
    DIRECT,
    canonical,
    check_reach,
    direct_copies,
    part_bytes,
    parts_of,
    places_in_staging,
    source_steps,
    staging_bytes,
    target_steps,
    writable,
)
from baton.plan.steps import STAGING, Copy, Pack, Spans, Unpack
from baton.plan.tokens import Ints
from baton.protocol.messages import PageTable

ID_BYTES = 4
ID_MAX = (1 << 31) - 1

Gathers: TypeAlias = dict[str, tuple[str, Spans]]
"""By component: a buffer (or staging), and the spans that gather a chunk from it in canonical order."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a grant settles for one transfer; `tables` are the target's, `modes` go by pair of ranks."""

    plan: Plan
    prompt: Prompt
    tables: PageTables
    modes: Mapping[Pair, str]
    is_verified: bool = False

    def mode(self, pair: Pair) -> str:
        """How a pair moves; raises ConfigError where the grant has no lane for it."""
        try:
            return self.modes[pair]
        except KeyError:
            raise ConfigError(f"no lane from source rank {pair[0]} to target rank {pair[1]}") from None


@dataclass(frozen=True, slots=True)
class Load:
    """What a source rank does for one chunk and one target rank; `sums` is empty unless verified."""

    target_rank: int
    packs: tuple[Pack, ...]
    copies: tuple[Copy, ...]
    staging_bytes: int
    """At the target; where there are packs, as much at the source."""
    num_bytes: dict[str, int]
    sums: Gathers


@dataclass(frozen=True, slots=True)
class Unload:
    """What a target rank does once a chunk of one source rank is there; `sums` is empty unless verified."""

    source_rank: int
    unpacks: tuple[Unpack, ...]
    staging_bytes: int
    num_bytes: dict[str, int]
    sums: Gathers


def make_loads(terms: Terms, source_rank: int, source_tables: Mapping[str, Ints], chunk: Chunk) -> list[Load]:
    """The loads of a chunk, one for each target rank that gets something; the tables are the rank's own."""
    tables = Tables({source_rank: source_tables}, terms.tables)
    loads: list[Load] = []
    for pair in outline(terms.plan, terms.prompt).pairs_of_source(source_rank):
        if (load := _direct(terms, tables, chunk, pair)) is not None:
            loads.extend([load] if load.copies else [])
            continue
        parts = parts_of(terms.plan, terms.prompt, tables, chunk, pair)
        if not parts:
            continue
        mode = terms.mode(pair)
        steps = source_steps(parts, mode)
        load = Load(
            target_rank=pair[1],
            packs=tuple(step for step in steps if isinstance(step, Pack)),
            copies=tuple(step for step in steps if isinstance(step, Copy)),
            staging_bytes=_staging_bytes(parts, mode),
            num_bytes=part_bytes(parts),
            sums=canonical(parts, "source") if terms.is_verified else {},
        )
        loads.append(load)
    return loads


def _direct(terms: Terms, tables: Tables, chunk: Chunk, pair: Pair) -> Load | None:
    """The load of a pair that moves from buffer to buffer, if there is a short way to it."""
    if terms.is_verified or terms.modes.get(pair) != DIRECT:
        return None
    found = direct_copies(terms.plan, terms.prompt, tables, chunk, pair)
    if found is None:
        return None
    return Load(pair[1], (), tuple(found[0]), 0, found[1], {})


def make_unload(terms: Terms, source_rank: int, target_rank: int, chunk: Chunk) -> Unload:
    """What a chunk is to a target rank; needs none but its own tables."""
    parts = _at_target(terms, source_rank, target_rank, chunk)
    mode = terms.mode((source_rank, target_rank)) if parts else ""
    return Unload(
        source_rank=source_rank,
        unpacks=tuple(target_steps(parts, mode)) if parts else (),
        staging_bytes=_staging_bytes(parts, mode),
        num_bytes=part_bytes(parts),
        sums=_landed(parts, mode) if terms.is_verified else {},
    )


def unpacks(terms: Terms, source_rank: int, target_rank: int, chunk: Chunk) -> tuple[Unpack, ...]:
    """The unpacks of a chunk at a target rank."""
    parts = _at_target(terms, source_rank, target_rank, chunk)
    return tuple(target_steps(parts, terms.mode((source_rank, target_rank)))) if parts else ()


def writable_by(terms: Terms, source_rank: int, target_rank: int) -> dict[str, tuple[Ints, Ints]]:
    """Starts and lengths, by buffer of the target rank, of what a pair's copies write outside of staging."""
    pair = (source_rank, target_rank)
    return writable(terms.plan, terms.prompt, terms.tables, pair, terms.mode(pair))


def check_terms(terms: Terms, source_rank: int, staging: Mapping[int, int]) -> None:
    """Raises RemoteProtocolError unless a source rank can send everything under a grant.

    `staging` gives the bytes that each target rank leased to it. The rank's own tables are not looked at:
    they may still grow.
    """
    for pair in outline(terms.plan, terms.prompt).pairs_of_source(source_rank):
        try:
            if not check_reach(terms.plan, terms.prompt, terms.tables, pair):
                continue
            wanted = staging_bytes(terms.plan, terms.prompt, pair, terms.mode(pair))
        except ConfigError as cause:
            raise RemoteProtocolError(f"a grant that cannot be followed: {cause}") from None
        if wanted > staging.get(pair[1], 0):
            raise RemoteProtocolError(
                f"a grant with {staging.get(pair[1], 0)} bytes of staging at target rank {pair[1]}, "
                f"{wanted} are needed"
            )


def placed(copy: Copy, source_at: int, target_at: int) -> Spans:
    """A copy's spans once it is known where in either end's staging the chunk lies."""
    source, target = copy.spans.source, copy.spans.target
    if copy.source_buffer == STAGING:
        source = source + source_at
    if copy.target_buffer == STAGING:
        target = target + target_at
    return Spans(source, target, copy.spans.length)


def _at_target(terms: Terms, source_rank: int, target_rank: int, chunk: Chunk) -> list[Part]:
    tables = Tables({}, terms.tables)
    return parts_of(terms.plan, terms.prompt, tables, chunk, (source_rank, target_rank))


def _staging_bytes(parts: list[Part], mode: str) -> int:
    return max((stop for _, stop in places_in_staging(parts, mode).values()), default=0)


def _landed(parts: list[Part], mode: str) -> Gathers:
    """Where the target finds the wire's bytes: in staging where they passed through it, else in place."""
    places = places_in_staging(parts, mode)
    found = canonical([part for part in parts if part.component.name not in places], "target")
    for name, (start, stop) in places.items():
        at, length = np.array([start], dtype=np.int64), np.array([stop - start], dtype=np.int64)
        found[name] = (STAGING, Spans(at, np.zeros(1, dtype=np.int64), length))
    return found


def encode_pages(pages: Mapping[str, Sequence[int] | Ints]) -> PageTable:
    """Page ids by group as they travel; raises ConfigError on what is no page id."""
    found: PageTable = {}
    for group, ids in pages.items():
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ConfigError(f"the page table for group {group!r} has to be a list of integers")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) <= ID_MAX:
            raise ConfigError(f"the page table for group {group!r} has ids outside of 0 to {ID_MAX}")
        found[group] = array.astype("<i4").tobytes()
    return found


def decode_pages(table: PageTable, spec: Spec) -> dict[str, Ints]:
    """Page ids by group; raises RemoteProtocolError on what the pools of `spec` cannot have."""
    found: dict[str, Ints] = {}
    for group, raw in table.items():
        if group not in spec.cache.groups:
            known = ", ".join(spec.cache.groups)
            raise RemoteProtocolError(f"a page table for group {group!r}; the cache has {known}")
        if len(raw) % ID_BYTES or len(raw) > TOKENS_MAX * ID_BYTES:
            raise RemoteProtocolError(
                f"the page table for group {group!r} has {len(raw)} bytes, not a multiple of {ID_BYTES} "
                f"up to {TOKENS_MAX * ID_BYTES}"
            )
        ids = np.frombuffer(raw, dtype="<i4").astype(np.int64)
        num_pages = spec.storage.pages_of(group)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_pages:
            raise RemoteProtocolError(
                f"the page table for group {group!r} names pages {ids.min()} to {ids.max()} of a pool of "
                f"{num_pages}"
            )
        found[group] = ids
    return found


def decode_tables(tables: Mapping[int, PageTable], spec: Spec, dp: int) -> dict[int, dict[str, Ints]]:
    """The page tables of ranks of one dp group; raises RemoteProtocolError on a rank of another."""
    check_ranks(tables, spec, dp)
    return {rank: decode_pages(table, spec) for rank, table in tables.items()}


def check_ranks(tables: Mapping[int, PageTable], spec: Spec, dp: int) -> None:
    """Raises RemoteProtocolError unless all these ranks are of one dp group."""
    ranks = set(spec.layout.group(dp)) if 0 <= dp < spec.layout.size("dp") else set()
    for rank in tables:
        if rank not in ranks:
            raise RemoteProtocolError(f"page tables for rank {rank}, which is not in dp group {dp}")
