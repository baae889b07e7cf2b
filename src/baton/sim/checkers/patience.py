"""Nobody gives a transfer up for want of progress while it makes progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.messages import AnyMessage, Commit, Landed
from baton.protocol.outcomes import Failed, Outcome, Why
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job
from baton.sim.links import SessionEnd

if TYPE_CHECKING:
    from baton.sim.world import World

PROGRESS = (Landed, Commit)
SLACK = 0.85
"""Clocks run up to a twentieth fast, and words take a while inside an instance."""


class Patience(Checker):
    """Notes when each end last heard or said something of a transfer that is progress."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._moved: dict[tuple[str, str], float] = {}

    def sent(self, end: SessionEnd, message: AnyMessage) -> None:
        """What a source passes on it has heard from its ranks just before."""
        self._note(end, message)

    def received(self, end: SessionEnd, message: AnyMessage) -> None:
        """What a target hears."""
        self._note(end, message)

    def _note(self, end: SessionEnd, message: AnyMessage) -> None:
        if isinstance(message, PROGRESS):
            self._moved[end.host.process.instance, message.transfer] = self.world.schedule.now

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """A rank's engine heard how a transfer ended."""
        if not isinstance(outcome, Failed) or outcome.cause.why is not Why.DEADLINE:
            return
        cause = outcome.cause
        if "no progress" not in cause.text or cause.instance != job.incarnation.name:
            return
        moved = self._moved.get((cause.instance, job.transfer))
        now = self.world.schedule.now
        if moved is not None and now - moved < SLACK * self.world.options.timings.progress_s:
            self.fail(f"{job.transfer}: {cause} on rank {rank}, although it moved {now - moved:.3f} s ago")


CHECKER = Patience
