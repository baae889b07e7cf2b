"""A target rank does not ask its transport whether writes can still land."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.messages import Closed
from baton.session.writers import TargetWriters
from baton.sim.faults import copies
from baton.sim.transport.endpoint import Strength
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_take_back = TargetWriters._take_back


def _hopeful(self: TargetWriters, incoming: Any, must_prove_quiet: bool) -> Closed:
    _take_back(self, incoming, False)
    return Closed(grant=incoming.record.grant, rank=self.config.rank, is_quiet=True)


@contextmanager
def broken() -> Iterator[None]:
    """Says still, whatever the transport says."""
    with patched(TargetWriters, _take_back=_hopeful):
        yield


VARIANT = Variant(
    "a rank says that writers are still without asking its transport",
    broken,
    ("no_late_write", "bytes_right"),
    {
        "faults": {"copies": copies.Config(0.3, ("late", "hang", "again"), 0.3, 1.0)},
        "strength": Strength(can_enforce_grants=False, can_revoke=False),
    },
)
