"""A transport that writes down what was submitted and when it was done."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any

from baton.transport import DEADLINE_S, Batch, Done, Event, Fence, Landed, Peer, Ticket, Transport


@dataclass(frozen=True, slots=True)
class Copied:
    """One batch: to which incarnation, from submit to the poll that told of its end."""

    target: str
    submitted_s: float
    ended_s: float
    num_bytes: int
    num_spans: int
    is_done: bool


class Recorded:
    """A transport as it is, with a list of its batches beside it; everything else is passed on."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._open: dict[Ticket, tuple[float, Batch]] = {}
        self._ended: list[Copied] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch and notes it."""
        with self._lock:  # so that its end is not told before it is known
            submitted_s = monotonic()
            ticket = self._inner.submit(peer, batch, fence, deadline_s)
            self._open[ticket] = (submitted_s, batch)
        return ticket

    def poll(self) -> list[Event]:
        """What happened since the last call, noted."""
        events = self._inner.poll()
        now_s = monotonic()
        with self._lock:
            for event in events:
                if not isinstance(event, Landed):
                    self._note(event.ticket, now_s, isinstance(event, Done))
        return events

    @property
    def num_open(self) -> int:
        """Batches that have not ended."""
        return len(self._open)

    def take(self) -> list[Copied]:
        """The batches that ended since the last call, in order of their end."""
        with self._lock:
            found, self._ended = self._ended, []
        return found

    def _note(self, ticket: Ticket, ended_s: float, is_done: bool) -> None:
        submitted_s, batch = self._open.pop(ticket)
        spans, target = batch.spans, batch.target.incarnation
        self._ended.append(Copied(target, submitted_s, ended_s, spans.num_bytes, len(spans), is_done))
