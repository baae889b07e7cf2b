"""A page is given to one transfer at a time, and what was sampled is known before the pages are there."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest
from tests.session.handoff_world import AUX, PATIENCE_S, Job, Side, Transfer, World, without_leaks, worlds

from baton.errors import ConfigError
from baton.protocol.outcomes import Failed, Waiting, Why
from baton.session import Handle
from baton.session.handles import Receiving
from baton.transport import HostFence


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    yield from without_leaks()


def share(one: Transfer, other: Transfer, entries: slice, rank: int = 0) -> None:
    """Another transfer names some pages of this one."""
    for group, pages in other.target_tables[rank].items():
        pages[entries] = one.target_tables[rank][group][entries]


# Pages.


@pytest.mark.parametrize("rank", [0, 1], ids=["own rank", "another rank"])
def test_a_page_of_a_live_transfer_is_refused_until_that_is_released(rank: int) -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        first, second = world.transfer(), world.transfer()
        share(first, second, slice(2, 3), rank)
        page = next(iter(first.target_tables[rank].values()))[2]
        first.receive()
        with pytest.raises(ConfigError, match=rf"t1: page {page} of group .* on rank {rank} .* transfer t0;"):
            second.receive()
        finish(first)
        first.check_ready()
        second.receive()
        finish(second)
        second.check_ready()


def test_a_page_is_free_again_after_a_failure() -> None:
    with worlds(Side(), Side()) as world:
        first, second = world.transfer(), world.transfer()
        share(first, second, slice(0, 1))
        first.receive().abort("changed its mind")
        assert first.cause().why is Why.ABORTED
        second.receive()
        finish(second)
        second.check_ready()


def test_pages_of_a_held_prefix_may_be_shared_if_nobody_writes_them() -> None:
    with worlds(Side(), Side()) as world:
        held = Job(held=dict.fromkeys(world.cache.groups, 8))
        first, second, writer = world.transfer(held), world.transfer(held), world.transfer()
        share(first, second, slice(0, 2))
        share(first, writer, slice(1, 2))
        first.receive()
        second.receive()
        with pytest.raises(ConfigError, match=r"t2: page \d+ of .* transfer t[01];"):
            writer.receive()
        for found in (first, second):
            finish(found)
            assert found.outcome()
        writer.receive()
        late = world.transfer(held)
        share(writer, late, slice(0, 1))
        with pytest.raises(ConfigError, match=r"t3: page \d+ of .* transfer t2;"):
            late.receive()
        finish(writer)
        writer.check_ready()


def test_a_live_id_is_refused_for_that_whatever_its_pages() -> None:
    with worlds(Side(), Side()) as world:
        found = world.transfer()
        found.receive()
        again = world.target.first.receive(found.request([0]))
        state = again.wait(PATIENCE_S)
        assert isinstance(state, Failed)
        assert state.cause.why is Why.REFUSED_LIVE_ID
        finish(found)
        found.check_ready()


def finish(found: Transfer) -> None:
    """The source's part."""
    found.send()
    found.offer_all()
    found.commit()


# The aux record.


def begin(world: World, fence: HostFence) -> tuple[Transfer, queue.Queue[Handle]]:
    """A transfer that is sampled, and whose copies wait for a fence."""
    changed: queue.Queue[Handle] = queue.Queue()
    world.target.first.on_change(changed.put)
    found = world.transfer()
    found.receive()
    found.send()
    found.offer((0, 4), (0, 21), fence=fence)
    found.commit()
    return found, changed


def test_the_aux_record_is_known_before_the_pages_are_there() -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        fence = HostFence()
        found, changed = begin(world, fence)
        receiving = changed.get(timeout=PATIENCE_S)
        assert receiving is found.receiving
        assert isinstance(receiving, Receiving)
        assert receiving.early == AUX
        assert receiving.state == Waiting()
        fence.set()
        found.check_ready()


def test_a_transfer_may_fail_after_its_aux_record_came() -> None:
    with worlds(Side("tp2"), Side("tp2")) as world:
        found, changed = begin(world, HostFence())
        assert changed.get(timeout=PATIENCE_S) is found.receiving
        found.sendings[0].abort("pulled the plug")
        assert found.cause().why is Why.ABORTED
        assert found.receiving.early == AUX
