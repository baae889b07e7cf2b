"""Requests that the source preempts in the middle of their prefill, and resumes with other pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.protocol.messages import Commit, Grant
from baton.protocol.outcomes import Ready, Why
from baton.session.handles import Withdrawal
from baton.sim.engines import EngineTransfer, SourceEngine
from baton.sim.scenarios.run import PLAIN, WEAK, ScenarioInstance, ScenarioRun, scenario, variant
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

    def on_withdrawn(job: EngineTransfer, rank: int, withdrawal: Withdrawal) -> None:
        landed.append(len(withdrawal.landed))

    run.world.listen("on_withdrawn", on_withdrawn)
    return landed


@scenario(requests=(0.01,), num_tokens=24, ends={1: Ready})
def preempted_ungranted(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted before its target has asked."""
    landed = _count_landed(run)
    run.delay_legs("D0", lambda attempt: 0.1)
    run.at(0.02, _preempt, run)
    yield
    run.check(landed == [0, 0], f"of a request without a grant {landed} landed", 1)


@variant(
    "preempted-state",
    "the same with recurrent state",
    source=ScenarioInstance("tp2", "hybrid"),
    target=ScenarioInstance("pp2", "hybrid"),
)
@variant(
    "preempted-tokens",
    "the same where tokens are cut over ranks on both sides",
    source=ScenarioInstance("cp2:split", page=8),
    target=ScenarioInstance("cp2:stripe1", page=3, num_pages=32),
)
@variant(
    "preempted-packed",
    "the same with packed chunks and checksums",
    options=replace(PLAIN, is_packing=True, verified_share=1.0),
)
@scenario(requests=(0.01, 0.012), num_tokens=24, ends={1: Ready, 2: Ready})
def preempted_copying(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted while its copies are under way, three times."""
    landed = _count_landed(run)
    run.world.fabric.copy_s = SLOW_COPY_S
    run.when_written(_preempt, run)
    for number in range(2):
        run.at(0.12 + 0.1 * number, _preempt, run)
    yield
    run.check(len(landed) >= 2, "nothing was withdrawn", 1)


@scenario(requests=(0.01,), num_tokens=24, ends={1: Ready})
def preempted_committed(run: ScenarioRun) -> Iterator[None]:
    """A request is preempted when one of its ranks has committed."""
    landed = _count_landed(run)
    run.when("sent", Commit, _preempt, run)
    yield
    run.check(any(landed), "a committed rank has nothing landed", 1)


@scenario(requests=(0.01, 0.2), num_tokens=24, ends={1: Why.ABORTED, 2: Ready})
def preempted_aborted(run: ScenarioRun) -> None:
    """A target gives up while its source withdraws."""
    run.world.fabric.copy_s = SLOW_COPY_S
    run.when_written(_preempt, run)
    run.when_written(run.abort, 1, "target")


@scenario(requests=(0.01, 0.4), num_tokens=24, ends={1: Why.PEER_LOST, 2: Ready})
def preempted_cut_off(run: ScenarioRun) -> None:
    """The session is lost while a request is preempted."""
    run.when("received", Grant, _preempt, run, 0.1)
    run.at(0.05, run.break_links)


@variant(
    "preempted-doubt-weak", "the same without revocation", options=replace(PLAIN, strength=WEAK, faults_s=1.0)
)
@scenario(requests=(0.01, 0.7), num_tokens=24, ends={1: Why.COPY_FAILED, 2: Ready})
def preempted_doubt(run: ScenarioRun) -> None:
    """Copies of a preempted request end in doubt, and write later."""
    run.change_copies("P0/1", CopyEnd.HANG, late_s=0.3)
    run.at(0.05, _preempt, run)
    run.at(0.2, run.world.fabric.faults.clear)


@scenario(requests=(0.01, 1.0), num_tokens=24, ends={1: Why.DEADLINE, 2: Ready})
def preempted_for_long(run: ScenarioRun) -> None:
    """A preempted request is not resumed before the progress deadline."""
    run.when("received", Grant, _preempt, run, NEVER_S)
