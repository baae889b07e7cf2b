"""Many transfers at once, many of them given up, and a registry that comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest
from tests.faults.fleet import FaultFleet, StormOptions
from tests.faults.stages import (
    SETTLE_S_MAX,
    TIMINGS,
    assert_hands_over,
    assert_nothing_under_way,
    is_alive,
    named_segments,
    until,
    workload_of,
)

from baton.bench.handoff.fleet import ask_all

NUM_SLOTS, NUM_ROUNDS = 50, 10


@pytest.fixture(scope="module")
def fleet() -> Iterator[FaultFleet]:
    workload = replace(workload_of("shm", 0.0), num_tokens=64, num_slots=NUM_SLOTS)
    # Ranks that run the load on their own may be seconds apart, on two slow cores: that is no failure.
    with FaultFleet(workload, replace(TIMINGS, progress_s=15.0)) as found:
        pids = [rank.pid for side in found.sides.values() for rank in side]
        yield found
        pids += [rank.pid for side in found.sides.values() for rank in side]
        assert not {name for pid in pids for name in named_segments(pid)}
    assert not [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize(
    "is_central",
    [
        pytest.param(True, id="one names all pages"),
        pytest.param(False, id="each rank its own", marks=pytest.mark.slow),
    ],
)
def test_abort_storm(fleet: FaultFleet, is_central: bool) -> None:
    assert_hands_over(fleet, salt=1)
    ranks, first = [*fleet.sources, *fleet.targets], fleet.targets[0]
    before = [rank.ask("num_descriptors") for rank in ranks]
    storm = StormOptions(
        f"storm{is_central}", NUM_SLOTS, NUM_ROUNDS, timeout_s=60.0, is_central=is_central, abort_s_max=0.002
    )
    callers = [*fleet.sources, *([first] if is_central else fleet.targets)]
    for rank in callers:
        share = 0.5 if rank.rank == 0 else 0.0  # of each side, which makes three quarters together
        rank.begin("storm", asdict(replace(storm, abort_share=share, seed=len(rank.side))))
    tallies = [rank.answer() for rank in callers]
    for tally in tallies:
        assert tally["held"] == [], "every page comes back"
        assert tally["failures"] == {}, "given up, or ready; nothing else"
        assert tally["num_ready"] + tally["num_aborted"] == NUM_SLOTS * NUM_ROUNDS
        # Many are ready before the moment comes at which they were to be given up.
        assert tally["num_aborted"] > NUM_SLOTS * NUM_ROUNDS / 10
        assert tally["num_ready"] > NUM_SLOTS * NUM_ROUNDS / 10
    assert tallies[-1]["num_right"] == tallies[-1]["num_bytes"] > 0, "survivors are right"
    for slot, salt in tallies[-1]["last"]:
        assert all(total == right > 0 for total, right in ask_all(fleet.targets, "compare", slot, salt))
    assert_nothing_under_way(ranks)
    assert_hands_over(fleet, salt=2)
    for rank, num in zip(ranks, before, strict=True):
        until(
            lambda rank=rank, num=num: rank.ask("num_descriptors") <= num,
            SETTLE_S_MAX,
            f"{rank.name} has closed what it opened",
        )


@pytest.mark.slow
def test_registry_restarts(fleet: FaultFleet) -> None:
    assert fleet.registry is not None
    assert_hands_over(fleet, salt=3)
    fleet.registry.stop()
    assert_hands_over(fleet, salt=4)  # who knows each other needs no registry
    fleet.end("source")
    fleet.registry.start()
    fleet.start("source")
    assert_hands_over(fleet, salt=5)
    fleet.registry.stop()
    fleet.registry.start()
    fleet.end("target")
    fleet.start("target")
    assert_hands_over(fleet, salt=6)


@pytest.mark.slow
def test_a_transfer_waits_for_the_registry(fleet: FaultFleet) -> None:
    assert fleet.registry is not None
    fleet.registry.stop()
    fleet.end("target")
    transfer = fleet.new_transfer()
    fleet.registry.start()
    fleet.start("target")
    fleet.fill([1], salt=7)
    first = fleet.targets[0]
    first.ask("receive", transfer, 1)
    for rank in fleet.sources:
        rank.ask("start", transfer, 1, fleet.salt(1, 7))
    assert first.ask("wait", transfer, SETTLE_S_MAX)["state"] == "ready"
    assert fleet.compare(1, 7).num_right > 0
