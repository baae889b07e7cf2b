"""Grants that go out ahead of opening, between ranks that have come to know each other."""

from __future__ import annotations

from functools import partial

from baton.errors import ConfigError
from baton.protocol.messages import Grant
from baton.protocol.outcomes import Why
from baton.sim.checkers.all_opened import AllOpened
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario
from baton.sim.transport.endpoint import Strength
from baton.sim.transport.fate import End

FREE = QUIET_OPTIONS.but(strength=Strength(can_enforce_grants=False))
WEAK = QUIET_OPTIONS.but(strength=Strength(can_enforce_grants=False, can_revoke=False), faults_s=0.6)


def _three(play: Play) -> None:
    play.ask_at(0.01)
    play.ask_at(0.1)
    play.ask_at(0.3)


def _when_ahead(play: Play, act: partial[None]) -> None:
    """Has something happen as soon as the second grant is on its way: its ranks have not opened yet."""
    _three(play)
    play.when("sent", Grant, act, nth=2)


def _slow_to_open(play: Play) -> None:
    """A rank stops before it hears of the grant; meanwhile everything is copied and committed."""
    _when_ahead(play, partial(_halt_rank, play))


def _halt_rank(play: Play) -> None:
    process = next(found for found in play.world.instances["D0"].processes if found.name == "D0/1")
    process.stop()
    play.world.schedule.after(0.1, process.go_on)


def _cannot_open(play: Play) -> None:
    _when_ahead(play, partial(_spoil, play))


def _cannot_open_late(play: Play) -> None:
    """The same, and the source cannot vouch for what it has begun to write."""
    _when_ahead(play, partial(_spoil, play))
    play.when("sent", Grant, partial(play.strike, "P0", End.LATE, late_s=0.2), nth=2)
    play.at(0.29, play.world.fabric.faults.clear)


def _spoil(play: Play) -> None:
    """Rank 1 will not find its pages to be what the plan needs, once."""
    incarnation = play.world.instances["D0"].incarnation
    assert incarnation is not None
    half = incarnation.drivers[1].target
    agree = half.agree

    def refuse(*args: object) -> None:
        half.agree = agree  # type: ignore[method-assign]
        raise ConfigError("the page table gives page 3 to two places of one prompt")

    half.agree = refuse  # type: ignore[method-assign, assignment]


def _target_gives_up(play: Play) -> None:
    _when_ahead(play, partial(play.abort, 2, "target"))


def _source_gives_up(play: Play) -> None:
    """Everything is written and committed, and a rank has not opened."""
    _slow_to_open(play)
    play.when("sent", Grant, partial(play.world.schedule.after, 0.02, play.abort, 2, "source"), nth=2)


def _went_ahead(play: Play) -> None:
    found = play.world.checkers.all["all_opened"]
    assert isinstance(found, AllOpened)
    play.check(found.num_ahead >= 1, "no grant went out ahead of opening")


def _all_ready(play: Play) -> None:
    _went_ahead(play)
    for number in (1, 2, 3):
        play.is_ready(number)


def _second_fails(play: Play, *whys: Why) -> None:
    _went_ahead(play)
    for side in ("source", "target"):
        play.is_failed(2, side, *whys)
    play.is_ready(1)
    play.is_ready(3)


def _refused(play: Play) -> None:
    _second_fails(play, Why.REFUSED_LAYOUT)


def _refused_or_failed(play: Play) -> None:
    _second_fails(play, Why.REFUSED_LAYOUT, Why.COPY_FAILED)


def _aborted(play: Play) -> None:
    _second_fails(play, Why.ABORTED)


SCENARIOS = (
    Scenario("granted-ahead", "ranks that know each other do not wait", _three, _all_ready, options=FREE),
    Scenario(
        "written-unopened", "all is written before a rank has opened", _slow_to_open, _all_ready, options=FREE
    ),
    Scenario("unopened", "a rank cannot open what was granted ahead", _cannot_open, _refused, options=FREE),
    Scenario(
        "unopened-late",
        "the same where nobody can be stopped, and copies land later",
        _cannot_open_late,
        _refused_or_failed,
        options=WEAK,
    ),
    Scenario(
        "unopened-target-aborts",
        "the target gives up before its ranks have opened",
        _target_gives_up,
        _aborted,
        options=WEAK,
    ),
    Scenario(
        "unopened-source-aborts",
        "the source gives up before the target's ranks have opened",
        _source_gives_up,
        _aborted,
        options=WEAK,
    ),
)
