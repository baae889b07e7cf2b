"""A rank's memory: registered pools, staging leases, and the pages that live requests claim or hold."""

from __future__ import annotations

import importlib
import itertools
import threading
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, cast

import numpy as np

from baton.errors import ConfigError, LocalProtocolError
from baton.plan import Spec
from baton.plan.ownership import box, buffers, page_spaces, share_stride, space_sizes
from baton.plan.steps import STAGING
from baton.plan.tokens import Ints
from baton.session.handles import Request
from baton.transport import Bytes, Region, Transport

ALIGNMENT = 256
CUTS_MAX = 4096


@cache
def tensors() -> Any:
    """`baton.session.tensors`, which packs, unpacks and sums.

    torch takes seconds to import, and a rank without staging needs it for checksums only.
    """
    return importlib.import_module("baton.session.tensors")


class Pools:
    """Buffers registered with a transport, staging among them."""

    def __init__(
        self, buffers_by_name: Mapping[str, Bytes], transport: Transport, staging_bytes: int = 0
    ) -> None:
        self.buffers = dict(buffers_by_name)
        self.staging = Staging(staging_bytes)
        if staging_bytes:
            # Packing moves bytes inside one memory, so staging is where the pools are.
            on_gpu = next((pool for pool in self.buffers.values() if getattr(pool, "is_cuda", False)), None)
            self.buffers[STAGING] = (
                transport.allocate(staging_bytes) if on_gpu is None else _allocate_like(on_gpu, staging_bytes)
            )
        self.regions: dict[str, Region] = {
            name: transport.register(buffer) for name, buffer in self.buffers.items()
        }

    def view(self, offset: int, num_bytes: int) -> Bytes:
        """A range of staging."""
        return self.buffers[STAGING][offset : offset + num_bytes]


def _allocate_like(pool: Any, num_bytes: int) -> Bytes:
    """Bytes on the GPU of a pool."""
    return cast(Bytes, pool.view(-1).view(tensors().torch.uint8).new_empty(num_bytes))


def check_buffers(spec: Spec, rank: int, pools: Mapping[str, Bytes]) -> None:
    """Raises ConfigError unless these are the buffers that a rank has."""
    wanted = buffers(spec, rank, "pool")
    if set(pools) != set(wanted):
        raise ConfigError(
            f"rank {rank} of {spec.layout} needs the buffers {', '.join(sorted(wanted))}; got "
            f"{', '.join(sorted(pools)) or 'none'}"
        )
    # Memory that an engine has already may have room to spare.
    is_declared = bool(spec.storage.placements)
    for name, num_bytes in wanted.items():
        size = pools[name].nbytes
        if size < num_bytes if is_declared else size != num_bytes:
            least = " or more" if is_declared else ""
            raise ConfigError(
                f"buffer {name!r} of rank {rank} has to have {num_bytes} bytes{least}, got {size}"
            )


@dataclass(frozen=True, slots=True)
class StagingLease:
    """A range of the staging buffer, and the number of this lease, which is never used again."""

    offset: int
    num_bytes: int
    number: int


class Staging:
    """First-fit leases of byte ranges of one staging buffer.

    A lease that a peer may still write is quarantined by not giving it back.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 0:
            raise ConfigError(f"staging cannot have {num_bytes} bytes; use 0 for none")
        self.num_bytes = num_bytes
        self._leases: list[StagingLease] = []
        """Ascending by offset."""
        self._num_made = 0

    @property
    def leased_bytes(self) -> int:
        """Bytes in use, the rounding of each lease counted."""
        return sum(_stop(lease) - lease.offset for lease in self._leases)

    @property
    def free_bytes(self) -> int:
        """Bytes not in use; they may be fragmented."""
        return max(0, self.num_bytes - self.leased_bytes)

    def lease(self, num_bytes: int) -> StagingLease | None:
        """The first free range that is long enough, or None; what is longer than the buffer never fits."""
        if num_bytes < 1:
            raise LocalProtocolError(f"a lease of {num_bytes} bytes; a lease has at least 1")
        start = 0
        for place, lease in enumerate([*self._leases, None]):
            stop = self.num_bytes if lease is None else lease.offset
            if start + num_bytes <= stop:
                made = StagingLease(start, num_bytes, self._num_made)
                self._num_made += 1
                self._leases.insert(place, made)
                return made
            if lease is not None:
                start = _stop(lease)
        return None

    def give_back(self, lease: StagingLease) -> None:
        """Ends a lease, once."""
        place = bisect_left(self._leases, lease.offset, key=lambda other: other.offset)
        if place == len(self._leases) or self._leases[place] != lease:
            raise LocalProtocolError(f"{lease} is not in use; a lease is given back once, where it came from")
        del self._leases[place]

    def check_integrity(self) -> None:
        """StagingLeases are ascending, aligned, apart, inside the buffer, and each was made here."""
        reached = 0
        for lease in self._leases:
            assert lease.offset % ALIGNMENT == 0, f"{lease} is not aligned"
            assert lease.offset >= reached, f"{lease} begins inside the lease before it"
            assert lease.num_bytes >= 1, f"{lease} is of nothing"
            assert 0 <= lease.number < self._num_made, f"{lease} was not made here"
            reached = lease.offset + lease.num_bytes
        assert reached <= self.num_bytes, f"leases reach to {reached} of {self.num_bytes} bytes"
        numbers = {lease.number for lease in self._leases}
        assert len(numbers) == len(self._leases), "two leases with one number"


def _stop(lease: StagingLease) -> int:
    """Where the next lease may begin."""
    return -(-(lease.offset + lease.num_bytes) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class NamedPages:
    """The pages of one group on one rank that a request has named."""

    held: Ints
    own: Ints


@dataclass(frozen=True, slots=True)
class PageUsers:
    """By page of a pool: the claim that writes it, or 0, and how many requests only read it."""

    writers: Ints
    holders: Ints


@dataclass(frozen=True, slots=True, eq=False)
class PageClaim:
    """The pages of one live request, by rank and group."""

    number: int
    transfer: str
    named: Mapping[tuple[int, str], NamedPages]


class PageClaims:
    """Which pages live requests have named, so that no page is given to two transfers; thread-safe.

    A page that a transfer writes belongs to that transfer alone until it is released. Pages of a held prefix
    are only read, so any number of transfers may name them, as long as none of these writes them. Groups that
    overlay each other have one page space: a page of it is in use whatever group it was named for.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._live: dict[int, PageClaim] = {}
        self._users: dict[tuple[int, str], PageUsers] = {}
        """By rank and page space."""
        self._spaces = cache(partial(page_spaces, spec))
        self._cuts = lru_cache(CUTS_MAX)(partial(cut_table, spec))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def take_unless_live(self, request: Request) -> int | None:
        """The claim of a checked request; None where its id is live: that is why it will be refused."""
        with self._lock:
            if any(claim.transfer == request.transfer for claim in self._live.values()):
                return None
        return self.take(request)

    def take(self, request: Request) -> int:
        """Claims the pages of a checked request and returns the claim's number; raises ConfigError if a live
        request has them."""
        named = {
            (rank, group): self._named(request, rank, group, np.asarray(ids))
            for rank, pages in request.pages.items()
            for group, ids in pages.items()
        }
        with self._lock:
            for key, pages in named.items():
                self._check(request.transfer, key, pages)
            self._check_apart(request.transfer, named)
            claim = PageClaim(next(self._numbers), request.transfer, named)
            for key, pages in named.items():
                users = self._users_of(key)
                users.writers[pages.own] = claim.number
                np.add.at(users.holders, pages.held, 1)
            self._live[claim.number] = claim
        return claim.number

    def give_back(self, number: int) -> None:
        """Releases the pages of a claim; a second call does nothing."""
        with self._lock:
            if (claim := self._live.pop(number, None)) is None:
                return
            for key, pages in claim.named.items():
                users = self._users_of(key)
                users.writers[pages.own] = 0
                np.subtract.at(users.holders, pages.held, 1)

    def _named(self, request: Request, rank: int, group: str, ids: Ints) -> NamedPages:
        num_held = request.held.get(group, 0)
        first, own = self._cuts(rank, group, request.digest.num_tokens, num_held)
        return NamedPages(ids[first:own], ids[max(first, own) :])

    def _space(self, key: tuple[int, str]) -> tuple[int, str]:
        """The page space of a group on a rank."""
        rank, group = key
        return rank, self._spaces(rank)[group]

    def _users_of(self, key: tuple[int, str]) -> PageUsers:
        space = self._space(key)
        if space not in self._users:
            num_pages = space_sizes(self.spec, key[0])[space[1]]
            self._users[space] = PageUsers(np.zeros(num_pages, np.int64), np.zeros(num_pages, np.int64))
        return self._users[space]

    def _check_apart(self, transfer: str, named: Mapping[tuple[int, str], NamedPages]) -> None:
        """Raises ConfigError where a request names a page for two groups that overlay each other."""
        by_space: dict[tuple[int, str], list[tuple[str, NamedPages]]] = {}
        for key, pages in named.items():
            by_space.setdefault(self._space(key), []).append((key[1], pages))
        for (rank, _), members in by_space.items():
            for (group, pages), (other, others) in itertools.permutations(members, 2):
                twice = np.intersect1d(pages.own, np.concatenate([others.own, others.held]))
                if len(twice):
                    raise ConfigError(
                        f"transfer {transfer}: page {twice[0]} on rank {rank} is named for group {group!r} "
                        f"and for group {other!r}, which lie in the same memory; name it for one of them"
                    )

    def _check(self, transfer: str, key: tuple[int, str], pages: NamedPages) -> None:
        users = self._users_of(key)
        for ids, is_taken in (
            (pages.own, (users.writers[pages.own] > 0) | (users.holders[pages.own] > 0)),
            (pages.held, users.writers[pages.held] > 0),
        ):
            if is_taken.any():
                page = int(ids[is_taken][0])
                other = self._owner(key, page)
                raise ConfigError(
                    f"transfer {transfer}: page {page} of group {key[1]!r} on rank {key[0]} is in use by "
                    f"transfer {other}; name it again when that is released"
                )

    def _owner(self, key: tuple[int, str], page: int) -> str:
        space = self._space(key)
        return next(
            claim.transfer
            for claim in self._live.values()
            for other, pages in claim.named.items()
            if self._space(other) == space and (page in pages.own or page in pages.held)
        )


def cut_table(spec: Spec, rank: int, group: str, num_tokens: int, num_held: int) -> tuple[int, int]:
    """Where in a page table the used pages begin, and where the written ones do."""
    components = [component for component in spec.cache.components if component.group == group]
    if not components[0].extent.has_tokens:
        return 0, 0
    # Before the window of all its components a table may hold anything.
    first = min(component.extent.wanted(num_tokens, 0)[0] for component in components)
    share = box(spec, components[0], rank, "target").share
    owned = share_stride(spec, components[0], share, num_tokens)
    page = spec.storage.page_tokens
    return owned.num_below(first) // page, owned.num_below(num_held) // page


class UngrantedPages:
    """The pages that requests without a grant hold; a page that several hold counts once.

    Together they may hold a share of a pool: if they held all of it, an instance that is also a target could
    not grant, and two such instances would wait for each other. A request holds the pages of all chunks that
    it has offered, until it is granted or has ended.
    """

    def __init__(self, spec: Spec, rank: int, share_max: float) -> None:
        self.share_max = share_max
        self._space_by_group = page_spaces(spec, rank)
        self._num_holders = {
            space: np.zeros(count, dtype=np.int64) for space, count in space_sizes(spec, rank).items()
        }
        """By page of a space."""
        self._num_held = dict.fromkeys(self._num_holders, 0)
        self._held: dict[str, dict[str, Ints]] = {}
        """By transfer and space: its pages, each once."""
        self._tables: dict[str, Mapping[str, Ints]] = {}
        """By transfer: the table of its last chunk; most chunks of a transfer come with the same one."""

    def hold(self, transfer: str, pages: Mapping[str, Ints]) -> str:
        """Counts the pages of a chunk; says in words which page space is overdrawn, if one is."""
        held, last = self._held.setdefault(transfer, {}), self._tables.get(transfer)
        if last is None or not _are_equal(last, pages):
            self._tables[transfer] = pages
            for name, ids in self._distinct(pages).items():
                before, num_holders = held.get(name, ids[:0]), self._num_holders[name]
                added = np.setdiff1d(ids, before, assume_unique=True) if len(before) else ids
                self._num_held[name] += int(np.count_nonzero(num_holders[added] == 0))
                num_holders[added] += 1
                held[name] = np.concatenate([before, added])
        for name in held:
            num_held, num_pages = self._num_held[name], len(self._num_holders[name])
            if num_held > max(1, int(num_pages * self.share_max)):
                return (
                    f"requests without a grant hold {num_held} of {num_pages} pages of {name!r}, more than a "
                    f"share of {self.share_max:g}; begin fewer at a time, or raise ungranted_share_max"
                )
        return ""

    def let_go(self, transfer: str) -> None:
        """A transfer does not wait for a grant any more; one that did not is passed over."""
        self._tables.pop(transfer, None)
        for name, ids in self._held.pop(transfer, {}).items():
            num_holders = self._num_holders[name]
            num_holders[ids] -= 1
            self._num_held[name] -= int(np.count_nonzero(num_holders[ids] == 0))

    def num_held(self, group: str) -> int:
        """Distinct pages that are held in the page space of a group."""
        return self._num_held[self._space_by_group[group]]

    def _distinct(self, pages: Mapping[str, Ints]) -> dict[str, Ints]:
        tables: dict[str, list[Ints]] = {}
        for group, ids in pages.items():
            if group in self._space_by_group:
                tables.setdefault(self._space_by_group[group], []).append(ids)
        return {space: np.unique(np.concatenate(parts)) for space, parts in tables.items()}


def _are_equal(left: Mapping[str, Ints], right: Mapping[str, Ints]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[group], right[group]) for group in left)
