"""The source's half: maps the target's segments and copies straight into them, or fills a ring.

Every failure of a straight copy is FailedQuiet: the connection's thread does the stores itself, and has
stopped when it reports one. Batches from or to a device go through a ring instead, where three threads meet:
the connection's worker takes slots and fills them, the copiers' threads report a full slot, and the ring's
own reader takes freed slots back. The watcher checks the deadlines while a batch is in flight.

A batch in the ring that is given up (cancelled, overdue, or lost with its connection) ends at once as
FailedQuiet if the target has none of its slots: slots that are still being filled are never announced. If the
target has some, it ends when they are freed, or as FailedUnknown when the deadline passes or the target is
gone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import (
    HANDSHAKE_S,
    Bytes,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
)
from baton.transport.common.connection import CHECK_S
from baton.transport.common.spans import copy_spans
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import CANCELLED, SubmittedBatch, Tickets
from baton.transport.common.unix import UnixConnection, receive_message
from baton.transport.fences import CudaEvent
from baton.transport.shm.ring import (
    Copiers,
    Mapping,
    PacketKind,
    Ring,
    RingPacket,
    RingShape,
    RingStaging,
    Slot,
    SlotCopy,
    map_segment,
    receive_packet,
    send_packet,
    slot_offsets,
)


@dataclass(slots=True, eq=False)
class RingBatch:
    """A batch on its way through the ring."""

    job: SubmittedBatch
    fence: CudaEvent | None
    num_filling: int = 0
    num_away: int = 0
    """Slots that the target has."""
    is_all_filled: bool = False
    """Whether no more slots will be taken for it."""
    is_ended: bool = False
    cause: str = ""
    """Why it was given up."""


class RingWriter:
    """Fills the ring of one connection."""

    def __init__(self, peer: Peer, tickets: Tickets, watcher: Watcher, staging: RingStaging) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.staging = staging
        self.region_bytes: dict[int, int] = {}
        """The sizes of the regions that the target accepts through this ring."""
        self._ring: Ring | None = None
        self._channel: socket.socket | None = None
        self._copiers: Copiers | None = None
        self._reader: threading.Thread | None = None
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._away: dict[int, RingBatch] = {}
        self._batches: set[RingBatch] = set()
        self._progress_s = 0.0
        self._lost = ""

    @property
    def has_ring(self) -> bool:
        return self._ring is not None

    def attach(self, channel: socket.socket, shape: RingShape) -> None:
        """Maps the ring whose memory is the channel's first message, and starts to read freed slots."""
        channel.settimeout(HANDSHAKE_S)
        message, fd = receive_message(channel)
        channel.settimeout(None)
        if message is None or fd is None:
            raise TransportError("the target handed out a ring without memory")
        try:
            ring = Ring(fd, shape)
        finally:
            os.close(fd)
        self._ring, self._channel, self._copiers = ring, channel, Copiers(self.staging, ring)
        self._free = list(ring.slots)
        self._reader = threading.Thread(
            target=self._read, args=(channel,), name="shm-ring-source", daemon=True
        )
        self._reader.start()

    def carry(self, job: SubmittedBatch, fence: CudaEvent | None) -> None:
        """On the connection's worker: fills slot after slot; the ticket ends when they are freed."""
        memory = self.tickets.regions.find(job.batch.source.number)
        assert self._ring is not None, "a job is carried through a ring"
        assert self._copiers is not None
        assert memory is not None, "a job that began keeps its region"
        batch = RingBatch(job, fence)
        with self._changed:
            job.progress_s = self._progress_s = time.monotonic()
            self._batches.add(batch)
            self.watcher.start_timer(self._tick)
        try:
            copier = self._copiers.get(memory)
            for part in self._ring.shape.slotfuls(job.batch.spans):
                slot = self._take_slot(batch)
                if slot is None:
                    break
                slot.table[0, : len(part)], slot.table[1, : len(part)] = part.target, part.length
                packet = RingPacket(
                    PacketKind.FILLED, slot.index, job.batch.target.number, num_spans=len(part)
                )
                copy = SlotCopy(Spans(part.source, slot_offsets(part.length), part.length), memory, fence)
                copier.fill(copy, slot, partial(self._on_filled, batch, slot, packet))
        except TransportError as cause:
            self.lose(str(cause))
        with self._changed:
            batch.is_all_filled = True
            self._settle(batch)

    def lose(self, cause: str) -> None:
        """Gives up everything: the target or this connection is gone."""
        with self._changed:
            self._lost = self._lost or cause
            for batch in list(self._batches):
                self._give_up(batch, self._lost)
                self._end_unknown(batch)
            self._changed.notify_all()

    def close(self) -> None:
        """Releases the ring; `carry` must not be called any more."""
        self.lose("the connection was closed")
        channel, copiers, reader = self._channel, self._copiers, self._reader
        self._ring = self._channel = self._copiers = self._reader = None
        if channel is not None and copiers is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
            if reader is not None and reader is not threading.current_thread():
                reader.join()
            copiers.close()
            channel.close()
        self._free = []

    def _take_slot(self, batch: RingBatch) -> Slot | None:
        """Waits for a free slot; None once the batch was given up."""
        with self._changed:
            while not self._free:
                if batch.cause or batch.job.is_cancelled or self._lost:
                    break
                self._changed.wait(CHECK_S)
            if batch.job.is_cancelled:
                self._give_up(batch, CANCELLED)
            if self._lost:
                self._give_up(batch, self._lost)
            if batch.cause:
                return None
            batch.num_filling += 1
            return self._free.pop()

    def _on_filled(self, batch: RingBatch, slot: Slot, packet: RingPacket, cause: str) -> None:
        """On the copier's thread: the slot is full, or the device failed."""
        with self._changed:
            batch.num_filling -= 1
            if cause:
                self._give_up(batch, cause)
            elif batch.cause or self._lost:
                self._free.append(slot)
                self._changed.notify_all()
            else:
                batch.job.progress_s = self._progress_s = time.monotonic()
                batch.num_away += 1
                self._away[slot.index] = batch
                cause = self._send(packet)
            self._settle(batch)
        if cause:
            self.lose(cause)

    def _send(self, packet: RingPacket) -> str:
        """Sends a packet; returns why it failed, or nothing."""
        assert self._channel is not None
        try:
            send_packet(self._channel, packet)
        except OSError as error:
            return f"the target is gone: {error}"
        return ""

    def _read(self, channel: socket.socket) -> None:
        """The reader's thread."""
        lost = "the target hung up"
        try:
            while (packet := receive_packet(channel)) is not None:
                self._on_freed(packet)
        except (OSError, RemoteProtocolError) as cause:
            lost = f"the target is gone: {cause}"
        self.lose(lost)

    def _on_freed(self, packet: RingPacket) -> None:
        with self._changed:
            batch = self._away.pop(packet.slot, None)
            if packet.kind is not PacketKind.FREED or batch is None or self._ring is None:
                raise RemoteProtocolError(f"the target freed a slot that it did not have: {packet}")
            self._free.append(self._ring.slots[packet.slot])
            batch.num_away -= 1
            batch.job.progress_s = self._progress_s = time.monotonic()
            self._settle(batch)
            self._changed.notify_all()

    def _give_up(self, batch: RingBatch, cause: str) -> None:
        batch.cause = batch.cause or cause
        self._settle(batch)

    def _settle(self, batch: RingBatch) -> None:
        """Ends a ticket if the target has none of its slots and nothing more will be sent."""
        if batch.num_away:
            return
        if batch.cause:
            self._end(batch, FailedQuiet(batch.job.ticket, batch.cause))
        elif batch.is_all_filled and not batch.num_filling:
            self._end(batch, Done(batch.job.ticket))

    def _end_unknown(self, batch: RingBatch) -> None:
        """Ends a ticket if the target still has slots of it."""
        if batch.num_away:
            self._end(batch, FailedUnknown(batch.job.ticket, batch.cause))

    def _end(self, batch: RingBatch, completion: Completion) -> None:
        if batch.is_ended:
            return
        batch.is_ended = True
        self._batches.discard(batch)
        self.tickets.end(batch.job, completion)

    def _tick(self) -> None:
        """On the watcher's thread, while a batch is in flight: gives up cancelled and overdue batches."""
        now_s = time.monotonic()
        with self._changed:
            if any(_is_waiting_for_fence(batch) for batch in self._batches):
                self._progress_s = now_s  # the target is not to blame
            for batch in list(self._batches):
                if batch.job.is_cancelled and (batch.num_filling or not batch.is_all_filled):
                    self._give_up(batch, CANCELLED)
                elif now_s > self._progress_s + batch.job.deadline_s:
                    self._give_up(batch, f"no progress on this connection for {batch.job.deadline_s} s")
                    self._end_unknown(batch)
            self.tickets.end_overdue(self.peer, now_s, self._progress_s)
            self._changed.notify_all()
            if not self._batches:
                self.watcher.stop_timer(self._tick)


def _is_waiting_for_fence(batch: RingBatch) -> bool:
    return batch.num_filling > 0 and batch.fence is not None and not batch.fence.query()


class ShmConnection(UnixConnection):
    """The connection to one target."""

    def __init__(
        self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher, staging: RingStaging
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

    def carry(self, job: SubmittedBatch, event: CudaEvent | None) -> None:
        if self.staging.is_needed(job.batch):
            self._stage(job, event)
            return
        completion: Completion = FailedQuiet(job.ticket, "the copy crashed; see the log")
        try:
            completion = self._copy(job)
        finally:
            self.tickets.end(job, completion)

    def _copy(self, job: SubmittedBatch) -> Completion:
        batch, spans = job.batch, job.batch.spans
        is_stopped = partial(self.is_stopped, job)
        try:
            target = self.regions.get(batch.target.number)
            if target is None:
                target = self._map(batch.target.number, job.deadline_s, is_stopped)
            if batch.target.num_bytes > len(target):  # `submit` checked the spans up to `num_bytes`
                return FailedQuiet(job.ticket, f"region {batch.target.number} has {len(target)} bytes")
            if not copy_spans(spans, job.source, target, is_stopped):
                return FailedQuiet(job.ticket, CANCELLED if job.is_cancelled else self.lost)
        except TimeoutError as cause:
            return FailedQuiet(job.ticket, str(cause))
        except OSError as cause:
            self.lose(f"the target is gone: {cause}")
            return FailedQuiet(job.ticket, self.lost)
        except (TransportError, RemoteProtocolError) as cause:
            return FailedQuiet(job.ticket, str(cause))
        return Done(job.ticket)

    def _stage(self, job: SubmittedBatch, event: CudaEvent | None) -> None:
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
