"""What a grant says, checked: its page tables, and whether a source rank can send everything under it.

Page tables travel as little-endian 32-bit integers; what a peer sends is checked against the pools that it
named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from baton.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from baton.plan import Prompt, plan
from baton.plan.binding import TransferTerms, check_reach, staging_bytes
from baton.plan.chunks import bound_plan
from baton.plan.ownership import Spec
from baton.plan.routes import TOKENS_MAX
from baton.plan.tokens import Ints
from baton.protocol.messages import Grant, PageTable

ID_BYTES = 4


def terms_of(grant: Grant, source: Spec | None, target: Spec | None) -> TransferTerms:
    """The terms of a grant between these instances; None is one whose session is gone."""
    if source is None or target is None:
        raise LocalProtocolError(f"grant for transfer {grant.transfer} by a session that is gone")
    return TransferTerms(
        plan(source, target, grant.source_dp, grant.target_dp),
        Prompt(grant.num_tokens, dict(grant.held), grant.offset),
        decode_tables(grant.tables, target, grant.target_dp),
        {(lane.source_rank, lane.target_rank): lane.mode for lane in grant.lanes},
        grant.is_verified,
    )


def check_terms(terms: TransferTerms, source_rank: int, staging: Mapping[int, int]) -> None:
    """Raises RemoteProtocolError unless a source rank can send everything under a grant.

    `staging` gives the bytes that each target rank leased to it. The rank's own tables are not looked at:
    they may still grow.
    """
    for pair in bound_plan(terms.plan, terms.prompt).pairs_of_source(source_rank):
        try:
            if not check_reach(terms.plan, terms.prompt, terms.tables, pair):
                continue
            needed = staging_bytes(terms.plan, terms.prompt, pair, terms.mode(pair))
        except ConfigError as cause:
            raise RemoteProtocolError(f"a grant that cannot be followed: {cause}") from None
        leased = staging.get(pair[1], 0)
        if needed > leased:
            raise RemoteProtocolError(
                f"a grant with {leased} bytes of staging at target rank {pair[1]}, {needed} are needed"
            )


def encode_pages(pages: Mapping[str, Sequence[int] | Ints]) -> PageTable:
    """The checked page table of a request as it travels."""
    return {group: np.asarray(ids, dtype="<i4").tobytes() for group, ids in pages.items()}


def decode_pages(table: PageTable, spec: Spec) -> dict[str, Ints]:
    """Page ids by group; raises RemoteProtocolError on what the pools of `spec` cannot have."""
    decoded: dict[str, Ints] = {}
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
        decoded[group] = ids
    return decoded


def decode_tables(tables: Mapping[int, PageTable], spec: Spec, dp: int) -> dict[int, dict[str, Ints]]:
    """The page tables of ranks of one dp group; raises RemoteProtocolError on a rank of another."""
    ranks = set(spec.layout.group(dp)) if 0 <= dp < spec.layout.size("dp") else set()
    for rank in tables:
        if rank not in ranks:
            raise RemoteProtocolError(f"page tables for rank {rank}, which is not in dp group {dp}")
    return {rank: decode_pages(table, spec) for rank, table in tables.items()}
