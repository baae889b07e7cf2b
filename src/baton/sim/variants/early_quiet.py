"""A source says quiet when it has asked its ranks to stop, not when they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import source_coordinator
from baton.protocol.machine import replace
from baton.sim.faults import aborts, copies
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_quiet_if_all = source_coordinator._quiet_if_all


def _at_once(one: Any, effects: Any) -> Any:
    return _quiet_if_all(replace(one, quiet=one.quiet | one.joined), effects)


@contextmanager
def broken() -> Iterator[None]:
    """Takes every rank for quiet."""
    with patched(source_coordinator, _quiet_if_all=_at_once):
        yield


VARIANT = Variant(
    "quiet is said before all copies are terminal",
    broken,
    ("no_late_write", "final_quiet", "bytes_right"),
    {
        "faults": {
            "aborts": aborts.Config(0.9, 0.02, False),
            "copies": copies.Config(0.0, ("late",), 0.1, 40.0),
        }
    },
)
