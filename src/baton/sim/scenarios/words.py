"""Messages that are lost, doubled or out of order (rows 7 and 8 of the fault list, and two of our own)."""

from __future__ import annotations

from baton.plan.execution import Bytes
from baton.protocol.messages import Abort, AnyMessage, AuxRecord, Commit, Grant, Landed, Settled
from baton.protocol.outcomes import Why
from baton.sim.network import Frame
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario, again, later, lost


def _verdict_lost(play: Play) -> None:
    play.bend(Settled, lost)
    play.ask_at(0.01)


def _all_twice(play: Play) -> None:
    for kind in (Grant, Landed, Commit, AuxRecord, Settled):
        play.bend(kind, again(0.003), times=100)
    play.ask_at(0.01)


def _commit_first(play: Play) -> None:
    play.bend(Landed, later(0.03), times=2)
    play.ask_at(0.01)


def _aux_last(play: Play) -> None:
    play.bend(AuxRecord, later(0.05))
    play.ask_at(0.01)


def _late_target(play: Play) -> None:
    """The decode leg reaches its instance long after the prefill is done."""
    target = play.world.instances["D0"]
    play.reroute("D0", lambda attempt: play.at(0.3, type(target).arrive, target, attempt))
    play.ask_at(0.01)


def _ready(play: Play) -> None:
    play.is_ready(1)


def _overtaken(play: Play) -> None:
    play.bend(Grant, later(0.05))
    play.when("sent", Grant, play.abort, 1, "target")
    play.ask_at(0.01)


def _delayed_again(play: Play) -> None:
    play.bend(Grant, again(0.25))
    play.when("received", Grant, play.abort, 1, "target")
    play.ask_at(0.01)
    play.ask_at(0.02)


def _asked_meanwhile(play: Play) -> None:
    """The abort is lost, so the target asks whether its grant is quiet before the grant is there."""
    play.bend(Grant, later(0.5))
    play.bend(Abort, lost, times=3)
    play.when("sent", Grant, play.abort, 1, "target")
    play.ask_at(0.01)


def _old_channel(play: Play) -> None:
    """A grant is lost with its connection, and comes by the next one."""
    kept: list[AnyMessage] = []

    def keep(frame: Frame) -> None:
        assert frame.message is not None
        kept.append(frame.message)
        lost(frame)

    play.bend(Grant, keep)
    play.when("sent", Grant, _break_all, play)
    play.ask_at(0.01)
    play.ask_at(0.1)
    play.at(0.15, _say_again, play, kept)


def _break_all(play: Play) -> None:
    for end in play.world.network.standing():
        play.world.network.sever(end)


def _say_again(play: Play, kept: list[AnyMessage]) -> None:
    for end in play.world.network.standing():
        assert end.peer is not None
        for message in kept:
            end.peer.host.process.do(end.peer.deliver, message)


def _first_lost(play: Play) -> None:
    play.is_failed(1, "target", Why.PEER_LOST)
    play.is_failed(1, "source", Why.PEER_LOST, Why.DEADLINE)
    play.is_ready(2)


def _never_written(play: Play) -> None:
    play.is_failed(1, "target", Why.ABORTED)
    play.is_failed(1, "source", Why.ABORTED, Why.DEADLINE)
    play.check(play.num_writes == 0, f"{play.num_writes} pieces were written after quiet was said")


def _bad_wire(play: Play) -> None:
    play.world.fabric.spoil = _flip
    play.ask_at(0.01)
    play.at(0.1, setattr, play.world.fabric, "spoil", None)
    play.ask_at(0.2)


def _flip(carried: Bytes) -> Bytes:
    spoilt = carried.copy()
    spoilt[0] ^= 1
    return spoilt


def _corrupted(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.CORRUPTED)
    play.is_ready(2)


def _nothing_written(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.ABORTED)
    play.check(play.num_writes == 0, f"{play.num_writes} pieces were written under a grant that was over")


def _one_given_up(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.ABORTED)
    play.is_ready(2)


VERIFIED = QUIET_OPTIONS.but(verified_share=1.0)

SCENARIOS = (
    Scenario("verdict-lost", "the verdict is lost once", _verdict_lost, _ready),
    Scenario("words-twice", "every word comes twice", _all_twice, _ready),
    Scenario("commit-first", "the commit overtakes the chunks", _commit_first, _ready),
    Scenario("aux-last", "the aux record comes last", _aux_last, _ready),
    Scenario("late-target", "the target asks after the prefill is done", _late_target, _ready),
    Scenario("grant-overtaken", "an abort overtakes its grant", _overtaken, _nothing_written),
    Scenario(
        "quiet-asked-then-grant",
        "a grant comes after its target asked for quiet",
        _asked_meanwhile,
        _never_written,
    ),
    Scenario("old-channel", "a grant comes by another channel than its own", _old_channel, _first_lost),
    Scenario("bad-wire", "a wire that flips bits, and checksums", _bad_wire, _corrupted, options=VERIFIED),
    Scenario("quiet-then-grant", "a grant comes again after quiet was said", _delayed_again, _one_given_up),
)
