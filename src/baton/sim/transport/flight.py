"""One batch on its way: pieces that land one by one, and the one completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from baton.plan.execution import Bytes
from baton.plan.steps import Spans
from baton.plan.tokens import Ints
from baton.sim.schedule import Entry
from baton.transport.base import Batch, Peer, Ticket

if TYPE_CHECKING:
    from baton.sim.transport.inbox import Inbox, Writer
    from baton.sim.transport.outbox import Outbox


@dataclass(frozen=True, slots=True)
class Load:
    """What a batch carries, byte by byte, because everything here is tiny."""

    batch: Batch
    memory: Bytes
    """What is read."""
    read: Ints
    written: Ints


@dataclass(slots=True, eq=False)
class Flight:
    """A submitted batch."""

    outbox: Outbox
    ticket: Ticket
    peer: Peer
    load: Load
    deadline_s: float
    ends: tuple[Inbox, Writer] | None = None
    """Where it goes, once it moves."""
    is_moving: bool = False
    is_hung: bool = False
    is_ended: bool = False
    is_dropped: bool = False
    """Whether something of it never landed: it cannot end as Done."""
    pending: dict[int, tuple[Ints, Entry]] = field(default_factory=dict)
    """Pieces that may still land, by number: which bytes of the load, and when."""
    progress_s: float = 0.0
    mark: int = 0
    """Whatever a watcher wants to know it by."""

    def drop(self) -> None:
        """Nothing of it lands any more."""
        self.is_dropped = self.is_dropped or bool(self.pending)
        for _, entry in self.pending.values():
            entry.cancel()
        self.outbox.fabric.num_pending -= len(self.pending)
        self.pending.clear()


def spelt_out(spans: Spans) -> tuple[Ints, Ints]:
    """The spans byte by byte: where each is read and where it is written."""
    lengths = spans.length
    if not len(lengths):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return np.repeat(spans.source, lengths) + within, np.repeat(spans.target, lengths) + within
