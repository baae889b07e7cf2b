"""The options of one seed, virtual time, processes, random streams, the trace, and the event bus.

Everything runs in one thread, off one heap of scheduled calls. A part of the simulator draws from a random
stream of its own name, so what one part draws does not shift what another draws.
"""

from __future__ import annotations

import hashlib
import heapq
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from baton.errors import BatonError
from baton.protocol.timings import Timings

TIMINGS = Timings(
    beat_s=0.2,
    silence_s=0.7,
    offer_s=0.8,
    progress_s=0.6,
    total_s=2.0,
    copy_s=0.25,
    ask_again_s=0.05,
    ask_again_s_max=0.3,
    redial_s=0.02,
    redial_s_max=0.2,
    linger_s=1.0,
)


@dataclass(frozen=True, slots=True)
class Strength:
    """What the simulated transport is capable of."""

    can_enforce_grants: bool = True
    can_revoke: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """A `_share` is the probability for each request."""

    family: int = 0
    """Number of the instance family; see baton.sim.families."""
    num_requests: int = 3
    spread_s: float = 0.03
    """The requests arrive within this time."""
    has_same_ends: bool = False
    """Whether all requests go between the same two dp groups, so that their ranks have copied before."""
    faults: Mapping[str, Any] = field(default_factory=dict)
    """Faults by name; see baton.sim.faults."""
    faults_s: float = 0.5
    """Faults happen before this time only."""
    strength: Strength = field(default_factory=Strength)
    timings: Timings = TIMINGS
    slowness: float = 1.0
    """Factor on the time that prefill takes."""
    decode_slowness: float = 1.0
    """Factor on the time that decoding takes."""
    finish_share: float = 0.05
    """Answers that end at the source."""
    held_share: float = 0.4
    """Prompts of which the target may hold a prefix."""
    one_call_share: float = 0.3
    """Requests for which one rank of the target names the pages of all ranks."""
    verified_share: float = 0.2
    """Requests with checksums."""
    fence_share: float = 0.3
    """Target pages that the device still writes to when they are named."""
    withdraw_share: float = 0.0
    """Requests that the source preempts in the middle of their prefill and resumes with other pages."""
    address_share: float = 0.2
    """Sources that a target knows by address, not by name."""
    epochless_share: float = 0.5
    """Ranks that learn the epoch of their coordinator when they attach."""
    is_packing: bool = False


def snake_case(name: str) -> str:
    """A class's name as it is printed and asked for."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


class Violation(BatonError):  # noqa: N818 - a finding, not an error of the simulator
    """A broken promise: the seed, the checker that saw it, and what it saw."""

    def __init__(self, seed: int, checker: str, text: str) -> None:
        super().__init__(f"seed {seed}: {checker}: {text}")
        self.seed = seed
        self.checker = checker
        self.text = text

    def __reduce__(self) -> tuple[type[Violation], tuple[int, str, str]]:
        return Violation, (self.seed, self.checker, self.text)


@dataclass(slots=True, eq=False)
class ScheduledCall:
    """One entry of the schedule; `act` is None after `cancel`."""

    act: Callable[..., None] | None
    args: tuple[Any, ...]

    def cancel(self) -> None:
        self.act = None


class Schedule:
    """Calls by virtual time; calls of equal time run in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, ScheduledCall]] = []
        self._num_added = 0

    def at(self, time_s: float, act: Callable[..., None], *args: Any) -> ScheduledCall:
        """Schedules a call; a time in the past means now."""
        call = ScheduledCall(act, args)
        self._num_added += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._num_added, call))
        return call

    def after(self, delay_s: float, act: Callable[..., None], *args: Any) -> ScheduledCall:
        return self.at(self.now + delay_s, act, *args)

    def step(self) -> bool:
        """Runs the next call; false if there is none."""
        while self._heap:
            time_s, _, call = heapq.heappop(self._heap)
            if call.act is None:
                continue
            self.now = time_s
            self.num_done += 1
            call.act(*call.args)
            return True
        return False


@dataclass(frozen=True, slots=True)
class SkewedClock:
    """The clock of one process: off by a constant, and a little fast or slow."""

    schedule: Schedule
    offset_s: float = 0.0
    rate: float = 1.0

    def now(self) -> float:
        return self.offset_s + self.schedule.now * self.rate

    def schedule_time(self, shown_s: float) -> float:
        """The time of the schedule at which this clock shows `shown_s`."""
        return (shown_s - self.offset_s) / self.rate


@dataclass(slots=True, eq=False)
class SimProcess:
    """One process of an instance; calls to a halted process wait until it resumes."""

    name: str
    instance: str
    epoch: int
    clock: SkewedClock
    is_alive: bool = True
    is_halted: bool = False
    halted_until_s: float = float("-inf")
    """When it last resumed; infinite while it is halted."""
    at_death: list[Callable[[], None]] = field(default_factory=list)
    _backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)

    @property
    def incarnation(self) -> str:
        return f"{self.instance}#{self.epoch}"

    def call(self, act: Callable[..., None], *args: Any) -> None:
        """Runs a call in this process: now, when it resumes, or never if it is dead."""
        if not self.is_alive:
            return
        if self.is_halted:
            self._backlog.append((act, args))
        else:
            act(*args)

    def call_after(self, delay_s: float, act: Callable[..., None], *args: Any) -> None:
        self.clock.schedule.after(delay_s, self.call, act, *args)

    def is_running(self) -> bool:
        return self.is_alive and not self.is_halted

    def halt(self) -> None:
        self.is_halted = True
        self.halted_until_s = float("inf")

    def resume(self) -> None:
        self.is_halted = False
        self.halted_until_s = self.clock.schedule.now
        backlog, self._backlog = self._backlog, []
        for act, args in backlog:
            self.call(act, *args)

    def kill(self) -> None:
        if self.is_alive:
            self.is_alive = False
            for act in self.at_death:
                act()


class Trace:
    """One aligned row for each event, kept only if asked for; a replay gives the same bytes."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self.rows: list[str] = []

    def add(self, time_s: float, node: str, event: str, transfer: str = "", detail: str = "") -> None:
        if self.is_on:
            row = f"{time_s * 1000:12.4f}  {node:<10} {event:<16} {transfer:<8} {detail}"
            self.rows.append(row.rstrip())

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.rows).encode()).hexdigest()


class Context:
    """What every part of one seed shares.

    The events that `notify` passes to hooks, and their arguments:

        on_submit(copy, pool, buffer)     a rank queued a copy
        on_write(write)                   a piece of a copy is about to be written
        on_copy_end(copy, how)            a copy completed
        on_outcome(job, rank, outcome)    a rank's engine got the outcome of a transfer
        on_decoded(job, rank)             a rank's engine has used the cache
        on_death(incarnation)             the first process of an incarnation died
        on_withdraw(job, rank)            a source rank withdraws what is not copied
        on_withdrawn(job, rank, withdrawal)  no copy reads a withdrawn page any more
        on_sent(end, message)             a message left by a session link
        on_received(end, message)         a message arrived by a session link
        on_member_sent(host, message)     a message left by a member link
        on_settled()                      nothing is under way any more
    """

    def __init__(self, seed: int, options: Options, *, is_traced: bool = False) -> None:
        self.seed = seed
        self.options = options
        self.schedule = Schedule()
        self.trace = Trace(is_traced)
        self.violation: Violation | None = None
        """The first that a hook raised: a driver may have caught it."""
        self.draw_clock: Callable[[], tuple[float, float]] = lambda: (0.0, 1.0)
        """Offset and rate of the clock of a new process."""
        self._streams: dict[str, random.Random] = {}
        self._hooks: dict[str, list[Callable[..., None]]] = {}

    def rng(self, name: str) -> random.Random:
        """The random stream of this name."""
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self.seed}/{name}")
        return self._streams[name]

    def are_faults_over(self) -> bool:
        return self.schedule.now >= self.options.faults_s

    def note(self, node: str, event: str, transfer: str = "", detail: str = "") -> None:
        """Adds a row to the trace."""
        self.trace.add(self.schedule.now, node, event, transfer, detail)

    def listen(self, event: str, hook: Callable[..., None]) -> None:
        self._hooks.setdefault(event, []).append(hook)

    def notify(self, event: str, *args: Any) -> None:
        """Calls the hooks of an event."""
        try:
            for hook in self._hooks.get(event, ()):
                hook(*args)
        except Violation as violation:
            self.violation = self.violation or violation
            raise

    def fail(self, checker: str, text: str) -> NoReturn:
        raise Violation(self.seed, checker, text)
