"""When a source is lost, what it had under way is taken for quiet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.machine import SessionLost, replace
from baton.protocol.target_coordinator import TARGET_COORDINATOR, TargetCoordinatorState, _session_lost
from baton.sim.faults import copies, crash
from baton.sim.transport.endpoint import Strength
from baton.sim.variants.patching import acting
from baton.sim.variants.variant import Variant


def _trusting(one: Any, event: Any, now: float) -> Any:
    return _session_lost(replace(one, closing=replace(one.closing, is_quiet=True)), event, now)


@contextmanager
def broken() -> Iterator[None]:
    """Takes a lost source's word that it never gave."""
    with acting(TARGET_COORDINATOR, TargetCoordinatorState.GRANTED, SessionLost, _trusting):
        yield


VARIANT = Variant(
    "the pages of a lost source's transfers are free at once",
    broken,
    ("no_late_write", "bytes_right"),
    {
        "faults": {
            "crash": crash.Config(2, 0.3, 1.0),
            "copies": copies.Config(0.0, ("late",), 0.1, 40.0),
        },
        "faults_s": 0.1,
        "strength": Strength(can_enforce_grants=False, can_revoke=False),
    },
)
