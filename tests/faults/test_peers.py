"""A rank of either side is killed or stopped at every stage of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from tests.faults.stages import (
    DEADLINE_S,
    SETTLE_S_MAX,
    TIMINGS,
    Fault,
    Stage,
    assert_hands_over,
    assert_nothing_under_way,
    bring_to,
    is_alive,
    outcomes,
    scene_of,
    shared_segments,
)

from baton.bench.handoff.fleet import Fleet, ask_all

KNOWN_S_MAX = 1.0
"""From a peer's death to the failure at the caller."""
TRIES = 3


@pytest.fixture(scope="module", params=["shm", "tcp"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    segments = shared_segments()
    with Fleet(scene_of(request.param), TIMINGS) as found:
        pids = []
        yield found
        pids = [rank.child.pid for side in found.sides.values() for rank in side]
    assert not [pid for pid in pids if is_alive(pid)]
    assert shared_segments() <= segments


FAULTS = [
    Fault(side, rank, is_stop)
    for side, rank, is_stop in product(("source", "target"), (0, 1), (False, True))
    # A stopped coordinator and a stopped rank are found by the same silence; one of each side is enough.
    if not (is_stop and rank == 0 and side == "target")
]


@pytest.mark.parametrize("stage", list(Stage), ids=lambda stage: stage.name.lower())
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_peer_fails(fleet: Fleet, fault: Fault, stage: Stage) -> None:
    fleet.fill([0], salt=1)
    transfer = fleet.new_transfer()
    bring_to(fleet, stage, transfer)
    victims = [rank.child for rank in fleet.sides[fault.side]]
    struck_s = fault.strike(fleet)
    left = fault.survivors(fleet)
    found = outcomes(left, transfer, SETTLE_S_MAX)
    known_s = max(each["at_s"] for each in found) - struck_s
    if stage is Stage.AFTER_VERDICT:
        assert [each["state"] for each in found] == ["ready"] * len(left)
    else:
        assert [each["state"] for each in found] == ["failed"] * len(left), found
        assert known_s <= (DEADLINE_S + 1.0 if fault.is_stop else KNOWN_S_MAX), found
    # One fate: the whole instance of the victim ends, and at once what had stopped.
    fault.victim(fleet).child.kill()
    assert all(child.await_end(SETTLE_S_MAX) for child in victims)
    assert all(ask_all(left, "wait_released", transfer, SETTLE_S_MAX)), (
        "pages come back once writers are dead"
    )
    fleet.end(fault.side)
    fleet.start(fault.side)
    assert_hands_over(fleet, slot=0, salt=2)
    assert_nothing_under_way([*fleet.sources, *fleet.targets])
