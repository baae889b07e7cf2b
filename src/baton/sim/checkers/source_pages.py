"""A page of a source is not used for anything else while a copy that has not ended reads it."""

from __future__ import annotations

from baton.sim.checkers.base import Checker
from baton.sim.pool import Pool
from baton.sim.transport.flight import Flight
from baton.sim.watch import Write


class SourcePages(Checker):
    """Looks at the owner of every byte at the moment it is read."""

    def submitted(self, flight: Flight, pool: Pool, buffer: str) -> None:
        """A batch was queued: its pages have to be of one transfer that has not given them back."""
        owners = pool.owners_of(buffer, flight.load.read) if buffer else ()
        if any(owner != flight.mark or owner <= 0 for owner in set(map(int, owners))):
            self.fail(f"a copy on {flight.outbox.node} is to read pages of {sorted(set(map(int, owners)))}")

    def landing(self, write: Write) -> None:
        """A piece is about to be read; a copy that has failed may read what it likes, nobody believes it."""
        if write.flight.is_ended or not write.source_buffer:
            return
        owners = write.source.owners_of(write.source_buffer, write.read)
        if (owners != write.flight.mark).any():
            found = sorted(set(owners.tolist()))
            node = write.flight.outbox.node
            self.fail(
                f"a copy of attempt {write.flight.mark} reads {write.source_buffer} on {node}, where pages "
                f"belong to {found}"
            )


CHECKER = SourcePages
