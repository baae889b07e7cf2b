"""The progress deadline runs from the start of a transfer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.protocol.timings import Deadlines
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant


def _passed(self: Deadlines, now: float) -> str:
    patience_s = self._patience_s
    return f"no progress for {patience_s:g} s" if now - self.began >= patience_s else ""


@contextmanager
def broken() -> Iterator[None]:
    """Forgets when a transfer last moved."""
    with patched(Deadlines, passed=_passed):
        yield


VARIANT = Variant(
    "the progress deadline runs from the start",
    broken,
    ("patience", "clean"),
    {"faults": {}, "slowness": 120.0, "num_requests": 2},
)
