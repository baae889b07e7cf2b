"""A rank that could not open a grant says that nobody writes under it, though the source had it already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.writers import TargetWriters
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_expect = TargetWriters._expect


def _expect_nobody(self: TargetWriters, grant: bytes, lanes: Any) -> Any:
    found = _expect(self, grant, lanes)
    if "agree" in vars(self):  # the opening is going to fail
        found.leases.clear()
    return found


@contextmanager
def broken() -> Iterator[None]:
    """Forgets who was let in by a grant that is not opened."""
    with patched(TargetWriters, _expect=_expect_nobody):
        yield


VARIANT = Variant(
    "a rank whose opening failed says that the writers let in ahead of it are still",
    broken,
    ("no_late_write", "bytes_right"),
    scenario="unopened-late",
)
