"""Requests that the source preempts in the middle of their prefill, and resumes with other pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.protocol.messages import Commit, Grant
from baton.protocol.outcomes import Why
from baton.session.handles import Withdrawal
from baton.sim.engines import Job, SourceEngine
from baton.sim.router import Attempt
from baton.sim.scenarios.run import PLAIN, WEAK, ScenarioRun, Side, scenario
from baton.sim.transport import CopyEnd

SLOW_COPY_S = 0.02
NEVER_S = 60.0


def _preempt(run: ScenarioRun, resume_s: float | None = None) -> None:
    """Preempts the first request on every source rank, and resumes it a little later, or at a given time."""
    engine = run.world.instances["P0"].engine
    assert isinstance(engine, SourceEngine)
    job = engine.job_of(run.attempt(1).transfer)
    if job is not None:
        engine.preempt(job)
        if job.preemption is not None and resume_s is not None:
            job.preemption.resume_s = resume_s


def _count_landed(run: ScenarioRun) -> list[int]:
    """Grows by an entry for every withdrawal that is over: how many chunks it says have landed."""
    landed: list[int] = []

    def on_withdrawn(job: Job, rank: int, withdrawal: Withdrawal) -> None:
        landed.append(len(withdrawal.landed))

    run.world.listen("on_withdrawn", on_withdrawn)
    return landed


@scenario()
def preempted_ungranted(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted before its target has asked."""
    target = run.world.instances["D0"]

    def arrive_late(attempt: Attempt) -> None:
        run.world.schedule.after(0.1, type(target).arrive, target, attempt)

    landed = _count_landed(run)
    run.reroute("D0", arrive_late)
    run.request_at(0.01, 24)
    run.at(0.02, _preempt, run)
    yield
    run.expect_ready(1)
    run.check(landed == [0, 0], f"of a request without a grant {landed} landed", 1)


@scenario()
@scenario(
    "preempted-packed",
    "the same with packed chunks and checksums",
    options=replace(PLAIN, is_packing=True, verified_share=1.0),
)
@scenario(
    "preempted-tokens",
    "the same where tokens are cut over ranks on both sides",
    source=Side("cp2:split", page=8),
    target=Side("cp2:stripe1", page=3, num_pages=32),
)
@scenario(
    "preempted-state",
    "the same with recurrent state",
    source=Side("tp2", "hybrid"),
    target=Side("pp2", "hybrid"),
)
def preempted_copying(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted while its copies are under way, three times."""
    landed = _count_landed(run)
    run.world.fabric.copy_s = SLOW_COPY_S
    run.request_at(0.01, 24)
    run.request_at(0.012, 24)
    run.when_written(_preempt, run)
    for number in range(2):
        run.at(0.12 + 0.1 * number, _preempt, run)
    yield
    run.expect_ready(1, 2)
    run.check(len(landed) >= 2, "nothing was withdrawn", 1)


@scenario()
def preempted_committed(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted when one of its ranks has committed."""
    landed = _count_landed(run)
    run.request_at(0.01, 24)
    run.when("sent", Commit, _preempt, run)
    yield
    run.expect_ready(1)
    run.check(any(landed), "a committed rank has nothing landed", 1)


@scenario()
def preempted_aborted(run: ScenarioRun) -> Iterator[None]:
    """A target gives up while its source withdraws."""
    run.world.fabric.copy_s = SLOW_COPY_S
    run.request_at(0.01, 24)
    run.when_written(_preempt, run)
    run.when_written(run.abort, 1, "target")
    run.request_at(0.2, 24)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.expect_ready(2)


@scenario()
def preempted_cut_off(run: ScenarioRun) -> Iterator[None]:
    """The session is lost while a request is preempted."""

    def sever() -> None:
        for end in run.world.network.standing():
            run.world.network.sever(end)

    run.request_at(0.01, 24)
    run.when("received", Grant, _preempt, run, 0.1)
    run.at(0.05, sever)
    run.request_at(0.4, 24)
    yield
    run.expect_both_failed(1, Why.PEER_LOST)
    run.expect_ready(2)


@scenario()
@scenario(
    "preempted-doubt-weak", "the same without revocation", options=replace(PLAIN, strength=WEAK, faults_s=1.0)
)
def preempted_doubt(run: ScenarioRun) -> Iterator[None]:
    """Copies of a preempted request end in doubt, and write later."""
    run.change_copies("P0/1", CopyEnd.HANG, late_s=0.3)
    run.request_at(0.01, 24)
    run.at(0.05, _preempt, run)
    run.at(0.2, run.world.fabric.faults.clear)
    run.request_at(0.7, 24)
    yield
    run.expect_both_failed(1, Why.COPY_FAILED)
    run.expect_ready(2)


@scenario()
def preempted_for_long(run: ScenarioRun) -> Iterator[None]:
    """A preempted request is not resumed before the progress deadline."""
    run.request_at(0.01, 24)
    run.when("received", Grant, _preempt, run, NEVER_S)
    run.request_at(1.0, 24)
    yield
    run.expect_both_failed(1, Why.DEADLINE)
    run.expect_ready(2)
