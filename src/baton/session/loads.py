"""One chunk as one rank has to move it, and page tables as they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from baton.errors import ConfigError, RemoteProtocolError
from baton.plan import Chunk, Copy, Pack, Plan, Prompt, Spec, Tables, Unpack
from baton.plan.outline import outline
from baton.plan.sides import part_bytes, parts_of, places_in_staging, source_steps, target_steps
from baton.plan.tokens import Ints
from baton.protocol.messages import PageTable
from baton.session.handles import Pages

PAGE_ID = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends know of a grant; a source has the tables of its targets, a target its own."""

    plan: Plan
    prompt: Prompt
    tables: Mapping[int, Mapping[str, Ints]]
    modes: Mapping[tuple[int, int], str]
    is_verified: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """What one chunk brings to one target rank; offsets into staging count from the chunk's own place."""

    target_rank: int
    packs: tuple[Pack, ...]
    copies: tuple[Copy, ...]
    staging_bytes: int
    num_bytes: Mapping[str, int]


def make_loads(terms: Terms, source_rank: int, table: Mapping[str, Ints], chunk: Chunk) -> list[Load]:
    """The loads of a chunk, one for every target rank that gets something."""
    tables = Tables({source_rank: table}, terms.tables)
    found = []
    for pair in outline(terms.plan, terms.prompt).pairs_of_source(source_rank):
        parts = parts_of(terms.plan, terms.prompt, tables, chunk, pair)
        if not parts:
            continue
        mode = terms.modes[pair]
        steps = source_steps(parts, mode)
        places = places_in_staging(parts, mode)
        found.append(
            Load(
                target_rank=pair[1],
                packs=tuple(step for step in steps if isinstance(step, Pack)),
                copies=tuple(step for step in steps if isinstance(step, Copy)),
                staging_bytes=max((stop for _, stop in places.values()), default=0),
                num_bytes=part_bytes(parts),
            )
        )
    return found


def unpacks(terms: Terms, pair: tuple[int, int], chunk: Chunk) -> list[Unpack]:
    """What the target does with a chunk that has landed."""
    parts = parts_of(terms.plan, terms.prompt, Tables({}, terms.tables), chunk, pair)
    return target_steps(parts, terms.modes[pair])


def own_table(pages: Pages, spec: Spec) -> dict[str, Ints]:
    """A rank's page table as an engine gave it; raises ConfigError on ids that are not in its pools."""
    return {group: _checked(np.asarray(ids, dtype=np.int64), group, spec) for group, ids in pages.items()}


def encode_tables(pages: Mapping[int, Pages], spec: Spec) -> dict[int, PageTable]:
    """Page tables as they travel."""
    return {
        rank: {group: ids.astype(PAGE_ID).tobytes() for group, ids in own_table(table, spec).items()}
        for rank, table in pages.items()
    }


def decode_tables(tables: Mapping[int, PageTable], spec: Spec) -> dict[int, dict[str, Ints]]:
    """Page tables as they came; raises RemoteProtocolError on what cannot be one."""
    try:
        return {
            rank: {group: _checked(_decoded(raw), group, spec) for group, raw in table.items()}
            for rank, table in tables.items()
        }
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None


def _decoded(raw: bytes) -> Ints:
    if len(raw) % PAGE_ID.itemsize:
        raise ConfigError(f"a page table of {len(raw)} bytes is no list of 4-byte page ids")
    return np.frombuffer(raw, dtype=PAGE_ID).astype(np.int64)


def _checked(ids: Ints, group: str, spec: Spec) -> Ints:
    if group not in spec.cache.groups:
        raise ConfigError(f"no component is in group {group!r}; groups: {', '.join(spec.cache.groups)}")
    num_pages = spec.storage.pages_of(group)
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_pages:
        raise ConfigError(
            f"page {int(ids.min())} to {int(ids.max())} of group {group!r}: its pools have {num_pages} pages"
        )
    return ids
