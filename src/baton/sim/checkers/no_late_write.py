"""Nothing is written to a page unless the transfer that holds it is the one that is being copied."""

from __future__ import annotations

from baton.sim.checkers.base import Checker
from baton.sim.watch import Write


class NoLateWrite(Checker):
    """Looks at the owner of every byte at the moment it is written."""

    def landing(self, write: Write) -> None:
        """A piece is about to land."""
        if not write.buffer:
            return
        owners = write.pool.owners_of(write.buffer, write.index)
        mark = write.flight.mark
        if (owners <= 0).any() or (mark > 0 and (owners != mark).any()):
            found = sorted(set(owners.tolist()))
            node = write.flight.ends[0].node if write.flight.ends else "?"
            self.fail(
                f"a copy of attempt {mark} writes {write.buffer} on {node}, where pages belong to {found} "
                "(0: nobody, -1: other work)"
            )


CHECKER = NoLateWrite
