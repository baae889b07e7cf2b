"""What is shown as ready is exactly right, on every rank, and stays so while it is used."""

from __future__ import annotations

from baton.protocol.outcomes import Outcome, Ready
from baton.sim.checkers.base import Checker
from baton.sim.engines.job import Job


class BytesRight(Checker):
    """Compares every byte that decoding will read."""

    def changed(self, job: Job, rank: int, outcome: Outcome) -> None:
        """Ready on one rank means ready on all."""
        if not job.is_source and isinstance(outcome, Ready) and len(job.outcomes) == 1:
            for one in job.ranks:
                self._compare(job, one, f"when rank {rank} was told ready")

    def decoded(self, job: Job, rank: int) -> None:
        """Nothing may have changed since."""
        self._compare(job, rank, "after decoding")

    def _compare(self, job: Job, rank: int, when: str) -> None:
        wrong = job.books[rank].num_wrong(job.incarnation.pools[rank].memory)
        if wrong:
            self.fail(f"{job.transfer}: {wrong} bytes of {job.incarnation.name}/{rank} are wrong {when}")


CHECKER = BytesRight
