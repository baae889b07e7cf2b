"""Everything there is in one seed, and the loop that lets time pass until all is settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.protocol.messages import AnyMessage
from baton.protocol.outcomes import Failed, Outcome
from baton.sim.catalogue import Family, family
from baton.sim.chance import Chance
from baton.sim.checkers import Checkers
from baton.sim.engines.job import Job
from baton.sim.faults import fault
from baton.sim.host import Host
from baton.sim.incarnation import Incarnation
from baton.sim.instance import Instance
from baton.sim.links import SessionEnd
from baton.sim.network import Network
from baton.sim.options import Options
from baton.sim.overheard import Overheard
from baton.sim.registry import Registry
from baton.sim.router import Router
from baton.sim.schedule import Schedule
from baton.sim.trace import Trace
from baton.sim.transport.fabric import Fabric
from baton.sim.watch import Watch

ROUND_S = 0.01
"""How often it is looked whether all is settled."""
SETTLE_S = 6.0
"""How long everything may take to settle once there are no faults."""
STEPS_MAX = 400_000


@dataclass(slots=True)
class Facts:
    """What the world knows of its transfers and passes on to who asks."""

    aborted: dict[str, set[str]] = field(default_factory=dict)
    """By transfer: the sides at which it was given up."""
    draw_clock: Callable[[], tuple[float, float]] = lambda: (0.0, 1.0)
    """By how much the clock of a new process is off, and how fast it runs."""
    is_scripted: bool = False
    """Whether things go wrong on purpose that are no faults."""
    pressure: tuple[float, float] = (0.0, 0.0)
    """How much of new pools is taken, at sources and at targets."""


class World:
    """One seed."""

    def __init__(self, seed: int, options: Options, *, is_traced: bool = False) -> None:
        self.options = options
        self.chance = Chance(seed)
        self.schedule = Schedule()
        self.trace = Trace(is_traced)
        self.facts = Facts()
        self.watch = Watch(self)
        self.network = Network(self, self.chance.of("network"))
        self.fabric = Fabric(self.schedule, self.chance.of("copies"), self.watch, self._is_cut)
        self.registry = Registry(self)
        self.router = Router(self, self.chance.of("router"))
        self.instances: dict[str, Instance] = {}
        self.checkers = Checkers(self)

    @property
    def seed(self) -> int:
        """What everything follows from."""
        return self.chance.seed

    def populate(self, found: Family | None = None) -> None:
        """Makes the instances of a family and begins the faults; nothing has started yet."""
        found = found or family(self.options.family)
        for letter, specs in (("P", found.sources), ("D", found.targets)):
            for number, spec in enumerate(specs):
                name = f"{letter}{number}"
                self.instances[name] = Instance(self, name, spec, is_source=letter == "P")
        for name, config in sorted(self.options.faults.items()):
            fault(name).install(self, config)

    def run(self) -> None:
        """Lets time pass until all is settled, or too much of it has passed."""
        for instance in self.instances.values():
            instance.start()
        self.schedule.after(ROUND_S, self._look_round)
        with Overheard(frozenset(self.options.faults)) as overheard:
            while not self.checkers.is_over and self.schedule.step():
                if self.checkers.found is not None:
                    raise self.checkers.found
                if overheard.text:
                    self.checkers.fail("escape", overheard.text)
                if self.schedule.num_done > STEPS_MAX:
                    self.checkers.fail("settles", f"still busy after {STEPS_MAX} steps")

    def _look_round(self) -> None:
        if self.are_faults_over() and self.is_settled():
            self.checkers.finish()
        elif self.schedule.now > self.options.faults_s + SETTLE_S + self._queue_s():
            self.checkers.fail("settles", self.unsettled())
        else:
            self.schedule.after(ROUND_S, self._look_round)

    def _queue_s(self) -> float:
        """A source without room takes one attempt after another, and each may wait in vain for its target."""
        timings = self.options.timings
        return len(self.router.attempts) * (timings.offer_s + timings.beat_s)

    def are_faults_over(self) -> bool:
        """Whether nothing goes wrong any more."""
        return self.schedule.now >= self.options.faults_s

    def is_settled(self) -> bool:
        """Whether every instance lives, every transfer has ended, and nothing moves."""
        return not self.router.num_waiting and not self.fabric.num_pending and not self.unsettled()

    def unsettled(self) -> str:
        """What has not settled yet, in words."""
        found = []
        for name, instance in sorted(self.instances.items()):
            incarnation = instance.incarnation
            if incarnation is None or not incarnation.is_alive:
                found.append(f"{name} is down")
                continue
            jobs = incarnation.engine.jobs
            found += [f"{name} has {job.transfer}: {job.described()}" for _, job in sorted(jobs.items())]
            found += [f"{name} has {attempt.transfer} waiting" for attempt in incarnation.engine.queue]
        return "; ".join(found)

    def _is_cut(self, sender: str, receiver: str) -> bool:
        ends = (sender.partition("/")[0], receiver.partition("/")[0])
        return ends in self.network.cuts

    # What happens, for the trace and the checkers.

    def note(self, node: str, event: str, transfer: str = "", detail: str = "") -> None:
        """One row of the trace."""
        self.trace.add(self.schedule.now, node, event, transfer, detail)

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine has heard how a transfer ended."""
        if self.trace.is_on:
            text = str(outcome.cause) if isinstance(outcome, Failed) else str(outcome.aux.tokens)
            word = type(outcome).__name__.lower()
            self.note(job.incarnation.hosts[rank].name, word, job.transfer, text)
        self.checkers.tell("changed", job, rank, outcome)

    def died(self, incarnation: Incarnation) -> None:
        """A process of an incarnation is gone."""
        self.checkers.tell("died", incarnation)

    def note_message(self, end: SessionEnd, message: AnyMessage, event: str) -> None:
        """A message was sent or came by a session link."""
        if self.trace.is_on:
            transfer = getattr(message, "transfer", "")
            self.note(end.host.name, event, transfer, type(message).__name__)
        self.checkers.tell(event, end, message)

    def note_member(self, host: Host, message: AnyMessage) -> None:
        """A message was sent by a member link."""
        if self.trace.is_on:
            self.note(host.name, "tell", getattr(message, "transfer", ""), type(message).__name__)
        self.checkers.tell("told", host, message)
