"""Where nothing goes wrong every transfer succeeds."""

from __future__ import annotations

from baton.protocol.outcomes import Failed, Outcome
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job


class Clean(Checker):
    """Watches seeds without faults."""

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        is_meant = self.world.options.faults or self.world.facts.is_scripted
        if isinstance(outcome, Failed) and not is_meant:
            node = f"{job.incarnation.name}/{rank}"
            self.fail(f"{job.transfer} failed on {node} in a world without faults: {outcome.cause}")


CHECKER = Clean
