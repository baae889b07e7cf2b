"""A worker process in which something of the index is wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection

from baton.engine import worker
from baton.engine.attention.passes import Pass
from baton.engine.attention.slots import Reads
from baton.engine.attention.sparse import Chooser
from baton.engine.models.base import IndexQuery


def nothing() -> None:
    """The control: as it is."""


def all_attended() -> None:
    """Nothing is chosen: every row attends to all before it."""
    Chooser.choose = lambda self, reads, num_seen: reads  # type: ignore[method-assign]


def no_keys() -> None:
    """Index keys are gone once a layer has chosen by them, so that none are handed over."""
    choose = Pass._chosen

    def forgetful(self: Pass, layer: int, query: IndexQuery, reads: Reads) -> Reads:
        found = choose(self, layer, query, reads)
        self._pools.rows("index_k", layer)[0].zero_()
        return found

    Pass._chosen = forgetful  # type: ignore[method-assign]


BROKEN: Mapping[str, Callable[[], None]] = {each.__name__: each for each in (nothing, all_attended, no_keys)}


def main(connection: Connection, name: str) -> None:
    """Runs a worker that is broken by name."""
    BROKEN[name]()
    worker.main(connection)
