"""Messages that are lost, duplicated or out of order, and grants that are sent ahead of opening."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from baton.errors import ConfigError
from baton.plan.content import Bytes
from baton.protocol.messages import Abort, AuxRecord, Commit, Grant, Landed, Message, OutcomeQuery, Settled
from baton.protocol.outcomes import Why
from baton.sim.checkers import AllOpened
from baton.sim.network import SimFrame
from baton.sim.scenarios.run import PLAIN, UNENFORCED, WEAK, ScenarioRun, again, later, lost, scenario
from baton.sim.transport import CopyEnd

AHEAD = replace(PLAIN, strength=UNENFORCED)
AHEAD_WEAK = replace(PLAIN, strength=WEAK, faults_s=0.6)


@scenario()
def verdict_lost(run: ScenarioRun) -> Iterator[None]:
    """The outcome is lost once."""
    run.change_frames(Settled, lost)
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def verdict_slow(run: ScenarioRun) -> Iterator[None]:
    """The outcome arrives after the progress deadline of a committed source."""
    run.change_frames(Commit, later(0.5), times=2)
    run.change_frames(Settled, later(0.35), times=10)
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def messages_twice(run: ScenarioRun) -> Iterator[None]:
    """Every message arrives twice."""
    for kind in (Grant, Landed, Commit, AuxRecord, Settled):
        run.change_frames(kind, again(0.003), times=100)
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def commit_first(run: ScenarioRun) -> Iterator[None]:
    """The commit overtakes the chunks."""
    run.change_frames(Landed, later(0.03), times=2)
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def aux_last(run: ScenarioRun) -> Iterator[None]:
    """The aux record arrives last."""
    run.change_frames(AuxRecord, later(0.05))
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def late_target(run: ScenarioRun) -> Iterator[None]:
    """The decode leg arrives long after the prefill is done."""
    target = run.world.instances["D0"]
    run.reroute("D0", lambda attempt: run.at(0.3, type(target).arrive, target, attempt))
    run.request_at(0.01)
    yield
    run.expect_ready(1)


@scenario()
def grant_overtaken(run: ScenarioRun) -> Iterator[None]:
    """An abort overtakes its grant."""
    run.change_frames(Grant, later(0.05))
    run.when("sent", Grant, run.abort, 1, "target")
    run.request_at(0.01)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.check(run.num_writes == 0, f"{run.num_writes} pieces were written under a grant that was over")


@scenario()
def quiet_asked_then_grant(run: ScenarioRun) -> Iterator[None]:
    """A grant arrives after its target asked for quiet."""
    run.change_frames(Grant, later(0.5))
    run.change_frames(Abort, lost, times=3)
    run.when("sent", Grant, run.abort, 1, "target")
    run.request_at(0.01)
    yield
    run.expect_failed(1, "target", Why.ABORTED)
    run.expect_failed(1, "source", Why.ABORTED, Why.DEADLINE)
    run.check(run.num_writes == 0, f"{run.num_writes} pieces were written after quiet was said")


@scenario()
def quiet_then_grant(run: ScenarioRun) -> Iterator[None]:
    """A grant arrives again after quiet was said."""
    run.change_frames(Grant, again(0.25))
    run.when("received", Grant, run.abort, 1, "target")
    run.request_at(0.01)
    run.request_at(0.02)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.expect_ready(2)


@scenario()
def old_channel(run: ScenarioRun) -> Iterator[None]:
    """A grant is lost with its connection, and arrives by the next one."""
    kept: list[Message] = []
    network = run.world.network

    def keep(frame: SimFrame) -> None:
        assert frame.message is not None
        kept.append(frame.message)
        lost(frame)

    def break_all() -> None:
        for end in network.standing():
            network.sever(end)

    def deliver_kept() -> None:
        for end in network.standing():
            assert end.peer is not None
            for message in kept:
                end.peer.host.process.call(end.peer.deliver, message)

    run.change_frames(Grant, keep)
    run.when("sent", Grant, break_all)
    run.request_at(0.01)
    run.request_at(0.1)
    run.at(0.15, deliver_kept)
    yield
    run.expect_failed(1, "target", Why.PEER_LOST)
    run.expect_failed(1, "source", Why.PEER_LOST, Why.DEADLINE)
    run.expect_ready(2)


@scenario(options=replace(PLAIN, verified_share=1.0))
def bad_wire(run: ScenarioRun) -> Iterator[None]:
    """A wire flips bits, and checksums show it."""

    def flip(carried: Bytes) -> Bytes:
        corrupted = carried.copy()
        corrupted[0] ^= 1
        return corrupted

    run.world.fabric.corrupt = flip
    run.request_at(0.01)
    run.at(0.1, setattr, run.world.fabric, "corrupt", None)
    run.request_at(0.2)
    yield
    run.expect_both_failed(1, Why.CORRUPTED)
    run.expect_ready(2)


# Grants that are sent ahead of opening, between ranks that have copied before.


def _request_three(run: ScenarioRun, when_ahead: Callable[[], object] | None = None) -> None:
    """Acts when the second grant is on its way, which the target's ranks have not opened yet."""
    run.request_at(0.01)
    run.request_at(0.1)
    run.request_at(0.3)
    if when_ahead is not None:
        run.when("sent", Grant, when_ahead, nth=2)


def _expect_ahead(run: ScenarioRun) -> None:
    checker = run.checkers["all_opened"]
    assert isinstance(checker, AllOpened)
    run.check(checker.num_ahead >= 1, "no grant was sent ahead of opening")


def _expect_second_failed(run: ScenarioRun, *whys: Why) -> None:
    _expect_ahead(run)
    run.expect_both_failed(2, *whys)
    run.expect_ready(1, 3)


def _halt_rank(run: ScenarioRun) -> None:
    """A target rank halts before it gets the grant; meanwhile everything is copied and committed."""
    process = next(process for process in run.world.instances["D0"].processes if process.name == "D0/1")
    process.halt()
    run.world.schedule.after(0.1, process.resume)


def _refuse_pages(run: ScenarioRun) -> None:
    """Rank 1 refuses its pages, once."""
    incarnation = run.world.instances["D0"].incarnation
    assert incarnation is not None
    half = incarnation.drivers[1].target
    agree = half.agree

    def refuse(*args: object) -> None:
        half.agree = agree  # type: ignore[method-assign]
        raise ConfigError("the page table gives page 3 to two places of one prompt")

    half.agree = refuse  # type: ignore[method-assign, assignment]


@scenario(options=AHEAD)
def granted_ahead(run: ScenarioRun) -> Iterator[None]:
    """Ranks that have copied before do not wait."""
    _request_three(run)
    yield
    _expect_ahead(run)
    run.expect_ready(1, 2, 3)


@scenario(options=AHEAD)
def written_unopened(run: ScenarioRun) -> Iterator[None]:
    """Everything is written before a rank has opened."""
    _request_three(run, partial(_halt_rank, run))
    yield
    _expect_ahead(run)
    run.expect_ready(1, 2, 3)


@scenario(options=AHEAD)
def unopened(run: ScenarioRun) -> Iterator[None]:
    """A rank cannot open a grant that was sent ahead."""
    _request_three(run, partial(_refuse_pages, run))
    yield
    _expect_second_failed(run, Why.REFUSED_LAYOUT)


@scenario(options=AHEAD_WEAK)
def unopened_late(run: ScenarioRun) -> Iterator[None]:
    """The same without revocation, and copies land later."""
    _request_three(run, partial(_refuse_pages, run))
    run.when("sent", Grant, partial(run.change_copies, "P0", CopyEnd.LATE, late_s=0.2), nth=2)
    run.at(0.29, run.world.fabric.faults.clear)
    yield
    _expect_second_failed(run, Why.REFUSED_LAYOUT, Why.COPY_FAILED)


@scenario(options=AHEAD_WEAK)
def unopened_target_aborts(run: ScenarioRun) -> Iterator[None]:
    """The target aborts before its ranks have opened."""
    _request_three(run, partial(run.abort, 2, "target"))
    yield
    _expect_second_failed(run, Why.ABORTED)


@scenario(options=AHEAD_WEAK)
def unopened_source_aborts(run: ScenarioRun) -> Iterator[None]:
    """The source aborts after everything is written and before a target rank has opened."""
    _request_three(run, partial(_halt_rank, run))
    run.when("sent", Grant, partial(run.world.schedule.after, 0.02, run.abort, 2, "source"), nth=2)
    yield
    _expect_second_failed(run, Why.ABORTED)


@scenario(options=AHEAD_WEAK)
def committed_source_aborts(run: ScenarioRun) -> Iterator[None]:
    """A committed source aborts, and cannot ask for the outcome."""
    run.change_frames(OutcomeQuery, lost, times=100)
    yield from unopened_source_aborts(run)
