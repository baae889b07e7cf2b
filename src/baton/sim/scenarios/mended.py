"""Stories that a seed told first: what went wrong in them is mended, and has to stay so."""

from __future__ import annotations

from baton.protocol.outcomes import Why
from baton.sim.scenarios.endings import PATIENT
from baton.sim.scenarios.play import Play, Scenario, Side
from baton.sim.transport.fate import End


def _turned_out(play: Play) -> None:
    """A transfer's copies leave a doubt, so the writer is turned out; another's copies are half there then.

    They lose their other half, and would have ended by themselves before the news of it reaches them.
    """
    play.world.fabric.copy_s = 0.1
    play.strike("P0", End.LATE, duration_s=0.04, late_s=0.5)
    play.ask_at(0.01)
    play.at(0.022, _recover, play)
    play.ask_at(0.025)
    play.ask_at(0.4)


def _recover(play: Play) -> None:
    play.world.fabric.faults.clear()
    play.strike("P0", End.DONE, duration_s=0.06, num_pieces=8)


def _none_half_ready(play: Play) -> None:
    for number in (1, 2):
        for side in ("source", "target"):
            play.is_failed(number, side, Why.COPY_FAILED)
    play.is_ready(3)


def _draining(play: Play) -> None:
    """A source that drains turns its own ranks away; a grant for them must not wait for a deadline."""
    play.strike("P0", End.DONE, duration_s=0.4)
    play.ask_at(0.01)
    play.at(0.3, _drain, play)
    play.ask_at(0.31)


def _drain(play: Play) -> None:
    incarnation = play.world.instances["P0"].incarnation
    assert incarnation is not None
    incarnation.drain()


def _refused_at_once(play: Play) -> None:
    play.is_ready(1)
    for side in ("source", "target"):
        play.is_failed(2, side, Why.ABORTED)


SCENARIOS = (
    Scenario(
        "turned-out-in-flight",
        "a writer is turned out while another transfer's copy is half there (seed 1018420)",
        _turned_out,
        _none_half_ready,
        source=Side("tp1"),
        target=Side("tp1"),
    ),
    Scenario(
        "granted-while-draining",
        "a grant reaches a source that turned its ranks away (seed 1016035)",
        _draining,
        _refused_at_once,
        options=PATIENT,
    ),
    Scenario(
        "asked-while-draining",
        "a source that turned its ranks away is asked for the dp group",
        _draining,
        _refused_at_once,
        source=Side("dp2"),
        options=PATIENT,
    ),
)
