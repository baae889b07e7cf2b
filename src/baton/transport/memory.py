"""Copies inside one process: the reference, small enough to be trusted by reading."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from baton.transport.base import (
    Batch,
    Bytes,
    Capabilities,
    Completion,
    Counters,
    Description,
    Done,
    FailedQuiet,
    Landed,
    Peer,
    Place,
    Quiet,
    Reach,
    Stillness,
)
from baton.transport.parts.copying import copy_spans
from baton.transport.parts.endpoint import Endpoint
from baton.transport.parts.grants import Granted, Grants
from baton.transport.parts.lanes import Lane
from baton.transport.parts.spans import are_inside
from baton.transport.parts.tally import Tally
from baton.transport.parts.tickets import CANCELLED, Job, Tickets

_living: WeakValueDictionary[str, MemoryTransport] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Nothing to choose."""


class MemoryTransport(Endpoint):
    """Both ends live in this process; a thread per connected peer does the copies."""

    name = "memory"
    capabilities = Capabilities(
        reach=Reach.PROCESS,
        places=frozenset({Place.HOST}),
        batch_spans_max=2**31,
        can_refuse_strangers=True,
        can_enforce_grants=True,
        can_revoke=True,
        can_announce=True,
        needs_allocate=False,
    )

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        self.tally = Tally()
        _living[self.incarnation] = self

    def reach(self, peer: Peer, description: Description) -> _Source:
        """A source that writes to the target of this description for as long as that lives."""
        return _Source(self.tickets, description, Lane(f"memory-{peer.number}"))

    def admit(self, peer: Peer, secret: str) -> _Writer:
        """A writer without grants."""
        return _Writer(peer, secret)

    def address(self) -> str:
        """The incarnation is address enough."""
        return ""

    def counters(self) -> Counters:
        """What was turned away so far."""
        return self.tally.counters()

    def writer(self, description: Description) -> _Writer | None:
        """The writer that a description belongs to."""
        found = self.incoming.get(Peer(description.peer, description.incarnation))
        if isinstance(found, _Writer) and found.secret == description.secret:
            return found
        self.tally.add_stranger()
        return None

    def receive(self, writer: _Writer, job: Job) -> str | None:
        """Copies what the grants allow; answers what went wrong."""
        batch = job.batch
        with writer.lock:
            if writer.is_revoked:
                return "turned out by the target"
            target = self.regions.use_number(batch.target.number)
            if target is None:
                return f"region {batch.target.number} is not registered"
            try:
                return self._copy(writer, job, target)
            finally:
                self.regions.leave(batch.target.number)

    def _copy(self, writer: _Writer, job: Job, target: Bytes) -> str | None:
        batch: Batch = job.batch
        spans = batch.spans
        is_allowed = are_inside(spans.target, spans.length, len(target)) and writer.grants.allow(
            batch.target.number, spans.target, spans.length
        )
        if not is_allowed:
            self.tally.add_refused_write()
            writer.is_revoked = True
            return "a write outside of what was granted was refused"
        if not copy_spans(spans, job.source, target, lambda: job.is_cancelled or writer.is_revoked):
            return CANCELLED if job.is_cancelled else "revoked by the target"
        if batch.is_announced:
            self.mailbox.put(Landed(writer.peer, batch.tag, spans.num_bytes))
        return None


@dataclass(slots=True)
class _Writer:
    """A peer that was invited; the lock is held while it writes."""

    peer: Peer
    secret: str
    grants: Grants = field(default_factory=Grants)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_revoked: bool = False

    def is_still(self, granted: Granted) -> Stillness:
        """Waits for the write that is under way, if any: it cannot hang."""
        with self.lock:
            return Quiet()

    def revoke(self, cause: str) -> Stillness:
        """Stops the write that is under way, if any."""
        self.is_revoked = True
        with self.lock:
            return Quiet()


@dataclass(frozen=True, slots=True)
class _Source:
    """The copies towards one target."""

    tickets: Tickets
    description: Description
    lane: Lane

    def put(self, job: Job) -> None:
        """Queues a copy."""
        self.lane.put(partial(self._carry, job))

    def close(self, cause: str) -> None:
        """Ends what is queued and lets the copy under way finish."""
        self.lane.close()

    def _carry(self, job: Job) -> None:
        if self.tickets.begin(job):
            self.tickets.end(job, self._move(job))

    def _move(self, job: Job) -> Completion:
        target = _living.get(self.description.incarnation)
        writer = target.writer(self.description) if target else None
        if target is None or writer is None:
            return FailedQuiet(job.ticket, f"no target {self.description.incarnation} that invited this peer")
        cause = target.receive(writer, job)
        return FailedQuiet(job.ticket, cause) if cause else Done(job.ticket)


CONFIG = MemoryConfig
TRANSPORT = MemoryTransport
