"""Which pages live requests have named, so that no page is given to two transfers.

A page that a transfer writes belongs to that transfer alone until it is released. Pages of a held prefix are
only read, so any number of transfers may name them, as long as none of these writes them.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from baton.errors import ConfigError
from baton.plan import Spec
from baton.plan.ownership import box, share_stride
from baton.plan.tokens import Ints
from baton.session.requests import Request

BOUNDS_MAX = 4096


@dataclass(frozen=True, slots=True)
class Named:
    """The pages of one group on one rank that a request has named."""

    held: Ints
    own: Ints


@dataclass(frozen=True, slots=True)
class Ledger:
    """Who writes each page of a pool, as the number of a claim or 0, and how many only hold it."""

    writers: Ints
    holders: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What one live request has named, by rank and group."""

    number: int
    transfer: str
    named: Mapping[tuple[int, str], Named]


@dataclass(slots=True)
class Claims:
    """Every claim of the requests made here; from any thread."""

    spec: Spec
    _live: dict[int, Claim] = field(default_factory=dict)
    _ledgers: dict[tuple[int, str], Ledger] = field(default_factory=dict)
    _bounds: dict[tuple[int, str, int, int], tuple[int, int]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, request: Request) -> Claim:
        """Claims the pages of a checked request; raises ConfigError if a live one has them."""
        named = {
            (rank, group): self._named(request, rank, group, np.asarray(ids))
            for rank, pages in request.pages.items()
            for group, ids in pages.items()
        }
        with self._lock:
            for key, pages in named.items():
                self._check(request.transfer, key, pages)
            claim = Claim(next(self._numbers), request.transfer, named)
            for key, pages in named.items():
                ledger = self._ledger(key)
                ledger.writers[pages.own] = claim.number
                np.add.at(ledger.holders, pages.held, 1)
            self._live[claim.number] = claim
        return claim

    def has(self, transfer: str) -> bool:
        """Whether a live request has this id."""
        with self._lock:
            return any(claim.transfer == transfer for claim in self._live.values())

    def give_back(self, claim: Claim) -> None:
        """Lets the pages of a claim go; asked again, does nothing."""
        with self._lock:
            if self._live.pop(claim.number, None) is None:
                return
            for key, pages in claim.named.items():
                ledger = self._ledger(key)
                ledger.writers[pages.own] = 0
                np.subtract.at(ledger.holders, pages.held, 1)

    def _named(self, request: Request, rank: int, group: str, ids: Ints) -> Named:
        num_tokens, num_held = request.digest.num_tokens, request.held.get(group, 0)
        first, own = self._cut(rank, group, num_tokens, num_held)
        return Named(ids[first:own], ids[max(first, own) :])

    def _cut(self, rank: int, group: str, num_tokens: int, num_held: int) -> tuple[int, int]:
        """Where in a page table what matters begins, and where what is written does."""
        key = (rank, group, num_tokens, num_held)
        if key not in self._bounds:
            if len(self._bounds) >= BOUNDS_MAX:
                self._bounds.clear()
            self._bounds[key] = self._find_cut(rank, group, num_tokens, num_held)
        return self._bounds[key]

    def _find_cut(self, rank: int, group: str, num_tokens: int, num_held: int) -> tuple[int, int]:
        spec = self.spec
        components = [found for found in spec.cache.components if found.group == group]
        if not components[0].extent.has_tokens:
            return 0, 0
        # Before the window of all its components a table may hold anything.
        first = min(found.extent.wanted(num_tokens, 0)[0] for found in components)
        share = box(spec, components[0], rank, "target").share
        owned = share_stride(spec, components[0], share, num_tokens)
        page = spec.storage.page_tokens
        return owned.num_below(first) // page, owned.num_below(num_held) // page

    def _ledger(self, key: tuple[int, str]) -> Ledger:
        found = self._ledgers.get(key)
        if found is None:
            num_pages = self.spec.storage.pages_of(key[1])
            empty = (np.zeros(num_pages, dtype=np.int64), np.zeros(num_pages, dtype=np.int64))
            found = self._ledgers[key] = Ledger(*empty)
        return found

    def _check(self, transfer: str, key: tuple[int, str], pages: Named) -> None:
        ledger = self._ledger(key)
        for ids, is_taken in (
            (pages.own, (ledger.writers[pages.own] > 0) | (ledger.holders[pages.own] > 0)),
            (pages.held, ledger.writers[pages.held] > 0),
        ):
            if is_taken.any():
                page = int(ids[is_taken][0])
                other = self._owner(key, page)
                raise ConfigError(
                    f"transfer {transfer}: page {page} of group {key[1]!r} on rank {key[0]} is in use by "
                    f"transfer {other}; name it again when that is released"
                )

    def _owner(self, key: tuple[int, str], page: int) -> str:
        claims = (claim for claim in self._live.values() if key in claim.named)
        return next(
            claim.transfer
            for claim in claims
            if page in claim.named[key].own or page in claim.named[key].held
        )
