"""A chunk that is reported twice is entered twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from baton.protocol import target_coordinator
from baton.protocol.ledger import Ledger, Rectangle
from baton.protocol.machine import replace
from baton.sim.faults import duplication, reordering
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_enter_landed = target_coordinator.enter_landed
_AGAIN = 1000


def _anew(account: Any, terms: Any, landed: Any) -> Any:
    """Takes a chunk that came before for another one."""
    if (landed.source_rank, landed.chunk) in account.chunks:
        landed = msgspec.structs.replace(landed, chunk=_AGAIN + len(account.chunks))
    return _enter_landed(account, terms, landed)


def _entered(self: Ledger, pair: tuple[int, int], chunk: Rectangle) -> Ledger:
    """Counts cells, whether or not they were counted before."""
    wanted = self._wanted(pair, chunk)
    missing = dict(self.missing)
    left = missing.pop(pair, 0) - sum(part.area for part in wanted)
    if left > 0:
        missing[pair] = left
    return replace(self, missing=missing)


@contextmanager
def broken() -> Iterator[None]:
    """Forgets which chunks and cells were counted."""
    with patched(target_coordinator, enter_landed=_anew), patched(Ledger, entered=_entered):
        yield


VARIANT = Variant(
    "a chunk that is reported twice counts twice",
    broken,
    ("bytes_right",),
    {
        "faults": {
            "duplication": duplication.Config(0.3, 0.001),
            "reordering": reordering.Config(0.5, 0.05),
        },
        "is_packing": True,
        "verified_share": 0.0,
    },
)
