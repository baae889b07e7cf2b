"""Books that were tampered with, and what the check says of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine.scheduler.test_scheduler import make, make_scheduler, step

from baton.engine.scheduler import Scheduler
from baton.engine.sequence import SequenceRole, SequenceStatus

Tamper = Callable[[Scheduler], None]


def running() -> Scheduler:
    """Two answers of one prompt in flight, one that was sent, one that is received, one that waits."""
    scheduler = make_scheduler(tokens=24)
    scheduler.add(make(1, 6, n=2))
    scheduler.add(make(2, 4, SequenceRole.SOURCE))
    step(scheduler)
    scheduler.fork(1, [2], [11])
    scheduler.reserve(make(3, 5, SequenceRole.TARGET))
    scheduler.schedule()
    scheduler.add(make(4, 5))
    scheduler.check_integrity()
    return scheduler


def _lose_a_page(scheduler: Scheduler) -> None:
    scheduler.sequences[3].pages["tokens"].pop()


def _take_a_free_page(scheduler: Scheduler) -> None:
    scheduler.sequences[3].pages["tokens"].append(scheduler.kv_cache.pools["tokens"]._free[0])


def _swap_pages(scheduler: Scheduler) -> None:
    mine, other = scheduler.sequences[3].pages["tokens"], scheduler.sequences[2].pages["tokens"]
    scheduler.kv_cache.pools["tokens"].hold(other[:1])
    mine.append(other[0])


def _repeat_a_page(scheduler: Scheduler) -> None:
    pages = scheduler.sequences[3].pages["tokens"]
    scheduler.kv_cache.pools["tokens"].hold(pages[:1])
    pages.append(pages[0])


def _share_a_partial_page(scheduler: Scheduler) -> None:
    parent, child = scheduler.sequences[1], scheduler.sequences[11]
    scheduler.kv_cache.pools["tokens"].free(child.pages["tokens"][1:])
    scheduler.kv_cache.pools["tokens"].hold(parent.pages["tokens"][1:])
    child.pages["tokens"][1:] = parent.pages["tokens"][1:]
    for batch in scheduler.in_flight:
        batch.sequences[1].pages["tokens"][1:] = child.pages["tokens"][1:]


def _free_a_held_page(scheduler: Scheduler) -> None:
    scheduler.kv_cache.pools["tokens"].free(scheduler.sequences[3].pages["tokens"][:1])


def _forget_a_flight(scheduler: Scheduler) -> None:
    scheduler.sequences[1].num_in_flight = 0
    scheduler.sequences[1].num_scheduled = scheduler.sequences[1].num_computed


def _be_in_two_states(scheduler: Scheduler) -> None:
    scheduler.sequences[4].status = SequenceStatus.ENDED


def _wait_with_pages(scheduler: Scheduler) -> None:
    scheduler.sequences[3].status = SequenceStatus.WAITING


def _forget_a_waiting_one(scheduler: Scheduler) -> None:
    scheduler.waiting.clear()


def _compute_ahead(scheduler: Scheduler) -> None:
    scheduler.sequences[1].num_computed += 1


def _skip_a_token(scheduler: Scheduler) -> None:
    scheduler.sequences[1].generated.append(0)


def _drop_the_lease(scheduler: Scheduler) -> None:
    scheduler.sequences[2].is_leased = False


def _pass_a_page(scheduler: Scheduler) -> None:
    scheduler.sequences[3].num_freed["tokens"] = 1


def _unpin(scheduler: Scheduler) -> None:
    scheduler.kv_cache.prefixes.unpin(scheduler.sequences[1].prefix_node)


def _count_idle_wrongly(scheduler: Scheduler) -> None:
    scheduler.kv_cache.prefixes.num_idle += 1


def _lose_a_unit(scheduler: Scheduler) -> None:
    scheduler.kv_cache.prefixes._nodes.clear()


TAMPERS: dict[Tamper, str] = {
    _lose_a_page: "has 0 references, 1 are counted",
    _take_a_free_page: "has 1 references, 0 are counted",
    _swap_pages: "is entry 0 of sequence 2",
    _repeat_a_page: "is also its entry 0",
    _share_a_partial_page: "shared and still written",
    _free_a_held_page: "has 1 references, 0 are counted",
    _forget_a_flight: "is in 1 batches, 0 are counted",
    _be_in_two_states: "without a reason",
    _wait_with_pages: "has pages, a lease or a batch",
    _forget_a_waiting_one: r"sequences \[\] are in the queue, \[4\]",
    _compute_ahead: "has 7 of 7 computed",
    _skip_a_token: "has 6 of 8 computed",
    _drop_the_lease: "or no lease",
    _pass_a_page: "its window begins at 0",
    _unpin: "pins, 2 sequences pin it",
    _count_idle_wrongly: "units are idle",
    _lose_a_unit: "no longer cached",
}


@pytest.mark.parametrize("tamper", TAMPERS, ids=lambda tamper: tamper.__name__.lstrip("_"))
def test_is_seen(tamper: Tamper) -> None:
    scheduler = running()
    tamper(scheduler)
    with pytest.raises(AssertionError, match=TAMPERS[tamper]):
        scheduler.check_integrity()
