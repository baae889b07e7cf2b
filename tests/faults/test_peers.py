"""A rank of either side is killed or stopped at every stage of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from tests.faults.fleet import FaultFleet
from tests.faults.stages import (
    SETTLE_S_MAX,
    TIMINGS,
    Fault,
    Stage,
    assert_hands_over,
    assert_nothing_under_way,
    bring_to,
    is_alive,
    named_segments,
    outcomes,
    workload_of,
)

from baton.bench.handoff.fleet import ask_all
from baton.protocol.outcomes import Why


@pytest.fixture(scope="module", params=["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def long_lived(request: pytest.FixtureRequest) -> Iterator[FaultFleet]:
    with FaultFleet(workload_of(request.param), TIMINGS) as found:
        yield found
        pids = [rank.pid for side in found.sides.values() for rank in side]
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.fixture
def fleet(long_lived: FaultFleet) -> FaultFleet:
    long_lived.mend()  # what one failed test left behind is no matter of the next
    return long_lived


def faults(side: str, *, is_stop: bool) -> list[Fault]:
    return [Fault(side, rank, is_stop) for rank in (0, 1)]


def can_be_known(stage: Stage, fault: Fault) -> bool:
    """A source whose transfer nobody has asked for has no peer that could be lost."""
    return not (stage is Stage.BEFORE_OFFER and fault.side == "target")


KILLS = faults("source", is_stop=False) + faults("target", is_stop=False)
CASES = [
    *((stage, fault) for stage, fault in product(Stage, KILLS) if can_be_known(stage, fault)),
    *product((Stage.MID_COPY, Stage.BEFORE_COMMIT), faults("source", is_stop=True)),
    *product((Stage.MID_COPY, Stage.AFTER_COMMIT), faults("target", is_stop=True)),
]


def marks(stage: Stage, fault: Fault) -> list[pytest.MarkDecorator]:
    """`make test` kills one rank of each side while copies are under way."""
    is_quick = stage is Stage.MID_COPY and fault.rank == 0 and not fault.is_stop
    return [] if is_quick else [pytest.mark.slow]


@pytest.mark.parametrize(
    ("stage", "fault"),
    [pytest.param(*case, id="-".join(map(str, case)), marks=marks(*case)) for case in CASES],
)
def test_peer_fails(fleet: FaultFleet, fault: Fault, stage: Stage) -> None:
    fleet.fill([0], salt=1)
    transfer = fleet.new_transfer()
    bring_to(fleet, stage, transfer)
    victims = list(fleet.sides[fault.side])
    assert not {name for child in victims for name in named_segments(child.pid)}, "they would stay"
    fault.strike(fleet)
    left = fault.survivors(fleet)
    found = outcomes(left, transfer, SETTLE_S_MAX)
    if stage is Stage.AFTER_VERDICT:
        assert [each["state"] for each in found] == ["ready"] * len(left)
    else:
        assert [each["state"] for each in found] == ["failed"] * len(left), found
        # A death is seen by its connections; only a peer that stands still is found by a deadline.
        assert fault.is_stop or all(each["why"] != Why.DEADLINE.value for each in found), found
    # One fate: the whole instance of the victim ends, and at once what had stopped.
    fault.victim(fleet).kill()
    assert all(child.wait(SETTLE_S_MAX) for child in victims)
    assert all(ask_all(left, "wait_released", transfer, SETTLE_S_MAX)), "no writer is left"
    fleet.end(fault.side)
    fleet.start(fault.side)
    assert_hands_over(fleet, salt=2)
    assert_nothing_under_way([*fleet.sources, *fleet.targets])


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_target_that_died_before_it_asked_is_not_missed(fleet: FaultFleet, rank: int) -> None:
    assert_hands_over(fleet, salt=1)
    fleet.fill([1], salt=3)
    transfer = fleet.new_transfer()
    for source in fleet.sources:
        source.ask("start", transfer, 1, fleet.salt(1, 3))
    Fault("target", rank, is_stop=False).strike(fleet)
    fleet.end("target")
    fleet.start("target")
    fleet.targets[0].ask("receive", transfer, 1)
    found = fleet.targets[0].ask("wait", transfer, SETTLE_S_MAX)
    assert found["state"] == "ready", found
    verdict = fleet.compare(1, 3)
    assert verdict.num_right == verdict.num_bytes > 0
    assert all(ask_all(fleet.sources, "wait_released", transfer, SETTLE_S_MAX))
    assert_nothing_under_way([*fleet.sources, *fleet.targets])
