"""A failure that one end knows, all ranks of both ends know within a second, unless the network ate it."""

from __future__ import annotations

from baton.protocol.outcomes import Failed, Outcome
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job
from baton.sim.incarnation import Incarnation

KNOWN_S_MAX = 1.0


class PromptFailure(Checker):
    """Measures from the first rank that knows to the last."""

    def __init__(self, world, name: str) -> None:  # type: ignore[no-untyped-def]
        super().__init__(world, name)
        self._first: dict[str, float] = {}
        self._died: dict[str, float] = {}

    def died(self, incarnation: Incarnation) -> None:
        """Whoever is gone cannot pass anything on."""
        self._died[incarnation.name] = self.world.schedule.now

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        if not isinstance(outcome, Failed):
            return
        now = self.world.schedule.now
        first = self._first.setdefault(job.transfer, now)
        since = max(first, job.begun_s.get(rank, 0.0))
        if now - since <= KNOWN_S_MAX:
            return
        ends = frozenset((job.attempt.ends.source, job.attempt.ends.target))
        trouble = self.world.network.trouble.get(ends, -1.0)
        excuse = max(trouble, *(self._died.get(name, -1.0) for name in ends))
        if excuse < first - KNOWN_S_MAX:
            self.fail(
                f"{job.transfer}: failed at {since:.4f} s, but {job.incarnation.name}/{rank} heard of it "
                f"{now - since:.3f} s later: {outcome.cause}"
            )


CHECKER = PromptFailure
