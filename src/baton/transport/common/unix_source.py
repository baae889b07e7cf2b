"""The source's half of a transport whose target is a process of this host and hands out its memory.

One thread for each target connects, asks for regions and starts copies, in the order of the batches. A
target that hangs up wants this source to leave: it then stops copying, unmaps everything, and says so.
"""

from __future__ import annotations

import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from baton.errors import TransportError
from baton.transport.base import DEADLINE_S, Description, Peer
from baton.transport.common.handshake import introduce
from baton.transport.common.threads import Watcher, WorkerThread
from baton.transport.common.tickets import Job, Tickets
from baton.transport.common.unix_messages import MessageKind, UnixMessage, receive_message, send_message
from baton.transport.fences import CudaEvent

T = TypeVar("T")

CHECK_S = 0.05
"""How often a thread that waits for its target checks for overdue tickets in its queue."""


class UnixConnection(ABC):
    """The connection to one target."""

    def __init__(self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lost = ""
        self.worker = WorkerThread(f"{description.transport}-source-{peer.number}")
        self.worker.put(partial(self._connect, description))

    @abstractmethod
    def carry(self, job: Job, event: CudaEvent | None) -> None:
        """On the worker: copies a batch, whose stream waits for the event, and ends its ticket."""

    @abstractmethod
    def unmap(self) -> bool:
        """On the worker: stops the copies and unmaps all memory; whether nothing can be written any more."""

    def on_lost(self) -> None:
        """On any thread: `lost` was set."""
        return

    def put(self, job: Job) -> None:
        job.progress_s = time.monotonic()
        self.worker.put(partial(self._carry, job))

    def put_behind(self, job: Job, event: CudaEvent) -> None:
        """Queues a copy from a device, whose stream waits for the event."""
        self.worker.put(partial(self._carry, job, event))

    def close(self, cause: str) -> None:
        """Stops the copy in progress, unmaps, tells the target, and hangs up."""
        self.lost = self.lost or cause
        self.on_lost()
        self.worker.put(self._leave)
        self.worker.close()
        self.watcher.call(self._unwatch)
        self.sock.close()

    def lose(self, cause: str) -> None:
        """Gives up: ends what has not begun, and lets `carry` see `lost`."""
        self.lost = self.lost or cause
        self.on_lost()
        self.tickets.end_all_waiting(self.peer, self.lost)

    def is_stopped(self, job: Job) -> bool:
        return job.is_cancelled or bool(self.lost)

    def ask(
        self, number: int, deadline_s: float, *, is_staged: bool = False
    ) -> tuple[UnixMessage, int | None]:
        """Asks the target for a region; its answer, with a descriptor if there is one."""
        send_message(self.sock, UnixMessage(MessageKind.MAP, (number, int(is_staged), 0, 0)))
        try:
            message, fd = self.retry(partial(receive_message, self.sock), select.POLLIN, deadline_s)
        except TimeoutError as cause:
            # A late reply to this request would be taken for the reply to the next.
            self.lose(str(cause))
            raise
        if message is None:
            raise ConnectionResetError("it hung up")
        if message.kind is MessageKind.REFUSED:
            raise TransportError(f"region {number} was refused: {message.text}")
        return message, fd

    def retry(self, action: Callable[[], T], mask: int, deadline_s: float) -> T:
        """Repeats an action on the socket until it does not block."""
        limit_s = time.monotonic() + deadline_s
        while True:
            try:
                return action()
            except BlockingIOError:
                self._wait(mask, limit_s)

    def _connect(self, description: Description) -> None:
        self.sock.setblocking(False)
        try:
            self.retry(partial(self.sock.connect, f"\0{description.address}"), select.POLLOUT, DEADLINE_S)
            introduce(description, 0, self.sock.send, self._receive)
        except (OSError, TransportError) as cause:
            self.lose(f"cannot connect to {description.address}: {cause}")
            return
        self.watcher.watch(self.sock.fileno(), select.EPOLLRDHUP, self._on_hangup)

    def _receive(self, num_bytes: int) -> bytes:
        return self.retry(partial(self.sock.recv, num_bytes), select.POLLIN, DEADLINE_S)

    def _on_hangup(self, mask: int) -> None:
        """On the watcher's thread: the target died, or wants this source to leave."""
        self._unwatch()
        self.lose("the target hung up")
        self.worker.put(self._leave)

    def _unwatch(self) -> None:
        self.watcher.unwatch(self.sock.fileno())

    def _leave(self) -> None:
        if self.unmap():
            with suppress(OSError):
                send_message(self.sock, UnixMessage(MessageKind.LEFT))

    def _carry(self, job: Job, event: CudaEvent | None = None) -> None:
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
        self.tickets.end_overdue(self.peer, now_s)
