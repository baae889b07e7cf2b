"""Where nothing goes wrong, or nothing that should matter, every transfer succeeds."""

from __future__ import annotations

from baton.protocol.outcomes import Failed, Outcome
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job

HARMLESS = frozenset({"delay", "duplication", "retries", "skew"})


class Clean(Checker):
    """Watches seeds without faults, or with such as a transfer has to stand."""

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        is_meant = self.world.facts.is_scripted or not HARMLESS.issuperset(self.world.options.faults)
        if isinstance(outcome, Failed) and not is_meant:
            node = f"{job.incarnation.name}/{rank}"
            self.fail(f"{job.transfer} failed on {node}, where nothing went wrong: {outcome.cause}")


CHECKER = Clean
