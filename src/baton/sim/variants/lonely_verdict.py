"""Only the first rank of a target is told the verdict."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.messages import Settled
from baton.session.coordinator import CoordinatorDriver
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_to_rank = CoordinatorDriver.to_rank


def _to_some(self: CoordinatorDriver, rank: int, message: Any) -> None:
    if not isinstance(message, Settled) or rank == 0:
        _to_rank(self, rank, message)


@contextmanager
def broken() -> Iterator[None]:
    """Loses the verdict for every rank but one."""
    with patched(CoordinatorDriver, to_rank=_to_some):
        yield


VARIANT = Variant("only rank 0 is told the verdict", broken, ("settles",), {"faults": {}}, num_tries=20)
