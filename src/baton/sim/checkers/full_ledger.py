"""Nothing is ready before every byte that the plan names was reported as landed, and the aux record came."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from baton.plan.planner import plan
from baton.plan.routes import Prompt, resolve
from baton.protocol.outcomes import Outcome, Ready
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job
from baton.sim.pool import Pool
from baton.sim.transport.flight import Flight

if TYPE_CHECKING:
    from baton.sim.world import World


class FullLedger(Checker):
    """Adds up the copies that were done, by attempt; copies out of staging cannot be told apart."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._num_bytes: Counter[int] = Counter()
        self._packers: set[str] = set()

    def submitted(self, flight: Flight, pool: Pool, buffer: str) -> None:
        """A batch was queued."""
        del pool
        if not buffer:
            self._packers.add(flight.outbox.node.partition("/")[0])

    def flight_ended(self, flight: Flight, how: str) -> None:
        """A batch came to its completion."""
        if how == "Done":
            self._num_bytes[flight.mark] += len(flight.load.written)

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """Looks when the first rank hears that it is ready."""
        if job.is_source or not isinstance(outcome, Ready) or len(job.outcomes) > 1:
            return
        ends = job.attempt.ends
        if ends.source in self._packers:
            return
        source = self.world.instances[ends.source].spec
        found = plan(source, job.incarnation.spec, ends.source_dp, ends.target_dp)
        routes = resolve(found, Prompt(job.attempt.target_prompt.num_tokens, job.wish.held))
        due, done = sum(route.num_bytes for route in routes), self._num_bytes[job.attempt.tag]
        if due != done:
            self.fail(f"{job.transfer}: ready on rank {rank} with {done} of {due} bytes copied")


CHECKER = FullLedger
