"""How a scenario is written.

A scenario states when its requests arrive and how each ends. Its function schedules what happens in between;
one that has more to check yields while the world runs, and checks it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from baton.plan.layout import parse_layout
from baton.plan.ownership import Spec
from baton.plan.storage import Storage
from baton.protocol.messages import Message
from baton.protocol.outcomes import Failed, Finished, Outcome, Ready, Why
from baton.sim.checkers import attach_checkers
from baton.sim.core import Options, Strength, Violation
from baton.sim.engines import EngineTransfer
from baton.sim.families import SimFamily, cache_of
from baton.sim.network import SimFrame
from baton.sim.router import Ends, SimAttempt, SimPrompt
from baton.sim.runner import run_world
from baton.sim.transport import CopyCourse, CopyEnd, SimCopy
from baton.sim.world import World

SIDES = ("source", "target")
UNENFORCED = Strength(can_enforce_grants=False)
WEAK = Strength(can_enforce_grants=False, can_revoke=False)
PLAIN = Options(
    faults_s=0.3,
    finish_share=0.0,
    held_share=0.0,
    one_call_share=0.0,
    verified_share=0.0,
    fence_share=0.0,
    address_share=0.0,
)


@dataclass(frozen=True, slots=True)
class ScenarioInstance:
    """One instance of a scenario."""

    layout: str
    cache: str = "gqa"
    page: int = 4
    num_pages: int = 24

    def spec(self) -> Spec:
        cache = cache_of(self.cache)
        storage = Storage(self.page, "bf16").with_pages(dict.fromkeys(cache.groups, self.num_pages))
        return Spec(parse_layout(self.layout), cache, storage)


Script = Callable[["ScenarioRun"], Iterator[None] | None]
ScriptT = TypeVar("ScriptT", bound=Script)

SideEnd = type[Ready] | type[Finished] | Why | tuple[Why, ...]
"""How an attempt ends on one side; it failed for one of the reasons."""
End = SideEnd | Mapping[str, SideEnd]
"""How it ends on both sides, or on those that are named."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests, what happens to them, and their known end; the seed moves the timing, not the end."""

    name: str
    text: str
    script: Script
    requests: tuple[float, ...] = ()
    """When each arrives; the attempt of the first one is number 1."""
    num_tokens: int = 8
    ends: Mapping[int, End] = field(default_factory=dict)
    """By number of the attempt."""
    source: ScenarioInstance = ScenarioInstance("tp2")
    target: ScenarioInstance = ScenarioInstance("pp2")
    options: Options = PLAIN
    num_targets: int = 1


SCENARIOS: dict[str, Scenario] = {}


def scenario(**fields: Any) -> Callable[[ScriptT], ScriptT]:
    """Registers a function as a scenario under its name and the first line of its docstring."""

    def register(script: ScriptT) -> ScriptT:
        summary = (script.__doc__ or "").partition("\n")[0].removesuffix(".")
        _register(Scenario(_name_of(script), summary[0].lower() + summary[1:], script, **fields))
        return script

    return register


def variant(name: str, text: str, **changes: Any) -> Callable[[ScriptT], ScriptT]:
    """Registers the scenario of a function once more, under another name and with some fields changed."""

    def register(script: ScriptT) -> ScriptT:
        _register(replace(SCENARIOS[_name_of(script)], name=name, text=text, **changes))
        return script

    return register


def _register(made: Scenario) -> None:
    assert made.name not in SCENARIOS
    SCENARIOS[made.name] = made


def _name_of(script: Script) -> str:
    return script.__name__.replace("_", "-")


class ScenarioRun:
    """One run of a scenario, with the calls that scripts and expectations use.

    The source is instance P0 and the target D0 (a rival of it is D1). Attempts are numbered from 1.
    """

    def __init__(self, scenario: Scenario, seed: int = 0, *, is_traced: bool = False) -> None:
        self.scenario = scenario
        family = SimFamily((scenario.source.spec(),), (scenario.target.spec(),) * scenario.num_targets)
        self.world = World(seed, scenario.options, family, is_scripted=True, is_traced=is_traced)
        self.checkers = attach_checkers(self.world)
        self.outcomes: dict[tuple[int, str], list[Outcome]] = {}
        """By attempt and side: the outcome of every rank."""
        self.num_writes = 0
        self.world.listen("on_outcome", self._on_outcome)
        self.world.listen("on_write", self._on_write)

    def run(self) -> Violation | None:
        for time_s in self.scenario.requests:
            self.request_at(time_s, self.scenario.num_tokens)
        script = self.scenario.script(self)
        if script is not None:
            next(script)
        violation = run_world(self.world)
        if violation is None:
            try:
                for number, end in self.scenario.ends.items():
                    self._expect(number, end)
                if script is not None:
                    next(script, None)
            except Violation as unexpected:
                return unexpected
        return violation

    def _on_outcome(self, job: EngineTransfer, rank: int, outcome: Outcome) -> None:
        self.outcomes.setdefault((job.attempt.tag, job.side), []).append(outcome)

    def _on_write(self, write: object) -> None:
        self.num_writes += 1

    # For scripts.

    def at(self, time_s: float, act: Callable[..., Any], *args: Any) -> None:
        self.world.schedule.at(time_s, act, *args)

    def request(
        self,
        num_tokens: int = 8,
        *,
        target_tokens: int | None = None,
        is_same: bool = True,
        progress_s: Mapping[str, float] | None = None,
    ) -> SimAttempt:
        """Sends a request now; the sides may tokenise it differently, and name progress deadlines."""
        number = len(self.world.router.requests)
        prompt = SimPrompt(1000 + num_tokens + number, num_tokens)
        other = SimPrompt(prompt.salt if is_same else prompt.salt + 7, target_tokens or num_tokens)
        groups = [self.world.instances[name].spec.layout.size("dp") for name in ("P0", "D0")]
        ends = Ends("P0", "D0", number % groups[0], number % groups[1])
        return self.world.router.begin(ends, (prompt, other), progress_s)

    def request_at(
        self, time_s: float, num_tokens: int = 8, progress_s: Mapping[str, float] | None = None
    ) -> None:
        """Sends a request later."""
        router = self.world.router
        router.num_waiting += 1

        def request() -> None:
            router.num_waiting -= 1
            self.request(num_tokens, progress_s=progress_s)

        self.world.schedule.at(time_s, request)

    def when(
        self, event: str, kind: type[Message], act: Callable[..., Any], *args: Any, nth: int = 1
    ) -> None:
        """Acts when the nth message of a kind is `sent` or `received` by a session link."""
        num_seen = 0

        def on_message(end: object, message: Message) -> None:
            nonlocal num_seen
            if isinstance(message, kind):
                num_seen += 1
                if num_seen == nth:
                    self.world.schedule.after(0.0, act, *args)

        self.world.listen(f"on_{event}", on_message)

    def when_written(self, act: Callable[..., Any], *args: Any) -> None:
        """Acts when the first piece of a copy lands."""

        def on_write(write: object) -> None:
            if self.num_writes == 1:
                self.world.schedule.after(0.0, act, *args)

        self.world.listen("on_write", on_write)

    def delay_legs(self, name: str, delay_s: Callable[[SimAttempt], float]) -> None:
        """Lets the legs of an instance arrive later."""
        instance = self.world.instances[name]
        arrive = type(instance).arrive
        self.reroute(
            name, lambda attempt: self.world.schedule.after(delay_s(attempt), arrive, instance, attempt)
        )

    def reroute(self, name: str, arrive: Callable[[SimAttempt], object]) -> None:
        """Replaces what an instance does with legs that arrive."""
        self.world.instances[name].arrive = arrive  # type: ignore[method-assign, assignment]

    def kill(self, instance: str, index: int = 0) -> None:
        process = self.world.instances[instance].processes[index]
        self.world.note(process.name, "crash")
        process.kill()

    def halt(self, node: str, duration_s: float) -> None:
        """Stops the process of a rank for a while."""
        processes = self.world.instances[node.partition("/")[0]].processes
        process = next(process for process in processes if process.name == node)
        process.halt()
        self.world.schedule.after(duration_s, process.resume)

    def break_links(self) -> None:
        for end in self.world.network.standing():
            self.world.network.sever(end)

    def abort(self, number: int, *sides: str) -> None:
        self.world.router.abort(self.attempt(number), sides)

    def change_frames(
        self, kind: type[Message], change: Callable[[SimFrame], None], *, times: int = 1
    ) -> None:
        """Changes the first frames that carry a message of a kind."""
        left = times

        def change_some(frame: SimFrame) -> None:
            nonlocal left
            if left and isinstance(frame.message, kind):
                left -= 1
                change(frame)

        self.world.network.faults.append(change_some)

    def change_copies(self, node: str, end: CopyEnd, *, times: int = 1000, **changes: float) -> None:
        """Has the first copies of a node, or of all nodes of an instance, end like this."""
        left = times

        def change_some(copy: SimCopy, course: CopyCourse) -> None:
            nonlocal left
            if left and copy.sender.node.startswith(node):
                left -= 1
                course.end, course.share = end, 0.5
                for name, value in changes.items():
                    setattr(course, name, value)

        self.world.fabric.faults.append(change_some)

    # For expectations.

    def attempt(self, number: int) -> SimAttempt:
        return self.world.router.attempts[number - 1]

    def outcome(self, number: int, side: str) -> Outcome | None:
        """The outcome of a side; a checker sees to it that all its ranks got the same."""
        outcomes = self.outcomes.get((number, side))
        return outcomes[0] if outcomes else None

    def _expect(self, number: int, end: End) -> None:
        for side, expected in (end if isinstance(end, Mapping) else dict.fromkeys(SIDES, end)).items():
            outcome = self.outcome(number, side)
            if isinstance(expected, type):
                is_expected, text = isinstance(outcome, expected), expected.__name__.lower()
            else:
                whys = (expected,) if isinstance(expected, Why) else expected
                is_expected = isinstance(outcome, Failed) and outcome.cause.why in whys
                text = f"failed with {' or '.join(why.value for why in whys)}"
            self.check(is_expected, f"{side} of {number} is not {text}", number)

    def check(self, holds: bool, text: str, number: int = 0) -> None:
        if not holds:
            outcomes = [self.outcome(number, side) for side in SIDES] if number else []
            text = f"{text}: {outcomes}" if number else text
            raise Violation(self.world.seed, self.scenario.name, text)


# Changes of frames.


def later(delay_s: float) -> Callable[[SimFrame], None]:
    """The frame arrives later, and may be overtaken."""

    def change(frame: SimFrame) -> None:
        frame.arrivals = [arrival + delay_s for arrival in frame.arrivals]
        frame.is_ordered = False

    return change


def again(delay_s: float) -> Callable[[SimFrame], None]:
    """The frame arrives in its turn, and once more later."""

    def change(frame: SimFrame) -> None:
        first_s = frame.sender.arrival_s = max(frame.arrivals[0], frame.sender.arrival_s)
        frame.arrivals = [first_s, first_s + delay_s]
        frame.is_ordered = False

    return change


def lost(frame: SimFrame) -> None:
    """The frame never arrives."""
    frame.arrivals = []
