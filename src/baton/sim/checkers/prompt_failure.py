"""A failure that one end knows, all ranks of both ends know within a second, unless the network ate it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.outcomes import Failed, Outcome
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job
from baton.sim.incarnation import Incarnation
from baton.sim.transport.flight import Flight

if TYPE_CHECKING:
    from baton.sim.world import World

KNOWN_S_MAX = 0.45
"""A second of real time; here everything that takes long is shortened to less than half."""
EXCUSE_S = 1.2
"""For how long something that was lost may have its effects: until a handshake is given up."""
FORGOTTEN = 0.9
"""Who asks later than this share of the time for which outcomes are remembered may not be told."""


class PromptFailure(Checker):
    """Measures from the first rank that knows, or the first copy that failed, to the last rank."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._first: dict[int, float] = {}
        self._died: dict[str, float] = {}

    def died(self, incarnation: Incarnation) -> None:
        """Whoever is gone cannot pass anything on."""
        self._died[incarnation.name] = self.world.schedule.now

    def flight_ended(self, flight: Flight, how: str) -> None:
        """A copy that failed is a failure that is known."""
        if how != "Done" and flight.mark > 0:
            self._first.setdefault(flight.mark, self.world.schedule.now)

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        if not isinstance(outcome, Failed):
            return
        now = self.world.schedule.now
        first = self._first.setdefault(job.attempt.tag, now)
        since = max(first, job.begun_s.get(rank, 0.0))
        if now - since <= KNOWN_S_MAX + 3 * self.world.network.slowest_s:
            return
        if since - first > FORGOTTEN * self.world.options.timings.linger_s:
            return
        if self._excuse_s(job) < first - EXCUSE_S:
            self.fail(
                f"{job.transfer}: failed at {since:.4f} s, but {job.incarnation.name}/{rank} heard of it "
                f"{now - since:.3f} s later: {outcome.cause}"
            )

    def _excuse_s(self, job: Job) -> float:
        """When something last kept the two sides, or their ranks, from hearing of each other."""
        names = (job.attempt.ends.source, job.attempt.ends.target)
        found = [self.world.network.trouble.get(frozenset(names), -EXCUSE_S)]
        for name in names:
            found.append(self._died.get(name, -EXCUSE_S))
            found += [process.stopped_s for process in self.world.instances[name].processes]
        return max(found)


CHECKER = PromptFailure
