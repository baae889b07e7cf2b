"""Transfer ids, prompts and pages: what is asked for, by whom, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.errors import ConfigError
from baton.protocol.messages import Grant, Paths, Settled
from baton.protocol.outcomes import Ready, Why
from baton.session.handles import Digest, Request
from baton.sim.faults import Skew
from baton.sim.router import Attempt
from baton.sim.scenarios.run import PLAIN, WEAK, ScenarioRun, Side, scenario
from baton.sim.transport import CopyEnd

FORGOTTEN_S = 5.0
"""When nobody remembers a transfer that ended at the start."""
SMALL = Side("pp2", num_pages=4)


# Transfer ids.


def _send_again(run: ScenarioRun) -> None:
    """Both legs arrive once more under the same id."""
    duplicate = replace(run.attempt(1), tag=2)
    run.world.router.attempts.append(duplicate)
    for name in ("P0", "D0"):
        run.world.instances[name].arrive(duplicate)


@scenario("id-replayed", "a transfer id comes again after its end")
def id_replayed(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    run.when("received", Settled, _send_again, run)
    yield
    run.expect_ready(1)
    run.expect_both_failed(2, Why.REFUSED_LIVE_ID)


@scenario("id-live", "a transfer id comes again while it is live")
def id_live(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    run.at(0.0135, _send_again, run)
    yield
    run.expect_ready(1)
    run.expect_both_failed(2, Why.REFUSED_LIVE_ID)


@scenario(
    "id-reused",
    "an id is used again long after its end, and its old messages arrive once more",
    options=replace(PLAIN, faults_s=FORGOTTEN_S),
)
def id_reused(run: ScenarioRun) -> Iterator[None]:
    network = run.world.network

    def remember() -> None:
        for dialler in network.standing():
            for end in (dialler, dialler.peer):
                assert end is not None
                network.past.extend((*end.names, message) for message in end.sent)

    def deliver_old() -> None:
        for end in network.standing():
            for sender, _, message in list(network.past):
                if sender == "P0" and not isinstance(message, Paths):
                    end.host.process.call(end.deliver, message)

    run.request_at(0.01)
    run.at(0.1, remember)
    run.at(FORGOTTEN_S, _send_again, run)
    run.when("received", Grant, deliver_old, nth=2)
    yield
    run.expect_ready(1, 2)


@scenario(
    "id-aborted-again",
    "a source aborts and begins again under the same id while the grant is on its way to its ranks",
    options=replace(PLAIN, strength=WEAK, slowness=0.1),
)
def id_aborted_again(run: ScenarioRun) -> Iterator[None]:
    def begin_again() -> None:
        run.abort(1, "source")
        duplicate = replace(run.attempt(1), tag=2)
        run.world.router.attempts.append(duplicate)
        run.world.router.aborted.clear()
        run.world.instances["P0"].arrive(duplicate)

    run.request_at(0.01)
    run.when("received", Grant, begin_again)
    run.at(0.1, run.request)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.expect_failed(2, "source", Why.ABORTED, Why.REFUSED_LIVE_ID)
    run.expect_ready(3)


@scenario("two-attempts", "the router retries a request while its first attempt is under way")
def two_attempts(run: ScenarioRun) -> Iterator[None]:
    def retry() -> None:
        router = run.world.router
        router.attempts_max = 2
        router.leg_ended(run.attempt(1), "the router lost patience")

    run.request_at(0.01)
    run.when_written(retry)
    yield
    run.expect_ready(1, 2)


# Prompts and peers that do not match.


@scenario("other-prompt", "the sides tokenise a prompt differently")
def other_prompt(run: ScenarioRun) -> Iterator[None]:
    run.at(0.01, lambda: run.request(is_same=False))
    run.request_at(0.05)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario("other-length", "the sides tokenise a prompt to different lengths")
def other_length(run: ScenarioRun) -> Iterator[None]:
    run.at(0.01, lambda: run.request(8, target_tokens=11))
    run.request_at(0.05)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario("version-mismatch", "a peer of another version is refused with the reason")
def version_mismatch(run: ScenarioRun) -> Iterator[None]:
    run.world.instances["P0"].versions = (7, 9)
    run.request_at(0.01)
    yield
    run.expect_failed(1, "target", Why.REFUSED_VERSION)
    run.expect_failed(1, "source", Why.DEADLINE)


@scenario(
    "layout-mismatch", "a peer with another cache is refused with the reason", target=Side("pp2", "latent")
)
def layout_mismatch(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    yield
    run.expect_failed(1, "target", Why.REFUSED_LAYOUT)
    run.expect_failed(1, "source", Why.DEADLINE, Why.REFUSED_LAYOUT)
    run.check(run.num_writes == 0, "something was written between instances that have no plan")


@scenario("clocks-apart", "every process has a clock of its own")
def clocks_apart(run: ScenarioRun) -> Iterator[None]:
    Skew(1e6, 0.05).install(run.world)
    for number in range(3):
        run.request_at(0.01 + 0.03 * number)
    yield
    run.expect_ready(1, 2, 3)


@scenario("idle", "connections died while there was nothing to copy", options=replace(PLAIN, faults_s=30.5))
def idle(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    run.at(30.0, run.change_copies, "P0", CopyEnd.ERROR)
    run.request_at(30.1)
    run.at(30.2, run.world.fabric.faults.clear)
    run.request_at(30.3)
    yield
    run.expect_ready(1, 3)
    run.expect_both_failed(2, Why.COPY_FAILED)


# Pages.


@scenario("wild-pages", "a target names pages that it does not have")
def wild_pages(run: ScenarioRun) -> Iterator[None]:
    def name_wild_pages() -> None:
        incarnation = run.world.instances["D0"].incarnation
        assert incarnation is not None
        pages = {0: {"tokens": [0, 9999]}, 1: {"tokens": [0, 1]}}
        try:
            incarnation.drivers[0].receive(Request("wild", "P0", Digest(8, bytes(16)), pages))
        except ConfigError as error:
            run.world.note("D0", "refused", "wild", str(error))
            run.request_at(0.02)

    run.at(0.01, name_wild_pages)
    yield
    run.check(len(run.world.router.attempts) == 1, "pages that do not exist were accepted")
    run.expect_ready(1)


@scenario("slow-target", "a transfer waits for pages, and gets them", target=SMALL)
def slow_target(run: ScenarioRun) -> Iterator[None]:
    def hold() -> None:
        """The first transfer holds all pages of the target for a while."""
        run.world.fabric.copy_s = 0.05
        run.at(0.2, setattr, run.world.fabric, "copy_s", 0.0005)

    run.request_at(0.01, 16)
    run.request_at(0.011, 16)
    run.when("sent", Grant, hold)
    yield
    run.expect_ready(1, 2)


@scenario("no-room", "a target that has no pages in time says so", target=SMALL)
def no_room(run: ScenarioRun) -> Iterator[None]:
    run.world.fabric.copy_s = 0.3
    run.at(0.45, setattr, run.world.fabric, "copy_s", 0.0005)
    run.request_at(0.01, 16)
    run.request_at(0.012, 16)
    run.request_at(0.9, 16)
    yield
    run.expect_failed(2, "source", Why.OUT_OF_PAGES)
    run.expect_ready(3)


@scenario("stuck-transfers", "pages of stuck transfers come back by themselves")
@scenario(
    "stuck-transfers-weak",
    "the same without revocation",
    options=replace(PLAIN, strength=WEAK, faults_s=1.6),
)
def stuck_transfers(run: ScenarioRun) -> Iterator[None]:
    def halt_source() -> None:
        """The source halts with three grants, and resumes when nobody waits any more."""
        for process in run.world.instances["P0"].processes:
            process.halt()
            run.world.schedule.after(1.5, process.resume)

    for number in range(3):
        run.request_at(0.01 + 0.001 * number, 8)
    run.when("received", Grant, halt_source, nth=3)
    yield
    for number in range(1, 4):
        run.expect_failed(number, "target", Why.PEER_LOST)


@scenario(
    "circular-wait",
    "source and target are full of each other's work",
    source=Side("tp2", num_pages=8),
    target=Side("pp2", num_pages=8),
)
def circular_wait(run: ScenarioRun) -> Iterator[None]:
    """The two sides get the same requests in opposite order, and have room for one and two of them."""
    target = run.world.instances["D0"]
    waiting: list[Attempt] = []

    def arrive_reversed(attempt: Attempt) -> None:
        waiting.append(attempt)
        if len(waiting) == 6:
            for waiter in reversed(waiting):
                type(target).arrive(target, waiter)

    run.reroute("D0", arrive_reversed)
    for number in range(6):
        run.request_at(0.01 + 0.001 * number, 16)
    yield
    num_ready = sum(isinstance(run.outcome(number, "target"), Ready) for number in range(1, 7))
    run.check(num_ready >= 1, "no transfer succeeded")


@scenario(
    "one-caller",
    "one rank names the pages of all, in any dp group",
    target=Side("dp2.tp2"),
    options=replace(PLAIN, one_call_share=1.0),
)
def one_caller(run: ScenarioRun) -> Iterator[None]:
    for number in range(6):
        run.request_at(0.01 + 0.01 * number, 8)
    yield
    run.expect_ready(*range(1, 7))


@scenario("sizes", "prompts shorter than a page, of whole pages, and in between")
@scenario(
    "sizes-held", "the same with prefixes that the target holds", options=replace(PLAIN, held_share=1.0)
)
@scenario(
    "sizes-state",
    "the same for a cache of state only",
    source=Side("tp2", "state"),
    target=Side("pp2", "state"),
)
@scenario(
    "sizes-pages",
    "the same with chunks that end inside a page",
    source=Side("cp2:split", page=8),
    target=Side("cp2:stripe1", page=3, num_pages=32),
)
def sizes(run: ScenarioRun) -> Iterator[None]:
    for number, num_tokens in enumerate((1, 3, 4, 8, 9, 24)):
        run.request_at(0.01 + 0.02 * number, num_tokens)
    yield
    run.expect_ready(*range(1, 7))


# Ranks of one group that disagree.


@scenario("rank-mismatch", "one source rank prefilled another prompt than the others")
def rank_mismatch(run: ScenarioRun) -> Iterator[None]:
    run.world.router.draw_odd_rank = lambda ends: ("source", 1) if not run.world.router.attempts else None
    run.request_at(0.01)
    run.request_at(0.1)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario(
    "rank-mismatch-finished",
    "one source rank ends its answer, and another prefilled another prompt",
    options=replace(PLAIN, finish_share=1.0, faults_s=0.6),
)
def rank_mismatch_finished(run: ScenarioRun) -> Iterator[None]:
    """The target asks before the answer ends or after it, and the odd rank joins early or late."""
    target = run.world.instances["D0"]

    def arrive_late(attempt: Attempt) -> None:
        delay_s = 0.0 if attempt.tag < 3 else 0.05
        run.world.schedule.after(delay_s, type(target).arrive, target, attempt)

    def halt_rank() -> None:
        process = next(process for process in run.world.instances["P0"].processes if process.name == "P0/1")
        process.halt()
        run.world.schedule.after(0.03, process.resume)

    run.world.router.draw_odd_rank = lambda ends: ("source", 1)
    run.reroute("D0", arrive_late)
    for number in range(4):
        run.request_at(0.01 + 0.1 * number)
        if number % 2:
            run.at(0.009 + 0.1 * number, halt_rank)
    yield
    for number in range(1, 5):
        run.expect_both_failed(number, Why.REFUSED_PROMPT)


@scenario(
    "rank-mismatch-target",
    "one target rank asks for another prompt than the others",
    target=Side("tp4"),
    options=replace(PLAIN, faults_s=0.6),
)
def rank_mismatch_target(run: ScenarioRun) -> Iterator[None]:
    """The odd rank asks first, in between and last."""
    router = run.world.router
    router.draw_odd_rank = lambda ends: ("target", len(router.attempts)) if len(router.attempts) < 4 else None
    for number in range(5):
        run.request_at(0.01 + 0.1 * number)
    yield
    for number in range(1, 5):
        run.expect_both_failed(number, Why.REFUSED_PROMPT)
    run.expect_ready(5)


@scenario("finished", "the answer ends at the source", options=replace(PLAIN, finish_share=1.0))
def finished(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    yield
    run.expect_finished(1)


def _arrive_at_rival(run: ScenarioRun) -> None:
    """A second target gets the decode leg of the first attempt too."""
    attempt = run.attempt(1)
    rival = replace(attempt, tag=2, ends=replace(attempt.ends, target="D1"))
    run.world.router.attempts.append(rival)
    run.world.router.aborted.clear()
    run.world.instances["D1"].arrive(rival)


@scenario("rival-target", "a second target asks for the same transfer", num_targets=2)
def rival_target(run: ScenarioRun) -> Iterator[None]:
    run.request_at(0.01)
    run.when("sent", Grant, _arrive_at_rival, run)
    yield
    run.expect_ready(1)
    run.expect_failed(2, "target", Why.REFUSED_LIVE_ID)


@scenario(
    "rival-asks-late",
    "a second target asks while the source stops its ranks",
    source=Side("dp2.tp2"),
    num_targets=2,
)
def rival_asks_late(run: ScenarioRun) -> Iterator[None]:
    run.change_copies("P0", CopyEnd.HANG)
    run.request_at(0.01)
    run.at(0.03, run.abort, 1, "target")
    run.at(0.05, _arrive_at_rival, run)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.expect_failed(2, "target", Why.ABORTED, Why.REFUSED_LIVE_ID)
