"""Processes that die or come back, transfers that are aborted, and ranks that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.protocol.messages import Abort, Commit, Grant, Landed, Paths, Unquiet
from baton.protocol.outcomes import Failed, Ready, Why
from baton.sim.network import join_member
from baton.sim.scenarios.run import PLAIN, SIDES, WEAK, ScenarioInstance, ScenarioRun, lost, scenario, variant
from baton.sim.transport import CopyEnd

LOST = (Why.PEER_LOST, Why.COPY_FAILED)
PATIENT = replace(PLAIN, timings=replace(PLAIN.timings, copy_s=2.0, progress_s=4.0, total_s=6.0))
SOURCE_LOST, TARGET_LOST = {"source": LOST}, {"target": LOST}


# Deaths.


@scenario(requests=(0.01,), ends={1: {"source": Why.DEADLINE}})
def target_dies_before(run: ScenarioRun) -> None:
    """The target dies before it asks."""
    run.at(0.005, run.kill, "D0", 1)


@scenario(requests=(0.01, 0.2), ends={1: SOURCE_LOST, 2: Ready})
def target_dies_granted(run: ScenarioRun) -> None:
    """The target dies after it granted."""
    run.when("sent", Grant, run.kill, "D0", 0)


@scenario(requests=(0.01, 0.2), ends={1: SOURCE_LOST, 2: Ready})
def target_dies_copying(run: ScenarioRun) -> None:
    """The target dies while a source writes to it."""
    run.when_written(run.kill, "D0", 1)


@scenario(requests=(0.01, 0.2), ends={1: TARGET_LOST, 2: Ready})
def source_dies_before(run: ScenarioRun) -> None:
    """The source dies before its first layer."""
    run.when("received", Grant, run.kill, "P0", 0)


@scenario(requests=(0.01, 0.2), ends={1: TARGET_LOST, 2: Ready})
def source_dies_copying(run: ScenarioRun) -> None:
    """The source dies in the middle of a layer."""
    run.when_written(run.kill, "P0", 1)


@scenario(requests=(0.01, 0.2), ends={2: Ready})
def source_dies_committed(run: ScenarioRun) -> Iterator[None]:
    """The source dies after its last write."""
    run.when("sent", Commit, run.kill, "P0", 0, nth=2)
    yield
    outcome = run.outcome(1, "target")
    is_lost = isinstance(outcome, Failed) and outcome.cause.why in LOST
    run.check(is_lost or isinstance(outcome, Ready), "neither ready nor lost", 1)


@scenario(requests=(0.01, 0.03, 0.2), ends={1: TARGET_LOST, 3: Ready})
def source_restarts(run: ScenarioRun) -> Iterator[None]:
    """The source comes back at its address with new memory."""

    def echo_all() -> None:
        """The new incarnation gets every message that the dead one got."""
        for end in run.world.network.standing():
            assert end.peer is not None
            for sender, _, message in list(run.world.network.past):
                receiver = end.peer if sender == end.host.process.instance else end
                if receiver.is_linked:
                    receiver.host.process.call(receiver.deliver, message)

    run.world.instances["P0"].restart_s = 0.001
    run.world.instances["P0"].lingers = True
    run.when_written(run.kill, "P0", 0)
    for moment in range(20):
        run.at(0.03 + 0.002 * moment, echo_all)
    yield
    run.check(run.world.instances["P0"].num_lives == 2, "the source did not come back once")


# Aborts.


def _outlive(run: ScenarioRun) -> None:
    """Rank 1 of the target hangs while its instance dies, and is the first to attach to the next one."""
    instance = run.world.instances["D0"]
    incarnation, start, parties = instance.incarnation, instance.start, run.world.network.parties
    assert incarnation is not None
    host = incarnation.hosts[1]
    party = parties[host.name]

    def start_and_attach() -> None:
        start()
        assert instance.incarnation is not None
        assert instance.incarnation.coordinator is not None
        successor, parties[host.name] = parties[host.name], party
        join_member(host, instance.incarnation.coordinator, 0.0)
        parties[host.name] = successor
        run.world.schedule.after(0.05, host.process.resume)
        instance.start = start  # type: ignore[method-assign]

    instance.start = start_and_attach  # type: ignore[method-assign]
    host.process.halt()
    incarnation.processes.remove(host.process)
    del host.process.at_death[0]  # its end is none of the next incarnation
    run.kill("D0", 0)


@scenario(requests=(0.01, 0.4), ends={1: Ready, 2: Ready}, options=replace(PLAIN, epochless_share=1.0))
def rank_outlives(run: ScenarioRun) -> Iterator[None]:
    """A rank that learned its epoch outlives its instance and attaches to the next one."""
    run.at(0.15, _outlive, run)
    yield
    run.check(run.world.instances["D0"].num_lives == 2, "the target did not come back once")


@variant("target-aborts-weak", "the same without revocation", options=replace(PLAIN, strength=WEAK))
@scenario(requests=(0.01, 0.02, 0.05), ends={1: Why.ABORTED, 2: Ready, 3: Ready})
def target_aborts(run: ScenarioRun) -> None:
    """The target aborts while a source writes to it."""
    run.when_written(run.abort, 1, "target")


@scenario(requests=(0.01,), ends={1: Why.ABORTED}, options=replace(PLAIN, is_packing=True))
def abort_unpacking(run: ScenarioRun) -> None:
    """The target aborts while it unpacks."""
    run.world.network.job_s = 0.05
    run.when("received", Landed, run.abort, 1, "target")


@scenario(requests=(0.01, 0.05), ends={1: Why.ABORTED, 2: Ready})
def source_preempts(run: ScenarioRun) -> None:
    """The source takes pages away while they are copied."""
    run.when_written(run.abort, 1, "source")


@scenario(requests=(0.01,), ends={1: Why.ABORTED})
def abort_unmet(run: ScenarioRun) -> None:
    """The target aborts before it has reached the source, which learns of it."""
    run.at(0.0115, run.abort, 1, "target")


@scenario(ends={13: Ready})
def abort_storm(run: ScenarioRun) -> None:
    """A dozen clients go away at once."""
    for number in range(12):
        run.request_at(0.01 + 0.0005 * number, 4)
        run.at(0.012 + 0.0009 * number, run.abort, number + 1, *SIDES[number % 2 :])
    run.request_at(0.2)


# Ranks and copies that fail.


@scenario(requests=(0.01, 0.1), ends={1: Why.COPY_FAILED, 2: Ready})
def rank_fails(run: ScenarioRun) -> Iterator[None]:
    """One of several source ranks fails to copy."""
    run.change_copies("P0/1", CopyEnd.ERROR, times=1)
    yield
    _check_rank_named(run)


@scenario(
    requests=(0.01, 0.6),
    ends={1: Why.COPY_FAILED, 2: Ready},
    source=ScenarioInstance("pp2.tp2"),
    options=replace(PLAIN, strength=WEAK),
)
def rank_hangs(run: ScenarioRun) -> Iterator[None]:
    """One of several source ranks hangs, and its copy lands later."""
    run.change_copies("P0/1", CopyEnd.HANG, times=1, late_s=0.2)
    yield
    _check_rank_named(run)


def _check_rank_named(run: ScenarioRun) -> None:
    for side in SIDES:
        outcome = run.outcome(1, side)
        assert isinstance(outcome, Failed)
        run.check(outcome.cause.rank == 1, "the cause does not name rank 1", 1)


@scenario(
    requests=(0.01, 0.26),
    ends={1: Why.ABORTED, 2: Ready},
    options=replace(PLAIN, strength=WEAK, slowness=0.1),
)
def rank_joins_late(run: ScenarioRun) -> None:
    """A source rank begins to prefill after the target has aborted."""
    run.change_copies("P0", CopyEnd.DONE, duration_s=0.1)
    run.at(0.009, run.halt, "P0/1", 0.051)
    run.at(0.05, run.abort, 1, "target")
    run.at(0.25, run.world.fabric.faults.clear)


@scenario(requests=(0.01,), ends={1: Why.COPY_FAILED}, options=PATIENT)
def one_hangs(run: ScenarioRun) -> None:
    """One copy of a chunk fails at once while others hang."""
    run.change_copies("P0/0", CopyEnd.HANG, times=4, late_s=0.1)
    run.change_copies("P0/0", CopyEnd.ERROR, times=1)


@scenario(
    requests=(0.01, 0.1),
    ends={1: {"source": Why.COPY_FAILED, "target": (Why.ABORTED, Why.COPY_FAILED)}, 2: Ready},
    options=replace(PLAIN, strength=WEAK),
)
def doubt_stays(run: ScenarioRun) -> None:
    """A source that could not vouch for a grant does not call it quiet when asked again."""
    run.change_copies("P0", CopyEnd.LATE, times=1, late_s=0.4)
    run.change_frames(Abort, lost)
    run.change_frames(Unquiet, lost)
    run.at(0.05, run.abort, 1, "target")


@scenario(
    requests=(0.01, 0.11, 0.21),
    ends={1: Why.COPY_FAILED, 3: Ready},
    options=replace(PLAIN, verified_share=1.0),
)
def paths_lost(run: ScenarioRun) -> None:
    """A grant arrives without its paths."""
    run.change_frames(Paths, lost, times=2)


# Found by a seed.


@scenario(
    requests=(0.01, 0.025, 0.4),
    ends={1: Why.COPY_FAILED, 2: Why.COPY_FAILED, 3: Ready},
    source=ScenarioInstance("tp1"),
    target=ScenarioInstance("tp1"),
)
def turned_out_in_flight(run: ScenarioRun) -> None:
    """A writer is revoked while half of another transfer's copy has landed (seed 1018420).

    The second transfer's copies would have ended before their source learns of the revocation.
    """

    def recover() -> None:
        run.world.fabric.faults.clear()
        run.change_copies("P0", CopyEnd.DONE, duration_s=0.06, num_pieces=8)

    run.world.fabric.copy_s = 0.1
    run.change_copies("P0", CopyEnd.LATE, duration_s=0.04, late_s=0.5)
    run.at(0.022, recover)


@variant(
    "asked-while-draining",
    "a source that turned its ranks away is asked for the dp group",
    source=ScenarioInstance("dp2"),
)
@scenario(requests=(0.01, 0.31), ends={1: Ready, 2: Why.ABORTED}, options=PATIENT)
def granted_while_draining(run: ScenarioRun) -> None:
    """A grant arrives at a source that turned its ranks away (seed 1016035)."""

    def drain() -> None:
        incarnation = run.world.instances["P0"].incarnation
        assert incarnation is not None
        incarnation.drain()

    run.change_copies("P0", CopyEnd.DONE, duration_s=0.4)
    run.at(0.3, drain)
