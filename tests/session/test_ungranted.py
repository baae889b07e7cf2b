"""Requests without a grant hold distinct pages: how they are counted, and the share that they may hold."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.plan.world import make_cache, put
from tests.session.handoff_world import (
    AUX,
    CACHE,
    PATIENCE_S,
    Job,
    Side,
    Transfer,
    World,
    without_leaks,
    worlds,
)

from baton.errors import ConfigError
from baton.plan.kinds import Paged, Recurrent
from baton.protocol.outcomes import Ready, Stage, Why
from baton.session import memory
from baton.session.endpoint import EndpointConfig
from baton.session.memory import UngrantedPages

NUM_PAGES = 16
HYBRID = make_cache(4, (Paged(4, 3, 2), ((0, 2),)), (Recurrent(2, 2), ((2, 4),)))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


# The counts.


class TableLengths(UngrantedPages):
    """Adds up the lengths of tables."""

    def hold(self, transfer: str, pages: Any) -> str:
        before = dict(self._num_held)
        is_new = transfer not in self._held
        text = super().hold(transfer, pages)
        for group, ids in pages.items():
            space = self._space_by_group[group]
            self._num_held[space] = before[space] + (len(ids) if is_new else 0)
        return text


class KeepsShared(UngrantedPages):
    """Does not take a holder off a page that others hold too."""

    def let_go(self, transfer: str) -> None:
        held = self._held.get(transfer, {})
        for name, ids in held.items():
            held[name] = ids[self._num_holders[name][ids] == 1]
        super().let_go(transfer)


class ReleasesTwice(UngrantedPages):
    """Takes two holders off a page that others hold too."""

    def let_go(self, transfer: str) -> None:
        for name, ids in self._held.get(transfer, {}).items():
            self._num_holders[name][ids[self._num_holders[name][ids] > 1]] -= 1
        super().let_go(transfer)


def check_counts(kind: type[UngrantedPages], seed: int) -> None:
    """Chunks of random tables come, and transfers go in any order; the held pages are those that wait."""
    rng = random.Random(seed)
    spec = Side(num_pages=NUM_PAGES).spec(HYBRID)
    counted = kind(spec, 0, rng.choice((0.25, 0.5, 1.0)))
    groups = sorted(counted._space_by_group)
    waiting: dict[str, list[dict[str, list[int]]]] = {}
    for _ in range(60):
        if waiting and rng.random() < 0.3:
            transfer = rng.choice(sorted(waiting))
            for _ in range(rng.choice((1, 1, 2))):  # the second time it is not held any more
                counted.let_go(transfer)
            del waiting[transfer]
        else:
            tables = waiting.setdefault(f"t{rng.randrange(4)}", [])
            table = {group: [rng.randrange(NUM_PAGES) for _ in range(rng.randrange(5))] for group in groups}
            if tables and rng.random() < 0.6:
                table = rng.choice(tables)
            tables.append(table)
            transfer = next(name for name in waiting if waiting[name] is tables)
            text = counted.hold(transfer, {group: np.array(table[group], dtype=np.int64) for group in groups})
            held = {group: distinct(waiting, group) for group in groups}
            is_over = any(held[group] > max(1, int(NUM_PAGES * counted.share_max)) for group in groups)
            assert bool(text) == is_over, (text, held)
        for group in groups:
            assert counted.num_held(group) == distinct(waiting, group)


def check_many(kind: type[UngrantedPages]) -> None:
    for seed in range(40):
        check_counts(kind, seed)


def distinct(waiting: dict[str, list[dict[str, list[int]]]], group: str) -> int:
    return len({page for tables in waiting.values() for table in tables for page in table[group]})


def test_distinct_pages_are_counted_as_transfers_come_and_go_in_any_order() -> None:
    check_many(UngrantedPages)


@pytest.mark.parametrize("kind", [TableLengths, KeepsShared, ReleasesTwice])
def test_a_wrong_count_is_noticed(kind: type[UngrantedPages]) -> None:
    with pytest.raises(AssertionError):
        check_many(kind)


def test_a_page_of_groups_that_overlay_each_other_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    spaces = {"tokens": "state", "state": "state"}
    monkeypatch.setattr(memory, "page_spaces", lambda spec, rank: spaces)
    monkeypatch.setattr(memory, "space_sizes", lambda spec, rank: {"state": NUM_PAGES})
    pages = UngrantedPages(Side(num_pages=NUM_PAGES).spec(HYBRID), 0, 0.5)
    assert pages.hold("t0", {"tokens": np.arange(0, 5), "state": np.arange(3, 8)}) == ""
    assert pages.num_held("tokens") == pages.num_held("state") == 8
    assert "hold 9 of 16 pages" in pages.hold("t1", {"tokens": np.arange(1), "state": np.arange(8, 9)})
    pages.let_go("t0")
    assert pages.num_held("tokens") == pages.num_held("state") == 2


def test_groups_with_page_ids_of_their_own_count_apart() -> None:
    pages = UngrantedPages(Side(num_pages=NUM_PAGES).spec(HYBRID), 0, 0.5)
    assert pages.hold("t0", {"tokens": np.arange(0, 8), "state": np.arange(8, 16)}) == ""
    assert (pages.num_held("tokens"), pages.num_held("state")) == (8, 8)


# The share, between two instances.


def six_with_a_prefix(world: World) -> list[Transfer]:
    """Six requests of 11 pages each that share 10 of them: 16 distinct pages."""
    transfers = [world.transfer(Job(44)) for _ in range(6)]
    first = transfers[0]
    for other in transfers[1:]:
        other.salt = first.salt
        for rank, tables in other.source_tables.items():
            for group, pages in tables.items():
                pages[:10] = first.source_tables[rank][group][:10]
        for held in other._held(world.source, 44):
            values = other._values(held, world.source.spec.storage.dtype_of(held.component))
            put(world.source.memory[held.rank, held.buffer], held.offsets, values)
    return transfers


def num_held(world: World) -> list[int]:
    """On every source rank, once it has handled what was posted so far."""
    counts = []
    for endpoint in world.source.endpoints:
        handled = threading.Event()
        endpoint._loop.post(handled.set)
        assert handled.wait(PATIENCE_S)
        counts.append(endpoint._rank.source.ungranted.num_held("tokens"))
    return counts


def check_shared_prefix() -> None:
    with worlds(Side("tp2", num_pages=128), Side(num_pages=128)) as world:
        for endpoint in world.source.endpoints:
            source = endpoint._rank.source
            source.ungranted.share_max = 0.25  # 32 pages, as of a pool of 64
        transfers = six_with_a_prefix(world)
        for transfer in transfers:
            transfer.send()
            transfer.offer((0, 2), (0, 44))
            transfer.offer((2, 4), (0, 44))
        assert num_held(world) == [16, 16]
        for num_left, transfer in zip(range(5, -1, -1), [*transfers[3:], *transfers[:3]], strict=True):
            transfer.receive()
            transfer.commit()
            transfer.check_ready()
            assert num_held(world) == [10 + num_left if num_left else 0] * 2


def test_requests_that_share_a_prefix_hold_its_pages_once() -> None:
    check_shared_prefix()


@pytest.mark.parametrize("kind", [TableLengths, KeepsShared, ReleasesTwice])
def test_a_wrong_count_breaks_requests_that_share_a_prefix(
    kind: type[UngrantedPages], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.session.copies.UngrantedPages", kind)
    with pytest.raises(AssertionError):
        check_shared_prefix()


@pytest.mark.parametrize(("share", "num_ready"), [(0.25, 1), (0.5, 2), (1.0, 4)])
def test_the_share_that_requests_without_a_grant_may_hold_is_a_setting(share: float, num_ready: int) -> None:
    side = Side(num_pages=16, options={"ungranted_share_max": share})
    with worlds(side, Side(num_pages=32)) as world:
        transfers = [world.transfer(Job(16)) for _ in range(4)]
        for transfer in transfers:
            transfer.send()
            transfer.offer((0, 4), (0, 16))
        for transfer in transfers[num_ready:]:
            cause = transfer.cause()
            assert (cause.why, cause.stage) == (Why.OUT_OF_PAGES, Stage.OFFER)
            assert f"a share of {share:g}; begin fewer at a time, or raise ungranted_share_max" in cause.text
        for transfer in transfers[:num_ready]:
            transfer.receive()
            transfer.commit()
            assert transfer.outcome() == Ready(AUX)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_a_share_outside_of_the_pool_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"ungranted_share_max .*: give a share of the pool in"):
        EndpointConfig("p0", Side().spec(CACHE), 0, b"secret", ungranted_share_max=share)
