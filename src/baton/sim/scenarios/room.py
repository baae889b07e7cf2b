"""Pages that run out, and prompts of awkward sizes (rows 9, 12 and 13 of the list, and one of our own)."""

from __future__ import annotations

from baton.protocol.messages import Grant
from baton.protocol.outcomes import Ready, Why
from baton.sim.request import Attempt
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario, Side
from baton.sim.transport.endpoint import Strength

SMALL = Side("pp2", num_pages=4)


def _slow_queue(play: Play) -> None:
    play.ask_at(0.01, 16)
    play.ask_at(0.011, 16)
    play.when("sent", Grant, _hold, play)


def _hold(play: Play) -> None:
    """The first transfer holds all pages of the target for a while."""
    play.world.fabric.copy_s = 0.05
    play.at(0.2, setattr, play.world.fabric, "copy_s", 0.0005)


def _both_ready(play: Play) -> None:
    play.is_ready(1)
    play.is_ready(2)


def _no_room(play: Play) -> None:
    play.world.fabric.copy_s = 0.3
    play.at(0.45, setattr, play.world.fabric, "copy_s", 0.0005)
    play.ask_at(0.01, 16)
    play.ask_at(0.012, 16)
    play.ask_at(0.9, 16)


def _declined(play: Play) -> None:
    play.is_failed(2, "source", Why.OUT_OF_PAGES)
    play.is_ready(3)


def _stuck(play: Play) -> None:
    for number in range(3):
        play.ask_at(0.01 + 0.001 * number, 8)
    play.when("received", Grant, _halt_source, play, nth=3)


def _halt_source(play: Play) -> None:
    """The source stops with three grants in its hands, and goes on when nobody waits any more."""
    for process in play.world.instances["P0"].processes:
        process.stop()
        play.world.schedule.after(1.5, process.go_on)


def _all_lost(play: Play) -> None:
    for number in range(1, 4):
        play.is_failed(number, "target", Why.PEER_LOST)


def _circle(play: Play) -> None:
    """The two sides get the same requests in opposite order, and have room for one and two of them."""
    target = play.world.instances["D0"]
    waiting: list[Attempt] = []

    def in_reverse(attempt: Attempt) -> None:
        waiting.append(attempt)
        if len(waiting) == 6:
            for found in reversed(waiting):
                type(target).arrive(target, found)

    play.reroute("D0", in_reverse)
    for number in range(6):
        play.ask_at(0.01 + 0.001 * number, 16)


def _circle_opens(play: Play) -> None:
    num_ready = sum(isinstance(play.outcome(number, "target"), Ready) for number in range(1, 7))
    play.check(num_ready >= 1, "nobody got through")


def _sizes(play: Play) -> None:
    for number, num_tokens in enumerate((1, 3, 4, 8, 9, 24)):
        play.ask_at(0.01 + 0.02 * number, num_tokens)


def _groups(play: Play) -> None:
    for number in range(6):
        play.ask_at(0.01 + 0.01 * number, 8)


def _all_ready(play: Play) -> None:
    for number in range(1, 7):
        play.is_ready(number)


HELD = QUIET_OPTIONS.but(held_share=1.0)
WEAK = QUIET_OPTIONS.but(strength=Strength(can_enforce_grants=False, can_revoke=False), faults_s=1.6)

SCENARIOS = (
    Scenario(
        "slow-target", "a transfer waits for pages, and gets them", _slow_queue, _both_ready, target=SMALL
    ),
    Scenario("no-room", "a target that has no pages in time says so", _no_room, _declined, target=SMALL),
    Scenario("stuck-transfers", "pages of stuck transfers come back by themselves", _stuck, _all_lost),
    Scenario("stuck-transfers-weak", "the same where nobody can be stopped", _stuck, _all_lost, options=WEAK),
    Scenario(
        "circular-wait",
        "source and target are full of each other's work",
        _circle,
        _circle_opens,
        source=Side("tp2", num_pages=8),
        target=Side("pp2", num_pages=8),
    ),
    Scenario(
        "one-caller",
        "one rank names the pages of all, in any dp group",
        _groups,
        _all_ready,
        target=Side("dp2.tp2"),
        options=QUIET_OPTIONS.but(one_call_share=1.0),
    ),
    Scenario("sizes", "prompts shorter than a page, of whole pages, and in between", _sizes, _all_ready),
    Scenario("sizes-held", "the same with prefixes that the target holds", _sizes, _all_ready, options=HELD),
    Scenario(
        "sizes-state",
        "the same where there is nothing but state",
        _sizes,
        _all_ready,
        source=Side("tp2", "state"),
        target=Side("pp2", "state"),
    ),
    Scenario(
        "sizes-pages",
        "the same with chunks that end inside a page",
        _sizes,
        _all_ready,
        source=Side("cp2:split", page=8),
        target=Side("cp2:stripe1", page=3, num_pages=32),
    ),
)
