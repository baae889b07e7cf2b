"""Messages that are lost, duplicated or out of order, and grants that are sent ahead of opening."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from baton.errors import ConfigError
from baton.plan.content import Bytes
from baton.protocol.messages import Abort, AuxRecord, Commit, Grant, Landed, Message, OutcomeQuery, Settled
from baton.protocol.outcomes import Ready, Why
from baton.sim.checkers import AllOpened
from baton.sim.network import SimFrame
from baton.sim.scenarios.run import PLAIN, UNENFORCED, WEAK, ScenarioRun, again, later, lost, scenario
from baton.sim.transport import CopyEnd

AHEAD = replace(PLAIN, strength=UNENFORCED)
AHEAD_WEAK = replace(PLAIN, strength=WEAK, faults_s=0.6)
THREE = (0.01, 0.1, 0.3)
SECOND_ABORTED = {1: Ready, 2: Why.ABORTED, 3: Ready}


@scenario(requests=(0.01,), ends={1: Ready})
def verdict_lost(run: ScenarioRun) -> None:
    """The outcome is lost once."""
    run.change_frames(Settled, lost)


@scenario(requests=(0.01,), ends={1: Ready})
def verdict_slow(run: ScenarioRun) -> None:
    """The outcome arrives after the progress deadline of a committed source."""
    run.change_frames(Commit, later(0.5), times=2)
    run.change_frames(Settled, later(0.35), times=10)


@scenario(requests=(0.01,), ends={1: Ready})
def messages_twice(run: ScenarioRun) -> None:
    """Every message arrives twice."""
    for kind in (Grant, Landed, Commit, AuxRecord, Settled):
        run.change_frames(kind, again(0.003), times=100)


@scenario(requests=(0.01,), ends={1: Ready})
def commit_first(run: ScenarioRun) -> None:
    """The commit overtakes the chunks."""
    run.change_frames(Landed, later(0.03), times=2)


@scenario(requests=(0.01,), ends={1: Ready})
def aux_last(run: ScenarioRun) -> None:
    """The aux record arrives last."""
    run.change_frames(AuxRecord, later(0.05))


@scenario(requests=(0.01,), ends={1: Ready})
def late_target(run: ScenarioRun) -> None:
    """The decode leg arrives long after the prefill is done."""
    run.delay_legs("D0", lambda attempt: 0.3)


@scenario(requests=(0.01,), ends={1: Why.ABORTED})
def grant_overtaken(run: ScenarioRun) -> Iterator[None]:
    """An abort overtakes its grant."""
    run.change_frames(Grant, later(0.05))
    run.when("sent", Grant, run.abort, 1, "target")
    yield
    run.check(run.num_writes == 0, f"{run.num_writes} pieces were written under a grant that was over")


@scenario(requests=(0.01,), ends={1: {"source": (Why.ABORTED, Why.DEADLINE), "target": Why.ABORTED}})
def quiet_asked_then_grant(run: ScenarioRun) -> Iterator[None]:
    """A grant arrives after its target asked for quiet."""
    run.change_frames(Grant, later(0.5))
    run.change_frames(Abort, lost, times=3)
    run.when("sent", Grant, run.abort, 1, "target")
    yield
    run.check(run.num_writes == 0, f"{run.num_writes} pieces were written after quiet was said")


@scenario(requests=(0.01, 0.02), ends={1: Why.ABORTED, 2: Ready})
def quiet_then_grant(run: ScenarioRun) -> None:
    """A grant arrives again after quiet was said."""
    run.change_frames(Grant, again(0.25))
    run.when("received", Grant, run.abort, 1, "target")


@scenario(
    requests=(0.01, 0.1),
    ends={1: {"source": (Why.PEER_LOST, Why.DEADLINE), "target": Why.PEER_LOST}, 2: Ready},
)
def old_channel(run: ScenarioRun) -> None:
    """A grant is lost with its connection, and arrives by the next one."""
    kept: list[Message] = []

    def keep(frame: SimFrame) -> None:
        assert frame.message is not None
        kept.append(frame.message)
        lost(frame)

    def deliver_kept() -> None:
        for end in run.world.network.standing():
            assert end.peer is not None
            for message in kept:
                end.peer.host.process.call(end.peer.deliver, message)

    run.change_frames(Grant, keep)
    run.when("sent", Grant, run.break_links)
    run.at(0.15, deliver_kept)


@scenario(
    requests=(0.01, 0.2),
    ends={1: Why.CORRUPTED, 2: Ready},
    options=replace(PLAIN, verified_share=1.0),
)
def bad_wire(run: ScenarioRun) -> None:
    """A wire flips bits, and checksums show it."""

    def flip(carried: Bytes) -> Bytes:
        corrupted = carried.copy()
        corrupted[0] ^= 1
        return corrupted

    run.world.fabric.corrupt = flip
    run.at(0.1, setattr, run.world.fabric, "corrupt", None)


# Grants that are sent ahead of opening, between ranks that have copied before.


def _ahead(run: ScenarioRun, act: Callable[..., object], *args: object) -> Iterator[None]:
    """Acts when the second grant is on its way, which the target's ranks have not opened yet."""
    run.when("sent", Grant, act, *args, nth=2)
    yield
    checker = run.checkers["all_opened"]
    assert isinstance(checker, AllOpened)
    run.check(checker.num_ahead >= 1, "no grant was sent ahead of opening")


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


@scenario(requests=THREE, ends={1: Ready, 2: Ready, 3: Ready}, options=AHEAD)
def granted_ahead(run: ScenarioRun) -> Iterator[None]:
    """Ranks that have copied before do not wait."""
    return _ahead(run, lambda: None)


@scenario(requests=THREE, ends={1: Ready, 2: Ready, 3: Ready}, options=AHEAD)
def written_unopened(run: ScenarioRun) -> Iterator[None]:
    """Everything is written before a rank has opened."""
    return _ahead(run, run.halt, "D0/1", 0.1)


@scenario(requests=THREE, ends={1: Ready, 2: Why.REFUSED_LAYOUT, 3: Ready}, options=AHEAD)
def unopened(run: ScenarioRun) -> Iterator[None]:
    """A rank cannot open a grant that was sent ahead."""
    return _ahead(run, _refuse_pages, run)


@scenario(
    requests=THREE,
    ends={1: Ready, 2: (Why.REFUSED_LAYOUT, Why.COPY_FAILED), 3: Ready},
    options=AHEAD_WEAK,
)
def unopened_late(run: ScenarioRun) -> Iterator[None]:
    """The same without revocation, and copies land later."""
    run.when("sent", Grant, partial(run.change_copies, "P0", CopyEnd.LATE, late_s=0.2), nth=2)
    run.at(0.29, run.world.fabric.faults.clear)
    return _ahead(run, _refuse_pages, run)


@scenario(requests=THREE, ends=SECOND_ABORTED, options=AHEAD_WEAK)
def unopened_target_aborts(run: ScenarioRun) -> Iterator[None]:
    """The target aborts before its ranks have opened."""
    return _ahead(run, run.abort, 2, "target")


@scenario(requests=THREE, ends=SECOND_ABORTED, options=AHEAD_WEAK)
def unopened_source_aborts(run: ScenarioRun) -> Iterator[None]:
    """The source aborts after everything is written and before a target rank has opened."""
    run.when("sent", Grant, run.world.schedule.after, 0.02, run.abort, 2, "source", nth=2)
    return _ahead(run, run.halt, "D0/1", 0.1)


@scenario(requests=THREE, ends=SECOND_ABORTED, options=AHEAD_WEAK)
def committed_source_aborts(run: ScenarioRun) -> Iterator[None]:
    """A committed source aborts, and cannot ask for the outcome."""
    run.change_frames(OutcomeQuery, lost, times=100)
    return unopened_source_aborts(run)
