"""The source's half: one thread per target, which maps its segments and copies straight into them.

Every failure on this path is FailedQuiet: this thread does the stores itself, and has stopped when it
reports one. Batches from or to a device go through a ring instead (ring_writer.py).
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.transport.base import DEADLINE_S, Bytes, Completion, Description, Done, FailedQuiet, Peer
from baton.transport.common.handshake import CHALLENGE_BYTES, WELCOME_BYTES, make_hello, verify_welcome
from baton.transport.common.spans import copy_spans
from baton.transport.common.threads import Watcher, WorkerThread
from baton.transport.common.tickets import CANCELLED, Job, Tickets
from baton.transport.fences import CudaEvent
from baton.transport.shm.ring import RingShape, Staging
from baton.transport.shm.ring_writer import RingWriter
from baton.transport.shm.segments import (
    Mapping,
    MessageKind,
    ShmMessage,
    map_segment,
    receive_message,
    send_message,
)

T = TypeVar("T")

CHECK_S = 0.05
"""How often a thread that waits for its target checks for overdue tickets in its queue."""


class ShmConnection:
    """The connection to one target."""

    def __init__(
        self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher, staging: Staging
    ) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.staging = staging
        self.ring_writer = RingWriter(peer, tickets, watcher, staging)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mappings: dict[int, Mapping] = {}
        self.regions: dict[int, Bytes] = {}
        self.lost = ""
        self.worker = WorkerThread(f"shm-source-{peer.number}")
        self.worker.put(partial(self._connect, description))

    def put(self, job: Job) -> None:
        job.progress_s = time.monotonic()
        self.worker.put(partial(self._carry, job))

    def put_behind(self, job: Job, event: CudaEvent) -> None:
        """Queues a copy from a device, whose stream waits for the event."""
        self.worker.put(partial(self._carry, job, event))

    def close(self, cause: str) -> None:
        """Stops the copy in progress, unmaps, tells the target, and hangs up."""
        self.lost = self.lost or cause
        self.ring_writer.lose(self.lost)
        self.worker.put(self._leave)
        self.worker.close()
        self.watcher.call(self._unwatch)
        self.sock.close()

    def _connect(self, description: Description) -> None:
        self.sock.setblocking(False)
        try:
            self._retry(partial(self.sock.connect, f"\0{description.address}"), select.POLLOUT, DEADLINE_S)
            challenge = self._retry(partial(self.sock.recv, CHALLENGE_BYTES), select.POLLIN, DEADLINE_S)
            hello = make_hello(description, 0, challenge)
            self.sock.send(hello)
            welcome = self._retry(partial(self.sock.recv, WELCOME_BYTES), select.POLLIN, DEADLINE_S)
        except OSError as cause:
            self._lose(f"cannot connect to {description.address}: {cause}")
            return
        if not verify_welcome(welcome, description, hello, challenge):
            self._lose(f"{description.address} did not accept this invitation")
            return
        self.watcher.watch(self.sock.fileno(), select.EPOLLRDHUP, self._on_hangup)

    def _on_hangup(self, mask: int) -> None:
        """On the watcher's thread: the target died, or wants this source to leave."""
        self._unwatch()
        self._lose("the target hung up")
        self.worker.put(self._leave)

    def _unwatch(self) -> None:
        self.watcher.unwatch(self.sock.fileno())

    def _lose(self, cause: str) -> None:
        self.lost = self.lost or cause
        self.ring_writer.lose(self.lost)
        self.tickets.end_all_waiting(self.peer, self.lost)

    def _leave(self) -> None:
        self.regions.clear()
        while self.mappings:
            _, mapping = self.mappings.popitem()
            mapped = mapping.map
            del mapping  # its array keeps the map from being closed
            mapped.close()
        self.ring_writer.close()
        with suppress(OSError):
            send_message(self.sock, ShmMessage(MessageKind.LEFT))

    def _carry(self, job: Job, event: CudaEvent | None = None) -> None:
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
        elif not self.tickets.begin(job):
            return
        elif self.staging.is_needed(job.batch):
            self._stage(job, event)
        else:
            completion: Completion = FailedQuiet(job.ticket, "the copy crashed; see the log")
            try:
                completion = self._copy(job)
            finally:
                self.tickets.end(job, completion)

    def _copy(self, job: Job) -> Completion:
        """Copies and announces; the system call orders the stores before the message.

        If nothing is announced, the system call by which the caller passes on the completion does that.
        """
        batch, spans = job.batch, job.batch.spans
        is_stopped = partial(self._is_stopped, job)
        landed = ShmMessage(MessageKind.LANDED, (batch.tag, spans.num_bytes, 0, 0))
        try:
            target = self.regions.get(batch.target.number)
            if target is None:
                target = self._map(batch.target.number, job.deadline_s, is_stopped)
            if batch.target.num_bytes > len(target):  # `submit` checked the spans up to `num_bytes`
                return FailedQuiet(job.ticket, f"region {batch.target.number} has {len(target)} bytes")
            if not copy_spans(spans, job.source, target, is_stopped):
                return FailedQuiet(job.ticket, CANCELLED if job.is_cancelled else self.lost)
            if batch.is_announced:
                self._retry(partial(send_message, self.sock, landed), select.POLLOUT, job.deadline_s)
        except TimeoutError as cause:
            return FailedQuiet(job.ticket, str(cause))
        except OSError as cause:
            self._lose(f"the target is gone: {cause}")
            return FailedQuiet(job.ticket, self.lost)
        except (TransportError, RemoteProtocolError) as cause:
            return FailedQuiet(job.ticket, str(cause))
        return Done(job.ticket)

    def _is_stopped(self, job: Job) -> bool:
        return job.is_cancelled or bool(self.lost)

    def _stage(self, job: Job, event: CudaEvent | None) -> None:
        """Hands a job to the ring, which ends it, or ends it here if its region cannot be reached."""
        number = job.batch.target.number
        try:
            if number not in self.ring_writer.region_bytes:
                self._join_ring(number, job.deadline_s)
            num_bytes = self.ring_writer.region_bytes[number]
            if job.batch.target.num_bytes > num_bytes:
                raise TransportError(f"region {number} has {num_bytes} bytes")
        except OSError as cause:
            self._lose(f"the target is gone: {cause}")
            self.tickets.end(job, FailedQuiet(job.ticket, self.lost))
            return
        except (TransportError, RemoteProtocolError) as cause:
            self.tickets.end(job, FailedQuiet(job.ticket, str(cause)))
            return
        self.ring_writer.carry(job, event)

    def _join_ring(self, number: int, deadline_s: float) -> None:
        """Asks whether a region may be reached through the ring; the first reply brings the ring."""
        message, fd = self._ask(number, deadline_s, is_staged=True)
        num_slots, slot_bytes, region_bytes, _ = message.numbers
        if not self.ring_writer.has_ring:
            if fd is None:
                raise TransportError("the target has no ring for this source")
            channel = socket.socket(fileno=fd)
            try:
                shape = RingShape(num_slots, slot_bytes)
            except ConfigError as cause:
                raise TransportError(f"the target's ring is invalid: {cause}") from None
            self.ring_writer.attach(channel, shape)
        self.ring_writer.region_bytes[number] = region_bytes

    def _map(self, number: int, deadline_s: float, is_stopped: Callable[[], bool]) -> Bytes:
        """Maps a region of the target, when it is first needed."""
        message, fd = self._ask(number, deadline_s, is_staged=False)
        if fd is None:
            raise TransportError(f"region {number} came without its memory")
        segment, segment_bytes, offset, num_bytes = message.numbers
        try:
            if segment not in self.mappings:
                self.mappings[segment] = map_segment(fd, segment_bytes, is_stopped)
        finally:
            os.close(fd)
        region = self.regions[number] = self.mappings[segment].bytes[offset : offset + num_bytes]
        return region

    def _ask(self, number: int, deadline_s: float, *, is_staged: bool) -> tuple[ShmMessage, int | None]:
        send_message(self.sock, ShmMessage(MessageKind.MAP, (number, int(is_staged), 0, 0)))
        try:
            message, fd = self._retry(partial(receive_message, self.sock), select.POLLIN, deadline_s)
        except TimeoutError as cause:
            # A late reply to this request would be taken for the reply to the next.
            self._lose(str(cause))
            raise
        if message is None:
            raise ConnectionResetError("it hung up")
        if message.kind is MessageKind.REFUSED:
            raise TransportError(f"region {number} was refused: {message.text}")
        return message, fd

    def _retry(self, action: Callable[[], T], mask: int, deadline_s: float) -> T:
        """Repeats an action on the socket until it does not block."""
        limit_s = time.monotonic() + deadline_s
        while True:
            try:
                return action()
            except BlockingIOError:
                self._wait(mask, limit_s)

    def _wait(self, mask: int, limit_s: float) -> None:
        poller = select.poll()
        poller.register(self.sock, mask)
        if poller.poll(CHECK_S * 1e3):
            return
        now_s = time.monotonic()
        if now_s > limit_s or self.lost:
            raise TimeoutError("the target did not react within the deadline")
        self.tickets.end_overdue(self.peer, now_s)
