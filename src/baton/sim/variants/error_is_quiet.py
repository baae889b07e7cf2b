"""A source takes any error of a copy for the end of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.copies import SourceCopies
from baton.sim.faults import copies
from baton.sim.transport.endpoint import Strength
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant
from baton.transport import FailedQuiet, FailedUnknown

_moved = SourceCopies.on_completion


def _trusting(self: SourceCopies, event: Any) -> None:
    known = FailedQuiet(event.ticket, event.cause) if isinstance(event, FailedUnknown) else event
    _moved(self, known)


@contextmanager
def broken() -> Iterator[None]:
    """Makes no difference between quiet and unknown."""
    with patched(SourceCopies, on_completion=_trusting):
        yield


VARIANT = Variant(
    "a copy that failed unknown is taken for quiet",
    broken,
    ("no_late_write", "final_quiet", "bytes_right"),
    {
        "faults": {"copies": copies.Config(0.2, ("late", "again"), 0.2, 1.0)},
        "strength": Strength(can_enforce_grants=False, can_revoke=False),
    },
)
