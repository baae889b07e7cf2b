"""Every ticket from its submission to its one completion.

A job waits (for its fence, then for its turn), moves, and ends. It can be cancelled at once while it waits;
while it moves, whoever moves it looks at `is_cancelled` when it can stop, and ends it.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from enum import Enum

from baton.errors import TransportError
from baton.transport.base import Batch, Bytes, Completion, Done, FailedQuiet, Peer, Ticket
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.regions import Regions
from baton.transport.parts.spans import check_spans

CANCELLED = "cancelled"
TAG_MAX = 2**64 - 1
NUMBER_MAX = 2**63 - 1


def check_batch(batch: Batch, deadline_s: float) -> None:
    """Raises where this is not a batch that this side could send."""
    if not deadline_s > 0:
        raise TransportError(f"a deadline is a positive number of seconds; got {deadline_s}")
    if not 0 <= batch.tag <= TAG_MAX:
        raise TransportError(f"a tag is at least 0 and at most {TAG_MAX}; got {batch.tag}")
    if not (0 <= batch.target.number <= NUMBER_MAX and batch.target.num_bytes >= 0):
        raise TransportError(
            f"no region can have number {batch.target.number} and {batch.target.num_bytes} bytes"
        )
    check_spans(batch.spans, batch.source.num_bytes, batch.target.num_bytes)


class Stage(Enum):
    """How far a job has come."""

    WAITING = "waiting"
    MOVING = "moving"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Job:
    """A batch on its way."""

    ticket: Ticket
    peer: Peer
    batch: Batch
    source: Bytes
    deadline_s: float
    stage: Stage = Stage.WAITING
    progress_s: float = 0.0
    """When something of it last moved, on the monotonic clock; 0 before its fence is ready."""
    is_cancelled: bool = False


@dataclass(slots=True)
class Tickets:
    """The jobs of one transport."""

    regions: Regions
    mailbox: Mailbox
    _jobs: dict[int, Job] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def issue(self, peer: Peer, batch: Batch, deadline_s: float) -> Job:
        """A new job for a batch that was checked."""
        source = self.regions.use(batch.source).bytes
        job = Job(Ticket(next(self._numbers)), peer, batch, source, deadline_s)
        with self._lock:
            self._jobs[job.ticket.number] = job
        return job

    def begin(self, job: Job) -> bool:
        """Takes a waiting job up; false if it was cancelled or ended meanwhile."""
        with self._lock:
            if job.stage is not Stage.WAITING:
                return False
            job.stage = Stage.MOVING
            return True

    def cancel(self, ticket: Ticket) -> None:
        """Ends a waiting job, asks a moving one to stop, and leaves an ended one alone."""
        with self._lock:
            job = self._jobs.get(ticket.number)
            if job is None:
                return
            job.is_cancelled = True
            is_waiting = job.stage is Stage.WAITING
        if is_waiting:
            self.end_waiting(job, CANCELLED)

    def end_waiting(self, job: Job, cause: str) -> None:
        """Ends a job of which no byte has moved, unless it was taken up meanwhile."""
        with self._lock:
            if job.stage is not Stage.WAITING:
                return
            job.stage = Stage.MOVING
        self.end(job, FailedQuiet(job.ticket, cause))

    def end(self, job: Job, completion: Completion) -> None:
        """Reports how a job ended; the first word counts."""
        with self._lock:
            if job.stage is Stage.ENDED:
                return
            job.stage = Stage.ENDED
            del self._jobs[job.ticket.number]
        if isinstance(completion, Done):
            completion = Done(job.ticket, time.monotonic())
        self.regions.leave(job.batch.source.number)
        self.mailbox.put(completion)

    def unended(self, peer: Peer) -> list[Job]:
        """Jobs for this peer that still owe a completion."""
        with self._lock:
            return [job for job in self._jobs.values() if job.peer == peer]
