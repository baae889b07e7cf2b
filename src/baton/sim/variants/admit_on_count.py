"""A target counts commits and does not look at its ledger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import target_coordinator
from baton.sim.faults import reordering
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant


def _is_counted(account: Any, terms: Any) -> bool:
    return account.aux is not None and account.commits.keys() >= terms.sources


@contextmanager
def broken() -> Iterator[None]:
    """Has enough commits be enough."""
    with patched(target_coordinator, is_complete=_is_counted):
        yield


VARIANT = Variant(
    "a target admits when every source rank has committed",
    broken,
    ("bytes_right", "full_ledger"),
    {"faults": {"reordering": reordering.Config(0.5, 0.02)}, "is_packing": True, "finish_share": 0.0},
)
