"""A coordinator does not pass on that one of its ranks failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.messages import Abort, Quiet, Unquiet
from baton.session.outbound import OutboundTransfers
from baton.sim.faults import copies
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_heard = OutboundTransfers.on_rank_message


def _deaf(self: OutboundTransfers, rank: int, message: Any) -> None:
    if not isinstance(message, Abort | Quiet | Unquiet):
        _heard(self, rank, message)


@contextmanager
def broken() -> Iterator[None]:
    """Does not hear that a rank gave up, nor that it is quiet."""
    with patched(OutboundTransfers, on_rank_message=_deaf):
        yield


VARIANT = Variant(
    "one rank's failure is ignored",
    broken,
    ("prompt_failure", "settles"),
    {"faults": {"copies": copies.Config(0.2, ("error",), 0.01, 1.0)}},
)
