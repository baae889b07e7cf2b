"""Who is who, and what is what (rows 10, 14, 15 and 17 of the fault list, and two of our own)."""

from __future__ import annotations

from dataclasses import replace

from baton.errors import ConfigError
from baton.protocol.messages import Grant, Paths, Settled
from baton.protocol.outcomes import Why
from baton.session.handles import Digest
from baton.session.handles import Request as Asked
from baton.sim.faults import skew
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario, Side
from baton.sim.transport.fate import End

LONG_AFTER_S = 5.0
"""When nobody remembers what ended at the start."""


def _replayed(play: Play) -> None:
    play.ask_at(0.01)
    play.when("received", Settled, _ask_again, play)


def _ask_again(play: Play) -> None:
    """Both legs come once more under the id of a transfer that is live, or has just ended."""
    router = play.world.router
    again = replace(play.attempt(1), tag=2)
    router.attempts.append(again)
    for name in ("P0", "D0"):
        play.world.instances[name].arrive(again)


def _not_twice(play: Play) -> None:
    play.is_ready(1)
    for side in ("source", "target"):
        play.is_failed(2, side, Why.REFUSED_LIVE_ID)


def _live_twice(play: Play) -> None:
    play.ask_at(0.01)
    play.at(0.0135, _ask_again, play)


def _reused(play: Play) -> None:
    """Long after its end an id is used again, and old words about it are heard once more."""
    play.ask_at(0.01)
    play.at(0.1, _remember, play)
    play.at(LONG_AFTER_S, _ask_again, play)
    play.when("received", Grant, _say_again, play, nth=2)


def _remember(play: Play) -> None:
    for end in play.world.network.standing():
        for one in (end, end.peer):
            assert one is not None
            assert one.peer is not None
            names = (one.host.process.instance, one.peer.host.process.instance)
            play.world.network.past.extend((*names, message) for message in one.sent)


def _say_again(play: Play) -> None:
    for end in play.world.network.standing():
        for sender, _, message in list(play.world.network.past):
            if sender == "P0" and not isinstance(message, Paths):
                end.host.process.do(end.deliver, message)


def _both_ready(play: Play) -> None:
    play.is_ready(1)
    play.is_ready(2)


def _wild_pages(play: Play) -> None:
    play.at(0.01, _name_wild_pages, play)


def _name_wild_pages(play: Play) -> None:
    """What could never be granted is the caller's mistake, and does not get as far as the instance."""
    incarnation = play.world.instances["D0"].incarnation
    assert incarnation is not None
    pages = {0: {"tokens": [0, 9999]}, 1: {"tokens": [0, 1]}}
    try:
        incarnation.drivers[0].receive(Asked("wild", "P0", Digest(8, bytes(16)), pages))
    except ConfigError as error:
        play.world.note("D0", "refused", "wild", str(error))
        play.ask_at(0.02)


def _wild_refused(play: Play) -> None:
    play.check(len(play.world.router.attempts) == 1, "pages that are not there were taken")
    play.is_ready(1)


def _skewed(play: Play) -> None:
    skew.install(play.world, skew.Config(1e6, 0.05))
    for number in range(3):
        play.ask_at(0.01 + 0.03 * number)


def _three_ready(play: Play) -> None:
    for number in range(1, 4):
        play.is_ready(number)


def _version(play: Play) -> None:
    play.world.instances["P0"].versions = (7, 9)
    play.ask_at(0.01)


def _refused_version(play: Play) -> None:
    play.is_failed(1, "target", Why.REFUSED_VERSION)
    play.is_failed(1, "source", Why.DEADLINE)


def _ask(play: Play) -> None:
    play.ask_at(0.01)


def _refused_layout(play: Play) -> None:
    play.is_failed(1, "target", Why.REFUSED_LAYOUT)
    play.is_failed(1, "source", Why.DEADLINE, Why.REFUSED_LAYOUT)
    play.check(play.num_writes == 0, "something was written between instances that have no plan")


def _idle(play: Play) -> None:
    play.ask_at(0.01)
    # After the pause every connection for copies turns out to be dead.
    play.at(30.0, play.strike, "P0", End.ERROR)
    play.ask_at(30.1)
    play.at(30.2, play.world.fabric.faults.clear)
    play.ask_at(30.3)


def _heals(play: Play) -> None:
    play.is_ready(1)
    for side in ("source", "target"):
        play.is_failed(2, side, Why.COPY_FAILED)
    play.is_ready(3)


def _two_attempts(play: Play) -> None:
    play.ask_at(0.01)
    # The client's router loses patience and tries again while the first attempt is under way.
    play.when_written(_second, play)


def _second(play: Play) -> None:
    router = play.world.router
    router.attempts_max = 2
    router.leg_ended(play.attempt(1), "the router lost patience")


def _other_words(play: Play) -> None:
    play.at(0.01, lambda: play.ask(is_same=False))
    play.ask_at(0.05)


def _other_length(play: Play) -> None:
    play.at(0.01, lambda: play.ask(8, target_tokens=11))
    play.ask_at(0.05)


def _refused_prompt(play: Play) -> None:
    for side in ("source", "target"):
        play.is_failed(1, side, Why.REFUSED_PROMPT)
    play.is_ready(2)


LATER = QUIET_OPTIONS.but(faults_s=LONG_AFTER_S)
LONG = QUIET_OPTIONS.but(faults_s=30.5)

SCENARIOS = (
    Scenario("id-replayed", "a transfer id comes again after its end", _replayed, _not_twice),
    Scenario("id-live", "a transfer id comes again while it is live", _live_twice, _not_twice),
    Scenario(
        "id-reused",
        "an id is used again, and old words about it are heard",
        _reused,
        _both_ready,
        options=LATER,
    ),
    Scenario("wild-pages", "a target names pages that it does not have", _wild_pages, _wild_refused),
    Scenario("clocks-apart", "every process has a clock of its own", _skewed, _three_ready),
    Scenario(
        "version-mismatch", "a peer of another version is refused with the reason", _version, _refused_version
    ),
    Scenario(
        "layout-mismatch",
        "a peer with another cache is refused with the reason",
        _ask,
        _refused_layout,
        target=Side("pp2", "latent"),
    ),
    Scenario("idle", "connections died while nothing was to do", _idle, _heals, options=LONG),
    Scenario("two-attempts", "a request is tried again while it is under way", _two_attempts, _both_ready),
    Scenario("other-words", "the sides tokenise a prompt differently", _other_words, _refused_prompt),
    Scenario("other-length", "the same, to another length", _other_length, _refused_prompt),
)
