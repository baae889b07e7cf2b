"""Processes that die or come back (rows 1, 2 and 3 of the fault list)."""

from __future__ import annotations

from baton.protocol.messages import Commit, Grant
from baton.protocol.outcomes import Failed, Ready, Why
from baton.sim.scenarios.play import Play, Scenario

LOST = (Why.PEER_LOST, Why.COPY_FAILED)


def _target_before(play: Play) -> None:
    play.at(0.005, play.kill, "D0", 1)
    play.ask_at(0.01)


def _nobody_asks(play: Play) -> None:
    play.is_failed(1, "source", Why.DEADLINE)


def _target_granted(play: Play) -> None:
    play.ask_at(0.01)
    play.when("sent", Grant, play.kill, "D0", 0)
    play.ask_at(0.2)


def _target_copying(play: Play) -> None:
    play.ask_at(0.01)
    play.when_written(play.kill, "D0", 1)
    play.ask_at(0.2)


def _source_gives_up(play: Play) -> None:
    play.is_failed(1, "source", *LOST)
    play.is_ready(2)


def _source_before(play: Play) -> None:
    play.ask_at(0.01)
    play.when("received", Grant, play.kill, "P0", 0)
    play.ask_at(0.2)


def _source_copying(play: Play) -> None:
    play.ask_at(0.01)
    play.when_written(play.kill, "P0", 1)
    play.ask_at(0.2)


def _target_gives_up(play: Play) -> None:
    play.is_failed(1, "target", *LOST)
    play.is_ready(2)


def _source_committed(play: Play) -> None:
    play.ask_at(0.01)
    play.when("sent", Commit, play.kill, "P0", 0, nth=2)
    play.ask_at(0.2)


def _all_or_nothing(play: Play) -> None:
    found = play.outcome(1, "target")
    is_lost = isinstance(found, Failed) and found.cause.why in LOST
    play.check(is_lost or isinstance(found, Ready), "neither ready nor lost", 1)
    play.is_ready(2)


def _restart(play: Play) -> None:
    play.world.instances["P0"].restart_s = 0.001
    play.world.instances["P0"].lingers = True
    play.ask_at(0.01)
    play.when_written(play.kill, "P0", 0)
    play.ask_at(0.03)
    for moment in range(20):
        play.at(0.03 + 0.002 * moment, _echo_all, play)
    play.ask_at(0.2)


def _echo_all(play: Play) -> None:
    """Everything that was said to the dead incarnation is said to the new one."""
    for end in play.world.network.standing():
        assert end.peer is not None
        for sender, _, message in list(play.world.network.past):
            one = end.peer if sender == end.host.process.instance else end
            if one.is_linked:
                one.host.process.do(one.deliver, message)


def _new_memory(play: Play) -> None:
    play.check(play.world.instances["P0"].num_lives == 2, "the source did not come back once")
    play.is_failed(1, "target", *LOST)
    play.is_ready(3)


SCENARIOS = (
    Scenario("target-dies-before", "the target dies before it asks", _target_before, _nobody_asks),
    Scenario("target-dies-granted", "the target dies when it has granted", _target_granted, _source_gives_up),
    Scenario("target-dies-copying", "the target dies while it is written", _target_copying, _source_gives_up),
    Scenario(
        "source-dies-before", "the source dies before its first layer", _source_before, _target_gives_up
    ),
    Scenario(
        "source-dies-copying", "the source dies in the middle of a layer", _source_copying, _target_gives_up
    ),
    Scenario(
        "source-dies-committed", "the source dies after its last write", _source_committed, _all_or_nothing
    ),
    Scenario(
        "source-restarts", "the source comes back at its address with new memory", _restart, _new_memory
    ),
)
