"""The source's half: one thread per target, which maps its segments and copies straight into them.

Whatever fails here fails quietly: this thread does the stores itself, and has stopped when it says so.
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

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import DEADLINE_S, Bytes, Completion, Description, Done, FailedQuiet, Peer
from baton.transport.parts.copying import copy_spans
from baton.transport.parts.lanes import Lane
from baton.transport.parts.proof import CHALLENGE_BYTES, WELCOME_BYTES, is_welcome, make_hello
from baton.transport.parts.tickets import CANCELLED, Job
from baton.transport.shm.messages import Kind, Message, receive_message, send_message
from baton.transport.shm.segments import Mapping, map_segment
from baton.transport.shm.staged.movers import Event
from baton.transport.shm.staged.source import Feeder, read_shape

T = TypeVar("T")

LOOK_S = 0.05
"""How often a thread that waits for its target looks whether tickets in its queue are overdue."""


class Source:
    """The connection to one target."""

    def __init__(self, peer: Peer, description: Description, feeder: Feeder) -> None:
        tickets, watcher = feeder.tickets, feeder.watcher
        self.peer = peer
        self.feeder = feeder
        self.tickets = tickets
        self.watcher = watcher
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.mappings: dict[int, Mapping] = {}
        self.regions: dict[int, Bytes] = {}
        self.lost = ""
        self.lane = Lane(f"shm-source-{peer.number}")
        self.lane.put(partial(self._connect, description))

    def put(self, job: Job) -> None:
        """Queues a copy."""
        job.progress_s = time.monotonic()
        self.lane.put(partial(self._carry, job))

    def put_behind(self, job: Job, event: Event) -> None:
        """Queues a copy from a device, whose stream waits for the event."""
        self.lane.put(partial(self._carry, job, event))

    def close(self, cause: str) -> None:
        """Stops the copy under way, unmaps, says so, and hangs up."""
        self.lost = self.lost or cause
        self.feeder.lose(self.lost)
        self.lane.put(self._leave)
        self.lane.close()
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
        if not is_welcome(welcome, description, hello, challenge):
            self._lose(f"{description.address} did not accept this invitation")
            return
        self.watcher.watch(self.sock.fileno(), select.EPOLLRDHUP, self._hear_hangup)

    def _hear_hangup(self, mask: int) -> None:
        """On the watcher's thread: the target died, or wants this source to leave."""
        self._unwatch()
        self._lose("the target hung up")
        self.lane.put(self._leave)

    def _unwatch(self) -> None:
        self.watcher.unwatch(self.sock.fileno())

    def _lose(self, cause: str) -> None:
        self.lost = self.lost or cause
        self.feeder.lose(self.lost)
        for job in self.tickets.unended(self.peer):
            self.tickets.end_waiting(job, self.lost)

    def _leave(self) -> None:
        self.regions.clear()
        while self.mappings:
            _, mapping = self.mappings.popitem()
            found = mapping.map
            del mapping  # the array in it keeps the map from being closed
            found.close()
        self.feeder.close()
        with suppress(OSError):
            send_message(self.sock, Message(Kind.LEFT))

    def _carry(self, job: Job, event: Event | None = None) -> None:
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
        elif not self.tickets.begin(job):
            return
        elif self.feeder.staging.is_needed(job.batch):
            self._stage(job, event)
        else:
            completion: Completion = FailedQuiet(job.ticket, "the copy crashed; see the log")
            try:
                completion = self._move(job)
            finally:
                self.tickets.end(job, completion)

    def _move(self, job: Job) -> Completion:
        """Copies and announces; the socket is the kernel object that orders the stores before the news.

        Where nothing is announced, any other kernel object by which the caller passes the news on does that.
        """
        batch, spans = job.batch, job.batch.spans
        is_stopped = partial(self._is_stopped, job)
        landed = Message(Kind.LANDED, (batch.tag, spans.num_bytes, 0, 0))
        try:
            target = self.regions.get(batch.target.number)
            if target is None:
                target = self._map(batch.target.number, job.deadline_s, is_stopped)
            if batch.target.num_bytes > len(target):  # up to its size the spans were checked on submission
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

    def _stage(self, job: Job, event: Event | None) -> None:
        """Hands a job to the ring, which ends it, or ends it here where there is none for its region."""
        number = job.batch.target.number
        try:
            if number not in self.feeder.region_bytes:
                self._join_ring(number, job.deadline_s)
            num_bytes = self.feeder.region_bytes[number]
            if job.batch.target.num_bytes > num_bytes:
                raise TransportError(f"region {number} has {num_bytes} bytes")
        except OSError as cause:
            self._lose(f"the target is gone: {cause}")
            self.tickets.end(job, FailedQuiet(job.ticket, self.lost))
            return
        except (TransportError, RemoteProtocolError) as cause:
            self.tickets.end(job, FailedQuiet(job.ticket, str(cause)))
            return
        self.feeder.carry(job, event)

    def _join_ring(self, number: int, deadline_s: float) -> None:
        """Asks whether a region may be reached through the ring; the first answer brings the ring."""
        message, fd = self._ask(number, deadline_s, is_staged=True)
        if not self.feeder.has_ring:
            if fd is None:
                raise TransportError("the target has no ring for this source")
            self.feeder.attach(socket.socket(fileno=fd), read_shape(message.numbers))
        self.feeder.region_bytes[number] = message.numbers[2]

    def _map(self, number: int, deadline_s: float, is_stopped: Callable[[], bool]) -> Bytes:
        """The target's bytes, asked for when they are first needed."""
        message, fd = self._ask(number, deadline_s, is_staged=False)
        if fd is None:
            raise TransportError(f"region {number} came without its memory")
        segment, segment_bytes, offset, num_bytes = message.numbers
        try:
            if segment not in self.mappings:
                self.mappings[segment] = map_segment(fd, segment_bytes, is_stopped)
        finally:
            os.close(fd)
        found = self.regions[number] = self.mappings[segment].bytes[offset : offset + num_bytes]
        return found

    def _ask(self, number: int, deadline_s: float, *, is_staged: bool) -> tuple[Message, int | None]:
        send_message(self.sock, Message(Kind.MAP, (number, int(is_staged), 0, 0)))
        try:
            message, fd = self._retry(partial(receive_message, self.sock), select.POLLIN, deadline_s)
        except TimeoutError as cause:
            # The answer to this question, should it come, would be taken for that to the next.
            self._lose(str(cause))
            raise
        if message is None:
            raise ConnectionResetError("it hung up")
        if message.kind is Kind.REFUSED:
            raise TransportError(f"region {number} was refused: {message.text}")
        return message, fd

    def _retry(self, action: Callable[[], T], mask: int, deadline_s: float) -> T:
        """Does something with the socket as soon as it can be done."""
        limit_s = time.monotonic() + deadline_s
        while True:
            try:
                return action()
            except BlockingIOError:
                self._wait(mask, limit_s)

    def _wait(self, mask: int, limit_s: float) -> None:
        poller = select.poll()
        poller.register(self.sock, mask)
        if poller.poll(LOOK_S * 1e3):
            return
        now_s = time.monotonic()
        if now_s > limit_s or self.lost:
            raise TimeoutError("the target did not react within the deadline")
        for job in self.tickets.unended(self.peer):
            if job.progress_s and now_s > job.progress_s + job.deadline_s:
                self.tickets.end_waiting(job, f"no progress on this connection for {job.deadline_s} s")
