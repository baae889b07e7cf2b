"""How a scenario is told: who is there, what happens when, and how it has to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.storage import Storage
from baton.protocol.messages import AnyMessage
from baton.protocol.outcomes import Failed, Finished, Outcome, Ready, Why
from baton.sim.catalogue import Family, cache_of
from baton.sim.engines.job import Job
from baton.sim.network import Frame
from baton.sim.options import Options
from baton.sim.request import Attempt, Ends, Prompt
from baton.sim.runner import run_world
from baton.sim.transport.fate import End, Fate
from baton.sim.transport.flight import Flight
from baton.sim.violation import Violation
from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Side:
    """One instance of a scenario."""

    layout: str
    cache: str = "gqa"
    page: int = 4
    num_pages: int = 24

    def spec(self) -> Spec:
        """What it is."""
        cache = cache_of(self.cache)
        storage = Storage(self.page, "bf16").with_pages(dict.fromkeys(cache.groups, self.num_pages))
        return Spec(parse_layout(self.layout), cache, storage)


QUIET_OPTIONS = Options(faults_s=0.3).but(
    finish_share=0.0,
    held_share=0.0,
    one_call_share=0.0,
    verified_share=0.0,
    fence_share=0.0,
    address_share=0.0,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A story: its instances, what happens, and how it ends."""

    name: str
    text: str
    script: Callable[[Play], None]
    expect: Callable[[Play], None]
    source: Side = field(default_factory=lambda: Side("tp2"))
    target: Side = field(default_factory=lambda: Side("pp2"))
    options: Options = QUIET_OPTIONS


class Play:
    """A scenario on stage: what scripts and expectations use."""

    def __init__(self, story: Scenario, seed: int, *, is_traced: bool) -> None:
        self.story = story
        self.world = World(seed, story.options, is_traced=is_traced)
        self.world.facts.is_scripted = True
        self.world.populate(Family(-1, story.source.cache, (story.source.spec(),), (story.target.spec(),)))
        self.told: dict[tuple[int, str], list[Outcome]] = {}
        """By tag and side: what every rank was told."""
        self.num_writes = 0
        self.world.checkers.listen("changed", self._changed)
        self.world.checkers.listen("landing", self._landing)

    def run(self) -> Violation | None:
        """Plays it to its end."""
        self.story.script(self)
        found = run_world(self.world)
        if found is not None:
            return found
        try:
            self.story.expect(self)
        except Violation as unexpected:
            return unexpected
        return None

    # What scripts do.

    def at(self, time_s: float, act: Callable[..., Any], *args: Any) -> None:
        """Has something happen."""
        self.world.schedule.at(time_s, act, *args)

    def ask(self, num_tokens: int = 8, *, target_tokens: int | None = None, is_same: bool = True) -> Attempt:
        """A request comes in now; perhaps the sides tokenise it differently."""
        prompt = Prompt(1000 + num_tokens + len(self.world.router.requests), num_tokens)
        other = Prompt(prompt.salt if is_same else prompt.salt + 7, target_tokens or num_tokens)
        number = len(self.world.router.requests)
        groups = [self.world.instances[name].spec.layout.size("dp") for name in ("P0", "D0")]
        ends = Ends("P0", "D0", number % groups[0], number % groups[1])
        return self.world.router.begin(ends, (prompt, other))

    def ask_at(self, time_s: float, num_tokens: int = 8) -> None:
        """A request comes in later."""
        self.world.router.num_waiting += 1
        self.world.schedule.at(time_s, self._ask, num_tokens)

    def _ask(self, num_tokens: int) -> None:
        self.world.router.num_waiting -= 1
        self.ask(num_tokens)

    def when(
        self, event: str, kind: type[AnyMessage], act: Callable[..., Any], *args: Any, nth: int = 1
    ) -> None:
        """Has something happen when the nth message of a kind is `sent` or was `received`."""
        seen = [0]

        def heard(end: object, message: AnyMessage) -> None:
            del end
            if isinstance(message, kind):
                seen[0] += 1
                if seen[0] == nth:
                    self.world.schedule.after(0.0, act, *args)

        self.world.checkers.listen(event, heard)

    def when_written(self, act: Callable[..., Any], *args: Any, nth: int = 1) -> None:
        """Has something happen when the nth piece lands."""

        def landed(write: object) -> None:
            del write
            if self.num_writes == nth:
                self.world.schedule.after(0.0, act, *args)

        self.world.checkers.listen("landing", landed)

    def reroute(self, name: str, arrive: Callable[[Attempt], None]) -> None:
        """Has the legs of an instance arrive otherwise."""
        self.world.instances[name].arrive = arrive  # type: ignore[method-assign, assignment]

    def kill(self, instance: str, index: int = 0) -> None:
        """A process dies."""
        process = self.world.instances[instance].processes[index]
        self.world.note(process.name, "crash")
        process.kill()

    def abort(self, number: int, *sides: str) -> None:
        """A client goes away."""
        attempt = self.attempt(number)
        self.world.router.abort(attempt, sides)

    def bend(self, kind: type[AnyMessage], change: Callable[[Frame], None], *, times: int = 1) -> None:
        """Changes the arrival of the first frames with a message of a kind."""
        self.world.network.faults.append(_Bend(kind, change, times))

    def strike(self, node: str, end: End, *, times: int = 1000, **changes: float) -> None:
        """Has the first copies of a node end badly."""
        self.world.fabric.faults.append(_Strike(node, end, times, changes))

    # What expectations ask.

    def attempt(self, number: int) -> Attempt:
        """The nth attempt, counted from 1."""
        return self.world.router.attempts[number - 1]

    def outcome(self, number: int, side: str) -> Outcome | None:
        """What the ranks of a side were told; they were all told the same, by a checker's word."""
        found = self.told.get((number, side))
        return found[0] if found else None

    def is_ready(self, number: int) -> None:
        """Both sides have to be ready."""
        for side in ("source", "target"):
            self.check(
                isinstance(self.outcome(number, side), Ready), f"{side} of {number} is not ready", number
            )

    def is_finished(self, number: int) -> None:
        """Both sides have to know that the answer ended at the source."""
        for side in ("source", "target"):
            found = self.outcome(number, side)
            self.check(isinstance(found, Finished), f"{side} of {number} is not finished", number)

    def is_failed(self, number: int, side: str, *whys: Why) -> None:
        """A side has to have failed for one of these reasons."""
        found = self.outcome(number, side)
        is_right = isinstance(found, Failed) and found.cause.why in whys
        words = " or ".join(why.value for why in whys)
        self.check(is_right, f"{side} of {number} did not fail with {words}", number)

    def check(self, holds: bool, text: str, number: int = 0) -> None:
        """Something has to hold."""
        if not holds:
            told = [self.outcome(number, side) for side in ("source", "target")] if number else []
            raise Violation(self.world.seed, self.story.name, f"{text}: {told}" if number else text)

    def _changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        del rank
        self.told.setdefault((job.attempt.tag, job.side), []).append(outcome)

    def _landing(self, write: object) -> None:
        del write
        self.num_writes += 1


@dataclass(slots=True)
class _Bend:
    kind: type[AnyMessage]
    change: Callable[[Frame], None]
    times: int

    def bend(self, frame: Frame) -> None:
        """Changes a frame if it is one of those."""
        if self.times and isinstance(frame.message, self.kind):
            self.times -= 1
            self.change(frame)


@dataclass(slots=True)
class _Strike:
    node: str
    end: End
    times: int
    changes: dict[str, float]

    def strike(self, flight: Flight, fate: Fate) -> None:
        """Changes a fate if the copy is one of those."""
        if self.times and flight.outbox.node.startswith(self.node):
            self.times -= 1
            fate.end, fate.share = self.end, 0.5
            for name, value in self.changes.items():
                setattr(fate, name, value)


def later(delay_s: float) -> Callable[[Frame], None]:
    """A change: the frame comes later, and may be overtaken."""

    def change(frame: Frame) -> None:
        frame.arrivals = [arrival + delay_s for arrival in frame.arrivals]
        frame.is_ordered = False

    return change


def again(delay_s: float) -> Callable[[Frame], None]:
    """A change: the frame comes in its turn, and once more later."""

    def change(frame: Frame) -> None:
        first_s = frame.sender.arrival_s = max(frame.arrivals[0], frame.sender.arrival_s)
        frame.arrivals = [first_s, first_s + delay_s]
        frame.is_ordered = False

    return change


def lost(frame: Frame) -> None:
    """A change: the frame never comes."""
    frame.arrivals = []
