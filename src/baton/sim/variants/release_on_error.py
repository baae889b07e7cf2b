"""Target pages go back to the engine as soon as a transfer fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import target_coordinator
from baton.protocol.target_coordinator import Release
from baton.sim.faults import aborts, copies
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_quarantine = target_coordinator._quarantine


def _released(one: Any, outcome: Any, now: float, effects: Any) -> Any:
    after, told = _quarantine(one, outcome, now, effects)
    return after, (*told, Release())


@contextmanager
def broken() -> Iterator[None]:
    """Adds a release to every failure."""
    with patched(target_coordinator, _quarantine=_released):
        yield


VARIANT = Variant(
    "target pages are free as soon as a transfer fails",
    broken,
    ("no_late_write", "bytes_right"),
    {
        "faults": {
            "aborts": aborts.Config(0.9, 0.01, False),
            "copies": copies.Config(0.0, ("late",), 0.1, 10.0),
        }
    },
)
