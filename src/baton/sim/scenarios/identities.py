"""Who is who, and what is what (rows 10, 14, 15 and 17 of the fault list, and two of our own)."""

from __future__ import annotations

from dataclasses import replace

from baton.protocol.messages import Settled
from baton.protocol.outcomes import Failed, Ready, Why
from baton.sim.faults import skew
from baton.sim.request import Attempt
from baton.sim.scenarios.play import QUIET_OPTIONS, Play, Scenario, Side
from baton.sim.transport.fate import End


def _replayed(play: Play) -> None:
    play.ask_at(0.01)
    play.when("received", Settled, _ask_again, play)


def _ask_again(play: Play) -> None:
    """Both legs come once more under the id of a transfer that has just ended."""
    for name in ("P0", "D0"):
        play.world.instances[name].arrive(play.attempt(1))


def _not_twice(play: Play) -> None:
    transfer = play.attempt(1).transfer
    for side in ("source", "target"):
        told = play.told[transfer, side]
        num_ready = sum(isinstance(outcome, Ready) for outcome in told)
        refused = [one.cause.why for one in told if isinstance(one, Failed)]
        play.check(num_ready == 2, f"{side}: {num_ready} ranks were told ready", 1)
        play.check(set(refused) == {Why.REFUSED_LIVE_ID}, f"{side}: {refused}", 1)


def _live_twice(play: Play) -> None:
    play.ask_at(0.01)
    play.at(0.0135, _ask_again, play)


def _wild_pages(play: Play) -> None:
    play.ask_at(0.01)
    play.ask_at(0.05)
    target = play.world.instances["D0"]
    arrive = target.arrive

    def wild(attempt: Attempt) -> None:
        arrive(attempt)
        engine = target.engine
        assert engine is not None
        if attempt.number == 1 and attempt.request == 1:
            for book in engine.jobs[attempt.transfer].books.values():
                for ids in book.tables.values():
                    ids[-1] = 9999

    target.arrive = wild  # type: ignore[method-assign]


def _wild_refused(play: Play) -> None:
    play.is_failed(1, "target", Why.REFUSED_LAYOUT)
    play.is_ready(2)


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


def _both(play: Play) -> None:
    play.is_ready(1)
    play.is_ready(2)


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


LONG = replace(QUIET_OPTIONS, faults_s=30.5)
UNLIKE = {"source": Side("tp2", "gqa"), "target": Side("pp2", "latent")}

SCENARIOS = (
    Scenario("id-replayed", "a transfer id comes again after its end", _replayed, _not_twice),
    Scenario("id-live", "a transfer id comes again while it is live", _live_twice, _not_twice),
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
        **UNLIKE,
    ),
    Scenario("idle", "connections died while nothing was to do", _idle, _heals, options=LONG),
    Scenario("two-attempts", "a request is tried again while it is under way", _two_attempts, _both),
    Scenario("other-words", "the sides tokenise a prompt differently", _other_words, _refused_prompt),
    Scenario("other-length", "the same, to another length", _other_length, _refused_prompt),
)
