"""Both ends of a transfer, and all ranks of an end, tell the same story."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.outcomes import Failed, Finished, Outcome, Ready, Why
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job

if TYPE_CHECKING:
    from baton.sim.world import World

EXCUSES = frozenset({Why.PEER_LOST, Why.DEADLINE})
"""What a source may say of a transfer that its target has: the verdict never reached it."""


class Agreement(Checker):
    """Compares outcomes as they come."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._known: dict[int, dict[str, Outcome]] = {}

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        known = self._known.setdefault(job.attempt.tag, {})
        before = known.setdefault(job.side, outcome)
        if type(before) is not type(outcome):
            told = f"{_words(before)} and {_words(outcome)}"
            self.fail(f"{job.transfer}: ranks of {job.incarnation.name} were told {told}")
        if isinstance(outcome, Finished):
            known[job.side] = outcome
        if not isinstance(outcome, Failed) and outcome.aux != job.attempt.aux:
            self.fail(f"{job.transfer}: {job.incarnation.name}/{rank} got the aux record {outcome.aux}")
        if len(known) == 2:
            self._compare(job.transfer, known["source"], known["target"])

    def _compare(self, transfer: str, source: Outcome, target: Outcome) -> None:
        match source, target:
            case (Ready(), Ready()) | (Finished(), Finished() | Failed()) | (Failed(), Failed()):
                return
            case Failed(cause), Ready() if cause.why in EXCUSES:
                return
        self.fail(f"{transfer}: the source says {_words(source)}, the target {_words(target)}")


def _words(outcome: Outcome) -> str:
    return str(outcome.cause) if isinstance(outcome, Failed) else type(outcome).__name__.lower()


CHECKER = Agreement
