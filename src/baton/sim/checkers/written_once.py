"""No byte of a hand-over is written twice, and where nothing is staged each is written once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.outcomes import Outcome, Ready
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job
from baton.sim.watch import Write

if TYPE_CHECKING:
    from baton.sim.world import World


class WrittenOnce(Checker):
    """Counts the writes of every byte since its page was reserved."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._staged: set[str] = set()

    def landing(self, write: Write) -> None:
        """What goes through staging is counted where it cannot be seen."""
        if not write.buffer:
            assert write.flight.ends is not None
            self._staged.add(write.flight.ends[0].node)

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """Looks when the first rank hears that it is ready."""
        if job.is_source or not isinstance(outcome, Ready) or len(job.outcomes) > 1:
            return
        for one in job.ranks:
            pool, node = job.incarnation.pools[one], job.incarnation.hosts[one].name
            for buffer, index in job.books[one].sent(job.wish.held):
                counts = pool.num_writes[buffer][index]
                if counts.max(initial=0) > 1:
                    self.fail(
                        f"{job.transfer}: a byte of {buffer} on {node} was written {counts.max()} times"
                    )
                if node not in self._staged and counts.min(initial=1) < 1:
                    self.fail(f"{job.transfer}: a byte of {buffer} on {node} was never written")


CHECKER = WrittenOnce
