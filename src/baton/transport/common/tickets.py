"""Tickets from submission to completion, and the queue of events that `poll` empties.

A job waits (for its fence, then for its turn), moves, and ends. While it waits, it can be cancelled at once.
While it moves, the thread that moves it checks `is_cancelled` whenever it can stop, and ends the job.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from dataclasses import dataclass
from enum import Enum

from baton.errors import TransportError
from baton.transport.base import Batch, Bytes, Completion, Done, FailedQuiet, Peer, Ticket
from baton.transport.common.regions import Regions
from baton.transport.common.spans import check_spans

CANCELLED = "cancelled"
NUMBER_MAX = 2**63 - 1


class EventQueue:
    """A list of completions and an eventfd that is readable while the list is not empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Completion] = []
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_open = True

    def put(self, event: Completion) -> None:
        with self._lock:
            self._events.append(event)
            if len(self._events) == 1 and self._is_open:
                os.eventfd_write(self._eventfd, 1)

    def take_all(self) -> list[Completion]:
        if not self._events:
            return []
        with self._lock:
            events, self._events = self._events, []
            if events and self._is_open:
                os.eventfd_read(self._eventfd)
        return events

    def fileno(self) -> int:
        return self._eventfd

    def close(self) -> None:
        """Closes the descriptor; events can still be put and taken."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._eventfd)


def check_batch(batch: Batch, deadline_s: float) -> None:
    """Raises if a batch or its deadline is invalid on this side."""
    if not deadline_s > 0:
        raise TransportError(f"a deadline is a positive number of seconds; got {deadline_s}")
    if not (0 <= batch.target.number <= NUMBER_MAX and batch.target.num_bytes >= 0):
        raise TransportError(
            f"no region can have number {batch.target.number} and {batch.target.num_bytes} bytes"
        )
    check_spans(batch.spans, batch.source.num_bytes, batch.target.num_bytes)


class JobState(Enum):
    WAITING = "waiting"
    MOVING = "moving"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class SubmittedBatch:
    """A submitted batch."""

    ticket: Ticket
    peer: Peer
    batch: Batch
    source: Bytes
    deadline_s: float
    state: JobState = JobState.WAITING
    progress_s: float = 0.0
    """When it last made progress, on the monotonic clock; 0 before its fence is ready."""
    is_cancelled: bool = False

    def is_overdue(self, now_s: float, connection_progress_s: float = 0.0) -> bool:
        """Whether neither it nor its connection made progress for its deadline, its fence being ready."""
        progress_s = max(self.progress_s, connection_progress_s)
        return bool(self.progress_s) and now_s > progress_s + self.deadline_s


class Tickets:
    """The jobs of one transport."""

    def __init__(self, regions: Regions, events: EventQueue) -> None:
        self.regions = regions
        self.events = events
        self._jobs: dict[int, SubmittedBatch] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def issue(self, peer: Peer, batch: Batch, deadline_s: float) -> SubmittedBatch:
        """A new job for a checked batch; its source region stays acquired until it ends."""
        source = self.regions.acquire(batch.source).bytes
        job = SubmittedBatch(Ticket(next(self._numbers)), peer, batch, source, deadline_s)
        with self._lock:
            self._jobs[job.ticket.number] = job
        return job

    def begin(self, job: SubmittedBatch) -> bool:
        """Marks a waiting job as moving; false if it was cancelled or ended in the meantime."""
        with self._lock:
            if job.state is not JobState.WAITING:
                return False
            job.state = JobState.MOVING
            return True

    def cancel(self, ticket: Ticket) -> None:
        """Ends a waiting job, asks a moving one to stop, and ignores an ended one."""
        with self._lock:
            job = self._jobs.get(ticket.number)
            if job is None:
                return
            job.is_cancelled = True
            is_waiting = job.state is JobState.WAITING
        if is_waiting:
            self.end_waiting(job, CANCELLED)

    def end_waiting(self, job: SubmittedBatch, cause: str) -> None:
        """Ends a job of which no byte has moved, unless it began to move in the meantime."""
        if self.begin(job):
            self.end(job, FailedQuiet(job.ticket, cause))

    def end(self, job: SubmittedBatch, completion: Completion) -> None:
        """Reports how a job ended; only the first call counts."""
        with self._lock:
            if job.state is JobState.ENDED:
                return
            job.state = JobState.ENDED
            del self._jobs[job.ticket.number]
        if isinstance(completion, Done):
            completion = Done(job.ticket, time.monotonic())
        self.regions.release(job.batch.source.number)
        self.events.put(completion)

    def unended(self, peer: Peer) -> list[SubmittedBatch]:
        with self._lock:
            return [job for job in self._jobs.values() if job.peer == peer]

    def end_all_waiting(self, peer: Peer, cause: str) -> None:
        for job in self.unended(peer):
            self.end_waiting(job, cause)

    def end_overdue(self, peer: Peer, now_s: float, connection_progress_s: float = 0.0) -> None:
        """Ends the waiting jobs of a peer whose deadline passed without progress."""
        for job in self.unended(peer):
            if job.is_overdue(now_s, connection_progress_s):
                self.end_waiting(job, f"no progress on this connection for {job.deadline_s} s")
