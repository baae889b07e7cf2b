"""The source's half of a connection whose batches one thread takes in turn.

The thread connects, then carries batches in the order in which their fences are ready. A target that hangs up
wants this source to leave: it stops writing, gives up the target's memory, and says so in its own way.
"""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from baton.errors import TransportError
from baton.transport.base import HANDSHAKE_S, Description, Peer
from baton.transport.common.threads import Watcher, WorkerThread
from baton.transport.common.tickets import SubmittedBatch, Tickets
from baton.transport.fences import CudaEvent

T = TypeVar("T")

CHECK_S = 0.05
"""How often a thread that waits for its target checks for overdue tickets in its queue."""


class WorkerConnection(ABC):
    """The connection to one target."""

    def __init__(
        self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher, sock: socket.socket
    ) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.sock = sock
        self.progress_s = 0.0
        self.lost = ""
        self.sock.setblocking(False)
        self.worker = WorkerThread(f"{description.transport}-source-{peer.number}")
        self.worker.put(partial(self._connect, description))

    @abstractmethod
    def connect(self, description: Description) -> None:
        """On the worker: connects the socket and authenticates; raises OSError or TransportError."""

    @abstractmethod
    def carry(self, job: SubmittedBatch, event: CudaEvent | None) -> None:
        """On the worker: copies a batch, whose stream waits for the event, and ends its ticket."""

    @abstractmethod
    def leave(self) -> None:
        """On the worker, perhaps more than once: stops writing, and lets the target know."""

    def on_lost(self) -> None:
        """On any thread: `lost` was set."""
        return

    def put(self, job: SubmittedBatch) -> None:
        job.progress_s = time.monotonic()
        self.worker.put(partial(self._carry, job))

    def put_behind(self, job: SubmittedBatch, event: CudaEvent) -> None:
        """Queues a copy from a device, whose stream waits for the event."""
        self.worker.put(partial(self._carry, job, event))

    def close(self, cause: str) -> None:
        """Stops what is in progress, leaves, and hangs up."""
        self.lost = self.lost or cause
        self.on_lost()
        self.worker.put(self.leave)
        self.worker.close()
        self.watcher.call(self.unwatch)
        self.sock.close()

    def lose(self, cause: str) -> None:
        """Gives up: ends what has not begun, and lets `carry` see `lost`."""
        self.lost = self.lost or cause
        self.on_lost()
        self.tickets.end_all_waiting(self.peer, self.lost)

    def is_stopped(self, job: SubmittedBatch) -> bool:
        return job.is_cancelled or bool(self.lost)

    def unwatch(self) -> None:
        """On the watcher's thread."""
        self.watcher.unwatch(self.sock.fileno())

    def retry(self, action: Callable[[], T], mask: int, deadline_s: float = HANDSHAKE_S) -> T:
        """Repeats an action on the socket until it does not block; raises TimeoutError."""
        limit_s = time.monotonic() + deadline_s
        while True:
            try:
                return action()
            except BlockingIOError:
                self._wait(mask, limit_s)

    def _connect(self, description: Description) -> None:
        try:
            self.connect(description)
        except (OSError, TransportError) as cause:
            self.lose(f"cannot connect to {description.address}: {cause}")
            self.leave()
            return
        self.watcher.watch(self.sock.fileno(), select.EPOLLRDHUP, self._on_hangup)

    def _on_hangup(self, mask: int) -> None:
        """On the watcher's thread: the target died, or wants this source to leave."""
        self.unwatch()
        self.lose("the target hung up")
        self.worker.put(self.leave)

    def _carry(self, job: SubmittedBatch, event: CudaEvent | None = None) -> None:
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
        elif self.tickets.begin(job):
            self.carry(job, event)

    def _wait(self, mask: int, limit_s: float) -> None:
        poller = select.poll()
        poller.register(self.sock, mask)
        if poller.poll(CHECK_S * 1e3):
            return
        now_s = time.monotonic()
        if now_s > limit_s or self.lost:
            raise TimeoutError("the target did not react within the deadline")
        self.tickets.end_overdue(self.peer, now_s, self.progress_s)
