"""Pages are granted before the device work of their last owner is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.machine import replace
from baton.session.writers import TargetWriters
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant
from baton.transport import NOW

_begin = TargetWriters.begin


def _at_once(self: TargetWriters, receiving: Any, request: Any) -> None:
    _begin(self, receiving, replace(request, fence=NOW))


@contextmanager
def broken() -> Iterator[None]:
    """Takes the last owner's work for done."""
    with patched(TargetWriters, begin=_at_once):
        yield


VARIANT = Variant(
    "pages are granted before the device is done with them",
    broken,
    ("bytes_right",),
    {"faults": {}, "slowness": 0.3, "verified_share": 0.0},
)
