"""The chunk that ends a prompt is said to be copied, and is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.machine import replace
from baton.session import copies, loads
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_make_loads = loads.make_loads


def _without_last(terms: Any, source_rank: int, table: Any, box: Any) -> Any:
    loads = _make_loads(terms, source_rank, table, box)
    if box.tokens[1] < terms.prompt.num_tokens:
        return loads
    return [replace(load, copies=(), packs=()) for load in loads]


@contextmanager
def broken() -> Iterator[None]:
    """Takes the copies out of the last chunk."""
    with patched(copies, make_loads=_without_last):
        yield


VARIANT = Variant(
    "the chunk that ends a prompt is not copied",
    broken,
    ("bytes_right", "full_ledger", "written_once"),
    {"verified_share": 0.0},
)
