"""Grants that go out ahead of opening: who gets them, and that nothing is ready or free too early for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from tests.session.handoff_world import PATIENCE_S, Job, Side, Transfer, World, until, without_leaks, worlds

from baton.errors import ConfigError
from baton.protocol.outcomes import Failed, Stage, Waiting, Why
from baton.transport import HostFence

ASKED = "the page table gives page 3 to two places of one prompt"


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


@contextmanager
def opening(world: World, before: Callable[[], None]) -> Iterator[None]:
    """Has something happen on target rank 1 before it opens a grant."""
    half = world.target.endpoints[1]._rank.target
    agree = half.agree

    def call(*args: Any) -> Any:
        before()
        return agree(*args)

    half.agree = call
    try:
        yield
    finally:
        del half.agree


def refuse(gate: threading.Event) -> None:
    """Lets a rank fail to open, when the gate is open."""
    gate.wait(PATIENCE_S)
    raise ConfigError(ASKED)


def begin(world: World, job: Job | None = None) -> Transfer:
    found = world.transfer(job)
    found.receive()
    found.send()
    return found


def is_granted(found: Transfer) -> bool:
    halves = [endpoint._rank.source for endpoint in found.world.source.endpoints]
    return any(found.id in half.transfers and half.transfers[found.id].grant for half in halves)


def has_opened(found: Transfer, rank: int) -> bool:
    return bool(found.world.target.endpoints[rank]._rank.target.grants)


def test_the_source_copies_before_a_rank_has_opened_and_nothing_is_ready_before_it_has() -> None:
    with worlds(Side("pp2"), Side("tp2"), transport="shm") as world:
        world.hand_off()
        world.check_idle()
        gate = threading.Event()
        with opening(world, lambda: gate.wait(PATIENCE_S) and None):
            found = begin(world)
            found.offer_all()
            found.commit()
            sources = world.source.endpoints
            until(lambda: is_granted(found), "a grant that went ahead")
            until(lambda: not any(one.reading() for one in found.sendings.values()), "every copy to land")
            until(lambda: not any(one.counts()["copies"] for one in sources), "every copy to end")
            until(lambda: has_opened(found, 0), "the other rank to open")
            assert isinstance(found.receiving.state, Waiting)
            gate.set()
            found.check_ready()


@pytest.mark.parametrize(
    ("transport", "job", "is_packing", "is_first"),
    [
        ("shm", Job(), False, True),
        ("shm", Job(is_verified=True), False, False),
        ("shm", Job(), True, False),
        ("tcp", Job(), False, False),
        ("memory", Job(), False, False),
    ],
    ids=["unknown path", "verified", "packed", "tcp", "memory"],
)
def test_who_has_to_wait_for_the_opening(transport: str, job: Job, is_packing: bool, is_first: bool) -> None:
    with worlds(Side("pp2"), Side("tp2"), transport=transport) as world:
        if not is_first:
            world.hand_off()
            world.check_idle()
        world.packs(is_packing)
        gate = threading.Event()
        with opening(world, lambda: gate.wait(PATIENCE_S) and None):
            found = begin(world, job)
            until(lambda: has_opened(found, 0), "the other rank to open")
            assert not is_granted(found)
            gate.set()
            found.offer_all()
            found.commit()
            found.check_ready()


def test_a_rank_that_cannot_open_fails_what_was_granted_ahead_and_the_pages_come_back() -> None:
    with worlds(Side("pp2"), Side("tp2"), transport="shm") as world:
        world.hand_off()
        world.check_idle()
        gate = threading.Event()
        with opening(world, partial(refuse, gate)):
            found = begin(world)
            found.offer((0, 2), (0, 21))
            until(lambda: is_granted(found), "a grant that went ahead")
            until(lambda: not any(one.reading() for one in found.sendings.values()), "a chunk to land")
            found.offer((2, 4), (0, 21), fence=HostFence())
            gate.set()
            cause = found.cause()
            assert (cause.why, cause.stage, cause.rank) == (Why.REFUSED_LAYOUT, Stage.GRANT, 1)
            assert ASKED in cause.text
        world.check_idle()
        world.hand_off()


def test_pages_of_a_lost_source_stay_until_the_rank_that_had_not_opened_has_answered_for_it() -> None:
    with worlds(Side("pp2"), Side("tp2"), transport="shm") as world:
        world.hand_off()
        world.check_idle()
        gate = threading.Event()
        guests = world.target.endpoints[1]._rank.target.writers
        with opening(world, partial(refuse, gate)):
            found = begin(world)
            until(lambda: is_granted(found), "a grant that went ahead")
            until(lambda: has_opened(found, 0), "the other rank to open")
            assert guests
            assert not any(guest.is_revoked for guest in guests.values())
            world.source.close()
            assert isinstance(found.receiving.wait(PATIENCE_S), Failed)
            assert not found.receiving.is_released, "a rank has not been asked yet"
            gate.set()
            assert found.receiving.wait_released(PATIENCE_S)
        until(lambda: not guests, "every guest to be gone")
        world.source = type(world.source)("p0", world.cache, world.source.side, world.transport)
        world.hand_off()
