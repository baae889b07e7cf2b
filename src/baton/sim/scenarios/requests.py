"""Transfer ids, prompts and pages: what is asked for, by whom, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.errors import ConfigError
from baton.protocol.messages import Grant, Paths, Settled
from baton.protocol.outcomes import Failed, Ready, Why
from baton.session.handles import Digest, Request
from baton.sim.engines import Job, PrefillScript, SourceEngine
from baton.sim.faults import Skew
from baton.sim.router import Attempt
from baton.sim.scenarios.run import PLAIN, WEAK, ScenarioRun, Side, scenario
from baton.sim.transport import CopyEnd

FORGOTTEN_S = 5.0
"""When nobody remembers a transfer that ended at the start."""
SMALL = Side("pp2", num_pages=4)
NUM_QUEUED = 12
LAST_S = 3.0


# Transfer ids.


def _send_again(run: ScenarioRun) -> None:
    """Both legs arrive once more under the same id."""
    duplicate = replace(run.attempt(1), tag=2)
    run.world.router.attempts.append(duplicate)
    for name in ("P0", "D0"):
        run.world.instances[name].arrive(duplicate)


@scenario()
def id_replayed(run: ScenarioRun) -> Iterator[None]:
    """A transfer id comes again after its end."""
    run.request_at(0.01)
    run.when("received", Settled, _send_again, run)
    yield
    run.expect_ready(1)
    run.expect_both_failed(2, Why.REFUSED_LIVE_ID)


@scenario()
def id_live(run: ScenarioRun) -> Iterator[None]:
    """A transfer id comes again while it is live."""
    run.request_at(0.01)
    run.at(0.0135, _send_again, run)
    yield
    run.expect_ready(1)
    run.expect_both_failed(2, Why.REFUSED_LIVE_ID)


@scenario(options=replace(PLAIN, faults_s=FORGOTTEN_S))
def id_reused(run: ScenarioRun) -> Iterator[None]:
    """An id is used again long after its end, and its old messages arrive once more."""
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


@scenario(options=replace(PLAIN, strength=WEAK, slowness=0.1))
def id_aborted_again(run: ScenarioRun) -> Iterator[None]:
    """A source aborts and begins again under the same id while the grant is on its way to its ranks."""

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


@scenario()
def two_attempts(run: ScenarioRun) -> Iterator[None]:
    """The router retries a request while its first attempt is under way."""

    def retry() -> None:
        router = run.world.router
        router.attempts_max = 2
        router.leg_ended(run.attempt(1), "the router lost patience")

    run.request_at(0.01)
    run.when_written(retry)
    yield
    run.expect_ready(1, 2)


# Prompts and peers that do not match.


@scenario()
def other_prompt(run: ScenarioRun) -> Iterator[None]:
    """The sides tokenise a prompt differently."""
    run.at(0.01, lambda: run.request(is_same=False))
    run.request_at(0.05)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario()
def other_length(run: ScenarioRun) -> Iterator[None]:
    """The sides tokenise a prompt to different lengths."""
    run.at(0.01, lambda: run.request(8, target_tokens=11))
    run.request_at(0.05)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario()
def version_mismatch(run: ScenarioRun) -> Iterator[None]:
    """A peer of another version is refused with the reason."""
    run.world.instances["P0"].versions = (7, 9)
    run.request_at(0.01)
    yield
    run.expect_failed(1, "target", Why.REFUSED_VERSION)
    run.expect_failed(1, "source", Why.DEADLINE)


@scenario(target=Side("pp2", "latent"))
def layout_mismatch(run: ScenarioRun) -> Iterator[None]:
    """A peer with another cache is refused with the reason."""
    run.request_at(0.01)
    yield
    run.expect_failed(1, "target", Why.REFUSED_LAYOUT)
    run.expect_failed(1, "source", Why.DEADLINE, Why.REFUSED_LAYOUT)
    run.check(run.num_writes == 0, "something was written between instances that have no plan")


@scenario()
def clocks_apart(run: ScenarioRun) -> Iterator[None]:
    """Every process has a clock of its own."""
    Skew(1e6, 0.05).install(run.world)
    for number in range(3):
        run.request_at(0.01 + 0.03 * number)
    yield
    run.expect_ready(1, 2, 3)


@scenario(options=replace(PLAIN, faults_s=30.5))
def idle(run: ScenarioRun) -> Iterator[None]:
    """Connections died while there was nothing to copy."""
    run.request_at(0.01)
    run.at(30.0, run.change_copies, "P0", CopyEnd.ERROR)
    run.request_at(30.1)
    run.at(30.2, run.world.fabric.faults.clear)
    run.request_at(30.3)
    yield
    run.expect_ready(1, 3)
    run.expect_both_failed(2, Why.COPY_FAILED)


# Pages.


@scenario()
def wild_pages(run: ScenarioRun) -> Iterator[None]:
    """A target names pages that it does not have."""

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


@scenario(target=SMALL)
def slow_target(run: ScenarioRun) -> Iterator[None]:
    """A transfer waits for pages, and gets them."""

    def hold() -> None:
        """The first transfer holds all pages of the target for a while."""
        run.world.fabric.copy_s = 0.05
        run.at(0.2, setattr, run.world.fabric, "copy_s", 0.0005)

    run.request_at(0.01, 16)
    run.request_at(0.011, 16)
    run.when("sent", Grant, hold)
    yield
    run.expect_ready(1, 2)


@scenario(target=SMALL, options=replace(PLAIN, slowness=60.0, faults_s=LAST_S))
@scenario(
    "overload-of-the-source",
    "the same where the source has no room",
    source=Side("tp2", num_pages=4),
    options=replace(PLAIN, slowness=60.0, faults_s=LAST_S),
)
@scenario(
    "overload-of-the-target",
    "the same where decoding takes long, and the source has nothing to do",
    target=SMALL,
    options=replace(PLAIN, decode_slowness=60.0, faults_s=LAST_S),
)
def overload(run: ScenarioRun) -> Iterator[None]:
    """Transfers wait for pages longer than any deadline, one after the other, and are ready."""
    for number in range(NUM_QUEUED):
        run.request_at(0.01 + 0.001 * number, 16)
    yield
    run.expect_ready(*range(1, NUM_QUEUED + 1))
    timings = run.scenario.options.timings
    assert run.world.schedule.now > timings.offer_s + timings.total_s, "nothing had to wait for long"


@scenario(target=SMALL, options=replace(PLAIN, faults_s=LAST_S))
def overload_that_is_stuck(run: ScenarioRun) -> Iterator[None]:
    """A queue that does not move is given up: a transfer that waits for it fails, the one after it is ready.

    The target has no room for a while, and computes nothing.
    """

    def fill() -> None:
        engine = run.world.instances["D0"].engine
        assert engine is not None
        engine.is_full = True
        run.at(1.5, setattr, engine, "is_full", False)
        run.at(1.5, engine.try_next)

    run.at(0.005, fill)
    run.request_at(0.01, 16)
    run.request_at(2.0, 16)
    yield
    run.expect_both_failed(1, Why.DEADLINE)
    run.expect_ready(2)


@scenario()
@scenario(
    "stuck-transfers-weak",
    "the same without revocation",
    options=replace(PLAIN, strength=WEAK, faults_s=1.6),
)
def stuck_transfers(run: ScenarioRun) -> Iterator[None]:
    """Pages of stuck transfers come back by themselves."""

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


@scenario(source=Side("tp2", num_pages=8), target=Side("pp2", num_pages=8))
def circular_wait(run: ScenarioRun) -> Iterator[None]:
    """Source and target are full of each other's work.

    The two sides get the same requests in opposite order, and have room for one and two of them.
    """
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


@scenario(target=Side("dp2.tp2"), options=replace(PLAIN, one_call_share=1.0))
def one_caller(run: ScenarioRun) -> Iterator[None]:
    """One rank names the pages of all, in any dp group."""
    for number in range(6):
        run.request_at(0.01 + 0.01 * number, 8)
    yield
    run.expect_ready(*range(1, 7))


@scenario()
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
    """Prompts shorter than a page, of whole pages, and in between."""
    for number, num_tokens in enumerate((1, 3, 4, 8, 9, 24)):
        run.request_at(0.01 + 0.02 * number, num_tokens)
    yield
    run.expect_ready(*range(1, 7))


# Ranks of one group that disagree.


@scenario()
def rank_mismatch(run: ScenarioRun) -> Iterator[None]:
    """One source rank prefilled another prompt than the others."""
    run.world.router.draw_odd_rank = lambda ends: ("source", 1) if not run.world.router.attempts else None
    run.request_at(0.01)
    run.request_at(0.1)
    yield
    run.expect_both_failed(1, Why.REFUSED_PROMPT)
    run.expect_ready(2)


@scenario(options=replace(PLAIN, finish_share=1.0, faults_s=0.6))
def rank_mismatch_finished(run: ScenarioRun) -> Iterator[None]:
    """One source rank ends its answer, and another prefilled another prompt.

    The target asks before the answer ends or after it, and the odd rank joins early or late.
    """
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


@scenario(target=Side("tp4"), options=replace(PLAIN, faults_s=0.6))
def rank_mismatch_target(run: ScenarioRun) -> Iterator[None]:
    """One target rank asks for another prompt than the others.

    The odd rank asks first, in between and last.
    """
    router = run.world.router
    router.draw_odd_rank = lambda ends: ("target", len(router.attempts)) if len(router.attempts) < 4 else None
    for number in range(5):
        run.request_at(0.01 + 0.1 * number)
    yield
    for number in range(1, 5):
        run.expect_both_failed(number, Why.REFUSED_PROMPT)
    run.expect_ready(5)


@scenario(options=replace(PLAIN, finish_share=1.0))
def finished(run: ScenarioRun) -> Iterator[None]:
    """The answer ends at the source."""
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


@scenario(num_targets=2)
def rival_target(run: ScenarioRun) -> Iterator[None]:
    """A second target asks for the same transfer."""
    run.request_at(0.01)
    run.when("sent", Grant, _arrive_at_rival, run)
    yield
    run.expect_ready(1)
    run.expect_failed(2, "target", Why.REFUSED_LIVE_ID)


@scenario(source=Side("dp2.tp2"), num_targets=2)
def rival_asks_late(run: ScenarioRun) -> Iterator[None]:
    """A second target asks while the source stops its ranks."""
    run.change_copies("P0", CopyEnd.HANG)
    run.request_at(0.01)
    run.at(0.03, run.abort, 1, "target")
    run.at(0.05, _arrive_at_rival, run)
    yield
    run.expect_both_failed(1, Why.ABORTED)
    run.expect_failed(2, "target", Why.ABORTED, Why.REFUSED_LIVE_ID)


# Progress deadlines.


def _slow_down(run: ScenarioRun, step_s: float) -> None:
    """The last step of every prefill takes this long."""
    engine = run.world.instances["P0"].engine
    assert isinstance(engine, SourceEngine)
    draw = engine._draw_script

    def draw_slow(job: Job) -> PrefillScript:
        script = draw(job)
        return replace(script, compute_s=(*script.compute_s[:-1], step_s))

    engine._draw_script = draw_slow  # type: ignore[method-assign]


@scenario()
def slow_step(run: ScenarioRun) -> Iterator[None]:
    """A prefill step takes longer than the progress deadline of all but two requests."""
    step_s = 2 * PLAIN.timings.progress_s
    run.at(0.005, _slow_down, run, step_s)
    run.request_at(0.01, progress_s={"source": step_s + 0.3})
    run.request_at(0.02, progress_s={"target": step_s + 0.3})
    run.request_at(0.03)
    run.request_at(0.04, progress_s={"source": 0.2, "target": 0.3})
    yield
    run.expect_ready(1, 2)
    for number, patience_s in ((3, PLAIN.timings.progress_s), (4, 0.3)):
        run.expect_both_failed(number, Why.DEADLINE)
        outcome = run.outcome(number, "target")
        text = f"no progress for {patience_s:g} s; raise progress_s"
        run.check(isinstance(outcome, Failed) and text in outcome.cause.text, text, number)
