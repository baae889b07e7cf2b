"""Staging at the source is free as soon as copies out of it are queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.copies import SourceCopies
from baton.sim.faults import copies
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_packed = SourceCopies._packed


def _let_go(self: SourceCopies, *args: Any) -> None:
    _packed(self, *args)
    flight, _, lease, _ = args
    if lease in flight.leases:
        flight.leases.remove(lease)
        self.pools.staging.give_back(lease)
        self._lease_staging()


@contextmanager
def broken() -> Iterator[None]:
    """Gives leases back when copies begin."""
    with patched(SourceCopies, _packed=_let_go):
        yield


VARIANT = Variant(
    "source staging is used anew while it is read",
    broken,
    ("bytes_right", "clean"),
    {
        "faults": {"copies": copies.Config(0.0, ("late",), 0.1, 5.0)},
        "is_packing": True,
        "num_requests": 4,
        "spread_s": 0.0,
        "verified_share": 0.0,
    },
)
