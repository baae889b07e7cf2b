"""Transfer ids, prompts and pages: what is asked for, by whom, and whether there is room."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from baton.errors import ConfigError
from baton.protocol.messages import Grant, Paths, Settled
from baton.protocol.outcomes import Failed, Finished, Ready, Why
from baton.session.handles import Digest, Request
from baton.sim.engines import EngineTransfer, PrefillScript, SourceEngine
from baton.sim.faults import Skew
from baton.sim.router import SimAttempt
from baton.sim.scenarios.run import PLAIN, WEAK, ScenarioInstance, ScenarioRun, scenario, variant
from baton.sim.transport import CopyEnd

FORGOTTEN_S = 5.0
"""When nobody remembers a transfer that ended at the start."""
SMALL = ScenarioInstance("pp2", num_pages=4)
NUM_QUEUED = 12
LAST_S = 3.0


# Transfer ids.


def _send_again(run: ScenarioRun) -> None:
    """Both legs arrive once more under the same id."""
    duplicate = replace(run.attempt(1), tag=2)
    run.world.router.attempts.append(duplicate)
    for name in ("P0", "D0"):
        run.world.instances[name].arrive(duplicate)


@scenario(requests=(0.01,), ends={1: Ready, 2: Why.REFUSED_LIVE_ID})
def id_replayed(run: ScenarioRun) -> None:
    """A transfer id comes again after its end."""
    run.when("received", Settled, _send_again, run)


@scenario(requests=(0.01,), ends={1: Ready, 2: Why.REFUSED_LIVE_ID})
def id_live(run: ScenarioRun) -> None:
    """A transfer id comes again while it is live."""
    run.at(0.0135, _send_again, run)


@scenario(requests=(0.01,), ends={1: Ready, 2: Ready}, options=replace(PLAIN, faults_s=FORGOTTEN_S))
def id_reused(run: ScenarioRun) -> None:
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

    run.at(0.1, remember)
    run.at(FORGOTTEN_S, _send_again, run)
    run.when("received", Grant, deliver_old, nth=2)


@scenario(
    requests=(0.01, 0.1),
    ends={1: Why.ABORTED, 2: {"source": (Why.ABORTED, Why.REFUSED_LIVE_ID)}, 3: Ready},
    options=replace(PLAIN, strength=WEAK, slowness=0.1),
)
def id_aborted_again(run: ScenarioRun) -> None:
    """A source aborts and begins again under the same id while the grant is on its way to its ranks."""

    def begin_again() -> None:
        run.abort(1, "source")
        duplicate = replace(run.attempt(1), tag=2)
        run.world.router.attempts.append(duplicate)
        run.world.router.aborted.clear()
        run.world.instances["P0"].arrive(duplicate)

    run.when("received", Grant, begin_again)


@scenario(requests=(0.01,), ends={1: Ready, 2: Ready})
def two_attempts(run: ScenarioRun) -> None:
    """The router retries a request while its first attempt is under way."""

    def retry() -> None:
        router = run.world.router
        router.attempts_max = 2
        router.leg_ended(run.attempt(1), "the router lost patience")

    run.when_written(retry)


# Prompts and peers that do not match.


@scenario(requests=(0.05,), ends={1: Why.REFUSED_PROMPT, 2: Ready})
def other_prompt(run: ScenarioRun) -> None:
    """The sides tokenise a prompt differently."""
    run.at(0.01, lambda: run.request(is_same=False))


@scenario(requests=(0.05,), ends={1: Why.REFUSED_PROMPT, 2: Ready})
def other_length(run: ScenarioRun) -> None:
    """The sides tokenise a prompt to different lengths."""
    run.at(0.01, lambda: run.request(8, target_tokens=11))


@scenario(requests=(0.01,), ends={1: {"source": Why.DEADLINE, "target": Why.REFUSED_VERSION}})
def version_mismatch(run: ScenarioRun) -> None:
    """A peer of another version is refused with the reason."""
    run.world.instances["P0"].versions = (7, 9)


@scenario(
    requests=(0.01,),
    ends={1: {"source": (Why.DEADLINE, Why.REFUSED_LAYOUT), "target": Why.REFUSED_LAYOUT}},
    target=ScenarioInstance("pp2", "latent"),
)
def layout_mismatch(run: ScenarioRun) -> Iterator[None]:
    """A peer with another cache is refused with the reason."""
    yield
    run.check(run.num_writes == 0, "something was written between instances that have no plan")


@scenario(requests=(0.01, 0.04, 0.07), ends={1: Ready, 2: Ready, 3: Ready})
def clocks_apart(run: ScenarioRun) -> None:
    """Every process has a clock of its own."""
    Skew(1e6, 0.05).install(run.world)


@scenario(
    requests=(0.01, 30.1, 30.3),
    ends={1: Ready, 2: Why.COPY_FAILED, 3: Ready},
    options=replace(PLAIN, faults_s=30.5),
)
def idle(run: ScenarioRun) -> None:
    """Connections died while there was nothing to copy."""
    run.at(30.0, run.change_copies, "P0", CopyEnd.ERROR)
    run.at(30.2, run.world.fabric.faults.clear)


# Pages.


@scenario(ends={1: Ready})
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


@scenario(requests=(0.01, 0.011), num_tokens=16, ends={1: Ready, 2: Ready}, target=SMALL)
def slow_target(run: ScenarioRun) -> None:
    """A transfer waits for pages, and gets them."""

    def hold() -> None:
        """The first transfer holds all pages of the target for a while."""
        run.world.fabric.copy_s = 0.05
        run.at(0.2, setattr, run.world.fabric, "copy_s", 0.0005)

    run.when("sent", Grant, hold)


@variant(
    "overload-of-the-target",
    "the same where decoding takes long, and the source has nothing to do",
    options=replace(PLAIN, decode_slowness=60.0, faults_s=LAST_S),
)
@variant(
    "overload-of-the-source",
    "the same where the source has no room",
    source=ScenarioInstance("tp2", num_pages=4),
    target=ScenarioInstance("pp2"),
)
@scenario(
    requests=tuple(0.01 + 0.001 * number for number in range(NUM_QUEUED)),
    num_tokens=16,
    ends=dict.fromkeys(range(1, NUM_QUEUED + 1), Ready),
    target=SMALL,
    options=replace(PLAIN, slowness=60.0, faults_s=LAST_S),
)
def overload(run: ScenarioRun) -> Iterator[None]:
    """Transfers wait for pages longer than any deadline, one after the other, and are ready."""
    yield
    timings = run.scenario.options.timings
    assert run.world.schedule.now > timings.offer_s + timings.total_s, "nothing had to wait for long"


@scenario(
    requests=(0.01, 2.0),
    num_tokens=16,
    ends={1: Why.DEADLINE, 2: Ready},
    target=SMALL,
    options=replace(PLAIN, faults_s=LAST_S),
)
def overload_that_is_stuck(run: ScenarioRun) -> None:
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


@variant(
    "stuck-transfers-weak",
    "the same without revocation",
    options=replace(PLAIN, strength=WEAK, faults_s=1.6),
)
@scenario(requests=(0.01, 0.011, 0.012), ends={number: {"target": Why.PEER_LOST} for number in (1, 2, 3)})
def stuck_transfers(run: ScenarioRun) -> None:
    """Pages of stuck transfers come back by themselves."""

    def halt_source() -> None:
        """The source halts with three grants, and resumes when nobody waits any more."""
        for process in run.world.instances["P0"].processes:
            process.halt()
            run.world.schedule.after(1.5, process.resume)

    run.when("received", Grant, halt_source, nth=3)


@scenario(
    requests=tuple(0.01 + 0.001 * number for number in range(6)),
    num_tokens=16,
    source=ScenarioInstance("tp2", num_pages=8),
    target=ScenarioInstance("pp2", num_pages=8),
)
def circular_wait(run: ScenarioRun) -> Iterator[None]:
    """Source and target are full of each other's work.

    The two sides get the same requests in opposite order, and have room for one and two of them.
    """
    target = run.world.instances["D0"]
    waiting: list[SimAttempt] = []

    def arrive_reversed(attempt: SimAttempt) -> None:
        waiting.append(attempt)
        if len(waiting) == 6:
            for waiter in reversed(waiting):
                type(target).arrive(target, waiter)

    run.reroute("D0", arrive_reversed)
    yield
    num_ready = sum(isinstance(run.outcome(number, "target"), Ready) for number in range(1, 7))
    run.check(num_ready >= 1, "no transfer succeeded")


@scenario(
    requests=tuple(0.01 + 0.01 * number for number in range(6)),
    ends=dict.fromkeys(range(1, 7), Ready),
    target=ScenarioInstance("dp2.tp2"),
    options=replace(PLAIN, one_call_share=1.0),
)
def one_caller(run: ScenarioRun) -> None:
    """One rank names the pages of all, in any dp group."""


@variant(
    "sizes-pages",
    "the same with chunks that end inside a page",
    source=ScenarioInstance("cp2:split", page=8),
    target=ScenarioInstance("cp2:stripe1", page=3, num_pages=32),
)
@variant(
    "sizes-state",
    "the same for a cache of state only",
    source=ScenarioInstance("tp2", "state"),
    target=ScenarioInstance("pp2", "state"),
)
@variant("sizes-held", "the same with prefixes that the target holds", options=replace(PLAIN, held_share=1.0))
@scenario(ends=dict.fromkeys(range(1, 7), Ready))
def sizes(run: ScenarioRun) -> None:
    """Prompts shorter than a page, of whole pages, and in between."""
    for number, num_tokens in enumerate((1, 3, 4, 8, 9, 24)):
        run.request_at(0.01 + 0.02 * number, num_tokens)


# Ranks of one group that disagree.


@scenario(requests=(0.01, 0.1), ends={1: Why.REFUSED_PROMPT, 2: Ready})
def rank_mismatch(run: ScenarioRun) -> None:
    """One source rank prefilled another prompt than the others."""
    run.world.router.draw_odd_rank = lambda ends: ("source", 1) if not run.world.router.attempts else None


@scenario(
    requests=(0.01, 0.11, 0.21, 0.31),
    ends=dict.fromkeys(range(1, 5), Why.REFUSED_PROMPT),
    options=replace(PLAIN, finish_share=1.0, faults_s=0.6),
)
def rank_mismatch_finished(run: ScenarioRun) -> None:
    """One source rank ends its answer, and another prefilled another prompt.

    The target asks before the answer ends or after it, and the odd rank joins early or late.
    """
    run.world.router.draw_odd_rank = lambda ends: ("source", 1)
    run.delay_legs("D0", lambda attempt: 0.0 if attempt.tag < 3 else 0.05)
    for moment_s in (0.109, 0.309):
        run.at(moment_s, run.halt, "P0/1", 0.03)


@scenario(
    requests=(0.01, 0.11, 0.21, 0.31, 0.41),
    ends={**dict.fromkeys(range(1, 5), Why.REFUSED_PROMPT), 5: Ready},
    target=ScenarioInstance("tp4"),
    options=replace(PLAIN, faults_s=0.6),
)
def rank_mismatch_target(run: ScenarioRun) -> None:
    """One target rank asks for another prompt than the others.

    The odd rank asks first, in between and last.
    """
    router = run.world.router
    router.draw_odd_rank = lambda ends: ("target", len(router.attempts)) if len(router.attempts) < 4 else None


@scenario(requests=(0.01,), ends={1: Finished}, options=replace(PLAIN, finish_share=1.0))
def finished(run: ScenarioRun) -> None:
    """The answer ends at the source."""


def _arrive_at_rival(run: ScenarioRun) -> None:
    """A second target gets the decode leg of the first attempt too."""
    attempt = run.attempt(1)
    rival = replace(attempt, tag=2, ends=replace(attempt.ends, target="D1"))
    run.world.router.attempts.append(rival)
    run.world.router.aborted.clear()
    run.world.instances["D1"].arrive(rival)


@scenario(requests=(0.01,), ends={1: Ready, 2: {"target": Why.REFUSED_LIVE_ID}}, num_targets=2)
def rival_target(run: ScenarioRun) -> None:
    """A second target asks for the same transfer."""
    run.when("sent", Grant, _arrive_at_rival, run)


@scenario(
    requests=(0.01,),
    ends={1: Why.ABORTED, 2: {"target": (Why.ABORTED, Why.REFUSED_LIVE_ID)}},
    source=ScenarioInstance("dp2.tp2"),
    num_targets=2,
)
def rival_asks_late(run: ScenarioRun) -> None:
    """A second target asks while the source stops its ranks."""
    run.change_copies("P0", CopyEnd.HANG)
    run.at(0.03, run.abort, 1, "target")
    run.at(0.05, _arrive_at_rival, run)


# Progress deadlines.


def _slow_down(run: ScenarioRun, step_s: float) -> None:
    """The last step of every prefill takes this long."""
    engine = run.world.instances["P0"].engine
    assert isinstance(engine, SourceEngine)
    draw = engine._draw_script

    def draw_slow(job: EngineTransfer) -> PrefillScript:
        script = draw(job)
        return replace(script, compute_s=(*script.compute_s[:-1], step_s))

    engine._draw_script = draw_slow  # type: ignore[method-assign]


@scenario(ends={1: Ready, 2: Ready, 3: Why.DEADLINE, 4: Why.DEADLINE})
def slow_step(run: ScenarioRun) -> Iterator[None]:
    """A prefill step takes longer than the progress deadline of all but two requests."""
    step_s = 2 * PLAIN.timings.progress_s
    run.at(0.005, _slow_down, run, step_s)
    run.request_at(0.01, progress_s={"source": step_s + 0.3})
    run.request_at(0.02, progress_s={"target": step_s + 0.3})
    run.request_at(0.03)
    run.request_at(0.04, progress_s={"source": 0.2, "target": 0.3})
    yield
    for number, patience_s in ((3, PLAIN.timings.progress_s), (4, 0.3)):
        outcome = run.outcome(number, "target")
        text = f"no progress for {patience_s:g} s; raise progress_s"
        run.check(isinstance(outcome, Failed) and text in outcome.cause.text, text, number)
