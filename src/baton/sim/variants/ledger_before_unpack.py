"""A staged chunk counts as landed before it was unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import target_coordinator
from baton.protocol.machine import replace
from baton.protocol.target_coordinator import UnpackAt
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_enter_landed = target_coordinator.enter_landed


def _at_once(account: Any, terms: Any, landed: Any) -> Any:
    after, _ = _enter_landed(account, replace(terms, unpacked=frozenset()), landed)
    if after is account:
        return account, ()
    targets = terms.targets.get(landed.source_rank, ())
    worked = (target for target in targets if (landed.source_rank, target) in terms.unpacked)
    return after, tuple(UnpackAt(target, landed) for target in worked if target in landed.staged)


@contextmanager
def broken() -> Iterator[None]:
    """Enters a chunk and has it unpacked all the same."""
    with patched(target_coordinator, enter_landed=_at_once):
        yield


VARIANT = Variant(
    "a staged chunk counts before it is unpacked",
    broken,
    ("bytes_right",),
    {"faults": {}, "is_packing": True, "verified_share": 0.0},
)
