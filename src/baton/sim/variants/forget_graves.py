"""A source forgets of which grants it said quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.session.outbound import OutboundTransfers
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant


@contextmanager
def broken() -> Iterator[None]:
    """Buries nothing."""
    with patched(OutboundTransfers, _retire=lambda self, transfer, grant, doubt: None):
        yield


VARIANT = Variant(
    "tombstones are forgotten",
    broken,
    ("final_quiet", "no_late_write", "quiet-asked-then-grant"),
    scenario="quiet-asked-then-grant",
    num_tries=10,
)
