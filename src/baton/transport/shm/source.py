"""The source's half: maps the target's segments and copies straight into them.

Every failure on this path is FailedQuiet: the connection's thread does the stores itself, and has stopped
when it reports one. Batches from or to a device go through a ring instead (ring_writer.py).
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from functools import partial

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.transport.base import Bytes, Completion, Description, Done, FailedQuiet, Peer
from baton.transport.common.spans import copy_spans
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import CANCELLED, Job, Tickets
from baton.transport.common.unix_messages import MessageKind, UnixMessage, send_message
from baton.transport.common.unix_source import UnixConnection
from baton.transport.fences import CudaEvent
from baton.transport.shm.ring import RingShape, Staging
from baton.transport.shm.ring_writer import RingWriter
from baton.transport.shm.segments import Mapping, map_segment


class ShmConnection(UnixConnection):
    """The connection to one target."""

    def __init__(
        self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher, staging: Staging
    ) -> None:
        self.staging = staging
        self.ring_writer = RingWriter(peer, tickets, watcher, staging)
        self.mappings: dict[int, Mapping] = {}
        self.regions: dict[int, Bytes] = {}
        super().__init__(peer, description, tickets, watcher)  # starts the thread

    def on_lost(self) -> None:
        self.ring_writer.lose(self.lost)

    def unmap(self) -> bool:
        self.regions.clear()
        while self.mappings:
            _, mapping = self.mappings.popitem()
            mapped = mapping.map
            del mapping  # its array keeps the map from being closed
            mapped.close()
        self.ring_writer.close()
        return True

    def carry(self, job: Job, event: CudaEvent | None) -> None:
        if self.staging.is_needed(job.batch):
            self._stage(job, event)
            return
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
        is_stopped = partial(self.is_stopped, job)
        landed = UnixMessage(MessageKind.LANDED, (batch.tag, spans.num_bytes, 0, 0))
        try:
            target = self.regions.get(batch.target.number)
            if target is None:
                target = self._map(batch.target.number, job.deadline_s, is_stopped)
            if batch.target.num_bytes > len(target):  # `submit` checked the spans up to `num_bytes`
                return FailedQuiet(job.ticket, f"region {batch.target.number} has {len(target)} bytes")
            if not copy_spans(spans, job.source, target, is_stopped):
                return FailedQuiet(job.ticket, CANCELLED if job.is_cancelled else self.lost)
            if batch.is_announced:
                self.retry(partial(send_message, self.sock, landed), select.POLLOUT, job.deadline_s)
        except TimeoutError as cause:
            return FailedQuiet(job.ticket, str(cause))
        except OSError as cause:
            self.lose(f"the target is gone: {cause}")
            return FailedQuiet(job.ticket, self.lost)
        except (TransportError, RemoteProtocolError) as cause:
            return FailedQuiet(job.ticket, str(cause))
        return Done(job.ticket)

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
            self.lose(f"the target is gone: {cause}")
            self.tickets.end(job, FailedQuiet(job.ticket, self.lost))
            return
        except (TransportError, RemoteProtocolError) as cause:
            self.tickets.end(job, FailedQuiet(job.ticket, str(cause)))
            return
        self.ring_writer.carry(job, event)

    def _join_ring(self, number: int, deadline_s: float) -> None:
        """Asks whether a region may be reached through the ring; the first reply brings the ring."""
        message, fd = self.ask(number, deadline_s, is_staged=True)
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
        message, fd = self.ask(number, deadline_s)
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
