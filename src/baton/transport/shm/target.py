"""The target's half: which peers may map the segments, and what is done with the ring of each.

A ring reader checks each filled slot, scatters it, and frees it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Peer, RevokedQuiet, RevokedUnknown, RevokeResult
from baton.transport.common.regions import Grants, Regions
from baton.transport.common.spans import are_inside
from baton.transport.common.threads import Watcher
from baton.transport.common.unix import MessageKind, UnixMessage, UnixWriter, send_message
from baton.transport.shm.ring import (
    TABLE_SPANS,
    Copiers,
    PacketKind,
    Ring,
    RingPacket,
    RingStaging,
    SlotCopy,
    create_segment,
    receive_packet,
    send_packet,
    slot_offsets,
)

SETTLE_S = 1.0
"""How long `settle` waits for a device before it returns RevokedUnknown."""


class RingReader:
    """Empties the ring of one peer, with one thread that waits for packets."""

    def __init__(self, peer: Peer, grants: Grants, staging: RingStaging, regions: Regions) -> None:
        self.grants = grants
        self.regions = regions
        self.staging = staging
        self.channel, self._peer_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._changed = threading.Condition()
        self._draining: set[int] = set()
        self._is_stopped = False
        fd = create_segment(f"baton-ring-{peer.incarnation}", staging.shape.num_bytes)
        send_message(self.channel, UnixMessage(MessageKind.STAGED), fd)
        self._thread = threading.Thread(target=self._run, args=(fd,), name="shm-ring-target", daemon=True)
        self._thread.start()

    def hand_out(self, sock: socket.socket, region_bytes: int) -> None:
        """Tells a source about its ring; the first message carries the ring's socket."""
        shape = self.staging.shape
        message = UnixMessage(MessageKind.STAGED, (shape.num_slots, shape.slot_bytes, region_bytes, 0))
        is_first = self._peer_channel.fileno() >= 0
        send_message(sock, message, self._peer_channel.fileno() if is_first else None)
        self._peer_channel.close()

    def stop(self) -> None:
        """Takes no more slots from the source."""
        with self._changed:
            self._is_stopped = True
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def settle(self) -> RevokeResult:
        """Waits for the slots taken before this call; later ones are checked against the grants by then."""
        with self._changed:
            waited_for = set(self._draining)
            if self._changed.wait_for(lambda: not waited_for & self._draining, SETTLE_S):
                return RevokedQuiet()
        return RevokedUnknown(f"{len(waited_for)} slots are being scattered for more than {SETTLE_S} s")

    def close(self) -> None:
        """Ends the thread when the slots it took are scattered, and releases the ring."""
        self.stop()
        self._thread.join()
        self.channel.close()
        self._peer_channel.close()

    def _run(self, fd: int) -> None:
        copiers = None
        try:
            ring = Ring(fd, self.staging.shape)
            copiers = Copiers(self.staging, ring)
            while (packet := receive_packet(self.channel)) is not None:
                self._take(packet, ring, copiers)
        except (OSError, RemoteProtocolError, TransportError):
            self.stop()
        finally:
            os.close(fd)
            if copiers is not None:
                copiers.close()

    def _take(self, packet: RingPacket, ring: Ring, copiers: Copiers) -> None:
        """Scatters a slot, unless its table names bytes that the source may not write."""
        if packet.kind is not PacketKind.FILLED:
            raise RemoteProtocolError(f"a source does not send {packet.kind.name}")
        memory = self.regions.find(packet.region)
        if packet.slot >= len(ring.slots) or packet.num_spans > TABLE_SPANS:
            raise RemoteProtocolError(f"there is no such slot: {packet}")
        slot = ring.slots[packet.slot]
        with self._changed:
            if self._is_stopped or packet.slot in self._draining:
                raise RemoteProtocolError(f"the source may not fill slot {packet.slot} now")
            # From here on `settle` waits for this slot; the grants are checked after that.
            self._draining.add(packet.slot)
        # A copy: the source could change the table after the check.
        target, length = slot.table[:, : packet.num_spans].copy()
        is_sound = memory is not None and are_inside(target, length, len(memory.bytes))
        is_sound = is_sound and int(length.sum()) <= len(slot.bytes)
        if memory is None or not is_sound or not self.grants.allow(packet.region, target, length):
            self._release(packet.slot)
            raise RemoteProtocolError(f"a span of {packet} was not granted")
        try:
            copier = copiers.get(memory)
        except TransportError:
            self._release(packet.slot)
            raise
        spans = Spans(slot_offsets(length), target, length)
        copier.drain(SlotCopy(spans, memory), slot, partial(self._on_drained, packet.slot))

    def _on_drained(self, slot: int, cause: str) -> None:
        """On the copier's thread: the slot is scattered, or the device failed."""
        if cause:
            # The device may still be writing: the slot is never freed, and the peer never called quiet.
            self.stop()
            return
        self._release(slot)
        with suppress(OSError):  # a source that is gone needs no slots
            send_packet(self.channel, RingPacket(PacketKind.FREED, slot))

    def _release(self, slot: int) -> None:
        with self._changed:
            self._draining.discard(slot)
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A region inside a segment, ready to be handed out."""

    segment: int
    segment_bytes: int
    offset: int
    num_bytes: int
    fd: int


class ShmWriter(UnixWriter):
    """One invited peer."""

    def __init__(
        self,
        peer: Peer,
        secret: str,
        *,
        watcher: Watcher,
        regions: Regions,
        staging: RingStaging,
        locate: Callable[[int], SegmentRange | str],
    ) -> None:
        super().__init__(peer, secret, watcher)
        self.regions = regions
        self.staging = staging
        self.locate = locate
        """Finds the segment of a region, or says why a peer cannot map it."""
        self.ring_reader: RingReader | None = None

    def end(self) -> None:
        """Releases the socket, the pidfd and the ring."""
        super().end()
        if self.ring_reader is not None:
            self.ring_reader.close()

    def shut_out(self) -> RevokeResult:
        """Takes no more from the ring either."""
        if self.ring_reader is not None:
            self.ring_reader.stop()
        return super().shut_out()

    def hand_out(self, sock: socket.socket, number: int, *, is_staged: bool) -> None:
        if is_staged:
            self._hand_out_ring(sock, number)
        else:
            self._hand_out_segment(sock, number)

    def settle(self, result: RevokeResult) -> RevokeResult:
        """Waits for the slots that were taken from the ring."""
        ring_reader = self.ring_reader
        return ring_reader.settle() if ring_reader and isinstance(result, RevokedQuiet) else result

    def _hand_out_ring(self, sock: socket.socket, number: int) -> None:
        memory = self.regions.find(number)
        if memory is None:
            self.refuse(sock, f"region {number} is not registered")
            return
        if self.ring_reader is None:
            self.ring_reader = RingReader(self.peer, self.grants, self.staging, self.regions)
        self.ring_reader.hand_out(sock, len(memory.bytes))

    def _hand_out_segment(self, sock: socket.socket, number: int) -> None:
        located = self.locate(number)
        if isinstance(located, str):
            self.refuse(sock, located)
            return
        self.mapped.add(number)
        numbers = (located.segment, located.segment_bytes, located.offset, located.num_bytes)
        send_message(sock, UnixMessage(MessageKind.MAPPED, numbers), located.fd)
