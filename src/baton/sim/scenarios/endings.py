"""Transfers that somebody ends, and ranks that fail (rows 4, 5, 6, 11 and 16 of the fault list)."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.messages import Abort, Paths, Unquiet
from baton.protocol.outcomes import Failed, Why
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario, Side, lost
from baton.sim.transport.endpoint import Strength
from baton.sim.transport.fate import End

WEAK = QUIET_OPTIONS.but(strength=Strength(can_enforce_grants=False, can_revoke=False))
PATIENT = QUIET_OPTIONS.but(timings=replace(QUIET_OPTIONS.timings, copy_s=2.0, progress_s=4.0, total_s=6.0))
VERIFIED = QUIET_OPTIONS.but(verified_share=1.0)


def _target_aborts(play: Play) -> None:
    play.ask_at(0.01)
    play.when_written(play.abort, 1, "target")
    play.ask_at(0.02)
    play.ask_at(0.05)


def _source_preempts(play: Play) -> None:
    play.ask_at(0.01)
    play.when_written(play.abort, 1, "source")
    play.ask_at(0.05)


def _given_up(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.ABORTED)
    for number in range(2, len(play.world.router.attempts) + 1):
        play.is_ready(number)


def _rank_fails(play: Play) -> None:
    play.strike("P0/1", End.ERROR, times=1)
    play.ask_at(0.01)
    play.ask_at(0.1)


def _rank_hangs(play: Play) -> None:
    play.strike("P0/1", End.HANG, times=1, late_s=0.2)
    play.ask_at(0.01)
    play.ask_at(0.6)


def _copy_failed(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.COPY_FAILED)
        found = play.outcome(1, side)
        assert isinstance(found, Failed)
        play.check(found.cause.rank == 1, "the cause does not name rank 1", 1)
    play.is_ready(2)


def _unmet(play: Play) -> None:
    """The target gives up before it has even reached the source, which hears of it all the same."""
    play.ask_at(0.01)
    play.at(0.0115, play.abort, 1, "target")


def _source_hears(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.ABORTED)


def _doubted(play: Play) -> None:
    """What a source could not vouch for does not become quiet because its target asks again."""
    play.strike("P0", End.LATE, times=1, late_s=0.4)
    play.bend(Abort, lost)
    play.bend(Unquiet, lost)
    play.ask_at(0.01)
    play.at(0.05, play.abort, 1, "target")
    play.ask_at(0.1)


def _doubt_stays(play: Play) -> None:
    play.is_failed(1, "source", Why.COPY_FAILED)
    play.is_failed(1, "target", Why.ABORTED, Why.COPY_FAILED)
    play.is_ready(2)


def _no_paths(play: Play) -> None:
    play.bend(Paths, lost, times=2)
    for number in range(3):
        play.ask_at(0.01 + 0.1 * number)


def _heals(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.COPY_FAILED)
    play.is_ready(3)


def _one_hangs(play: Play) -> None:
    """One copy of a chunk fails at once, the others hang for longer than a failure may go untold."""
    play.strike("P0/0", End.HANG, times=4, late_s=0.1)
    play.strike("P0/0", End.ERROR, times=1)
    play.ask_at(0.01)


def _told_at_once(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.COPY_FAILED)


def _storm(play: Play) -> None:
    for number in range(12):
        play.ask_at(0.01 + 0.0005 * number, 4)
        play.at(0.012 + 0.0009 * number, play.abort, number + 1, *(("source", "target")[number % 2 :]))
    play.ask_at(0.2)


def _calm(play: Play) -> None:
    play.is_ready(13)


SCENARIOS = (
    Scenario("target-aborts", "the target gives up while it is written", _target_aborts, _given_up),
    Scenario(
        "target-aborts-weak", "the same where nobody can be stopped", _target_aborts, _given_up, options=WEAK
    ),
    Scenario("source-preempts", "the source takes pages away under a copy", _source_preempts, _given_up),
    Scenario("rank-fails", "one of several source ranks fails to copy", _rank_fails, _copy_failed),
    Scenario(
        "rank-hangs",
        "one of several source ranks hangs, and lands later",
        _rank_hangs,
        _copy_failed,
        source=Side("pp2.tp2"),
        options=WEAK,
    ),
    Scenario("one-hangs", "one copy fails while others hang", _one_hangs, _told_at_once, options=PATIENT),
    Scenario("abort-unmet", "a target gives up before it met the source", _unmet, _source_hears),
    Scenario("doubt-stays", "a doubt outlives the words about it", _doubted, _doubt_stays, options=WEAK),
    Scenario("paths-lost", "a grant comes without its paths", _no_paths, _heals, options=VERIFIED),
    Scenario("abort-storm", "a dozen clients go away at once", _storm, _calm),
)
