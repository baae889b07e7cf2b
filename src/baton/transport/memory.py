"""Copies inside one process: the reference implementation of the contract, kept simple."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from baton.transport.base import (
    Bytes,
    Capabilities,
    Completion,
    Description,
    Done,
    FailedQuiet,
    Peer,
    Place,
    Reach,
    RevokedQuiet,
    RevokeResult,
)
from baton.transport.common.regions import Grants, RegionGrant
from baton.transport.common.spans import are_inside, copy_spans
from baton.transport.common.threads import WorkerThread
from baton.transport.common.tickets import CANCELLED, SubmittedBatch, Tickets
from baton.transport.common.transport import BaseTransport

_open_transports: WeakValueDictionary[str, MemoryTransport] = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """There are no options."""


@dataclass(slots=True)
class MemoryWriter:
    """A peer that was invited; the lock is held while it writes."""

    peer: Peer
    secret: str
    grants: Grants = field(default_factory=Grants)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_revoked: bool = False

    def check_quiet(self, grant: RegionGrant) -> RevokeResult:
        """Waits for the write in progress, if any; it cannot hang."""
        with self.lock:
            return RevokedQuiet()

    def revoke(self, cause: str) -> RevokeResult:
        """Stops the write in progress, if any."""
        self.is_revoked = True
        with self.lock:
            return RevokedQuiet()


@dataclass(frozen=True, slots=True)
class MemoryConnection:
    """The copies towards one target, on a thread of their own."""

    tickets: Tickets
    description: Description
    worker: WorkerThread

    def put(self, job: SubmittedBatch) -> None:
        self.worker.put(partial(self._carry, job))

    def close(self, cause: str) -> None:
        """Waits for the copy in progress; the queued jobs have ended already."""
        self.worker.close()

    def _carry(self, job: SubmittedBatch) -> None:
        if self.tickets.begin(job):
            self.tickets.end(job, self._copy(job))

    def _copy(self, job: SubmittedBatch) -> Completion:
        target = _open_transports.get(self.description.incarnation)
        writer = target.find_writer(self.description) if target else None
        if target is None or writer is None:
            return FailedQuiet(job.ticket, f"no target {self.description.incarnation} that invited this peer")
        cause = target.receive(writer, job)
        return FailedQuiet(job.ticket, cause) if cause else Done(job.ticket)


class MemoryTransport(BaseTransport[MemoryConnection, MemoryWriter]):
    """Both ends are in this process; a thread per connection does the copies."""

    name = "memory"
    capabilities = Capabilities(
        reach=Reach.PROCESS,
        places=frozenset({Place.HOST}),
        can_refuse_strangers=True,
        can_enforce_grants=True,
        can_revoke=True,
        needs_allocate=False,
    )

    def __init__(self, config: MemoryConfig) -> None:
        super().__init__()
        _open_transports[self.incarnation] = self

    def open_connection(self, peer: Peer, description: Description) -> MemoryConnection:
        return MemoryConnection(self.tickets, description, WorkerThread(f"memory-{peer.number}"))

    def open_writer(self, peer: Peer, secret: str) -> MemoryWriter:
        return MemoryWriter(peer, secret)

    def address(self) -> str:
        return ""  # a source finds this target by its incarnation

    def find_writer(self, description: Description) -> MemoryWriter | None:
        writer = self.writers.get(Peer(description.peer, description.incarnation))
        if writer is not None and writer.secret == description.secret:
            return writer
        return None

    def receive(self, writer: MemoryWriter, job: SubmittedBatch) -> str:
        """Copies a batch if the grants allow it; returns why not, or nothing."""
        number = job.batch.target.number
        with writer.lock:
            if writer.is_revoked:
                return "this peer was revoked by the target"
            target = self.regions.acquire_number(number)
            if target is None:
                return f"region {number} is not registered"
            try:
                return self._copy(writer, job, target)
            finally:
                self.regions.release(number)

    def _copy(self, writer: MemoryWriter, job: SubmittedBatch, target: Bytes) -> str:
        batch, spans = job.batch, job.batch.spans
        is_allowed = are_inside(spans.target, spans.length, len(target)) and writer.grants.allow(
            batch.target.number, spans.target, spans.length
        )
        if not is_allowed:
            writer.is_revoked = True
            return "a write outside of what was granted was refused"
        if not copy_spans(spans, job.source, target, lambda: job.is_cancelled or writer.is_revoked):
            return CANCELLED if job.is_cancelled else "revoked by the target"
        return ""


CONFIG = MemoryConfig
TRANSPORT = MemoryTransport
