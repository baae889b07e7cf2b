"""A transfer is ready as soon as everything is there, though a rank may not have opened its grant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import target_coordinator
from baton.protocol.target_coordinator import is_complete
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant


def _impatient(one: Any, account: Any) -> bool:
    return is_complete(account, one.terms)


@contextmanager
def broken() -> Iterator[None]:
    """Does not wait for ranks."""
    with patched(target_coordinator, _can_admit=_impatient):
        yield


VARIANT = Variant(
    "a transfer that was granted ahead is ready before every rank has opened",
    broken,
    ("all_opened",),
    scenario="written-unopened",
)
