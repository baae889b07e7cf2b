"""The target's half of a ring: checks each filled slot, scatters it, and frees it."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Landed, Peer, Quiet, RevokeResult, Unknown
from baton.transport.common.regions import Grants, Memory, Regions
from baton.transport.common.spans import are_inside
from baton.transport.common.tickets import EventQueue
from baton.transport.common.transport import Refusals
from baton.transport.common.unix_messages import MessageKind, UnixMessage, send_message
from baton.transport.shm.ring import (
    TABLE_SPANS,
    Copiers,
    PacketKind,
    Ring,
    RingPacket,
    SlotCopy,
    Staging,
    receive_packet,
    send_packet,
    slot_offsets,
)
from baton.transport.shm.segments import create_segment

SETTLE_S = 1.0
"""How long `settle` waits for a device before it returns Unknown."""


class RingReader:
    """Empties the ring of one peer, with one thread that waits for packets."""

    def __init__(
        self,
        peer: Peer,
        grants: Grants,
        staging: Staging,
        *,
        regions: Regions,
        events: EventQueue,
        refusals: Refusals,
    ) -> None:
        self.peer = peer
        self.grants = grants
        self.regions = regions
        self.events = events
        self.refusals = refusals
        self.staging = staging
        self.channel, self._peer_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._landed_bytes: dict[int, int] = {}
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
                return Quiet()
        return Unknown(f"{len(waited_for)} slots are being scattered for more than {SETTLE_S} s")

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
                self._on_packet(packet, ring, copiers)
        except (OSError, RemoteProtocolError, TransportError):
            self.stop()
        finally:
            os.close(fd)
            if copiers is not None:
                copiers.close()

    def _on_packet(self, packet: RingPacket, ring: Ring, copiers: Copiers) -> None:
        memory = self.regions.find(packet.region)
        match packet.kind:
            case PacketKind.FILLED:
                self._take(packet, ring, copiers, memory)
            case PacketKind.DROPPED:
                if memory is None:
                    self._forget(packet.batch, "")
                else:  # after the slots of this batch that are being scattered
                    copiers.get(memory).after(partial(self._forget, packet.batch))
            case _:
                raise RemoteProtocolError(f"a source does not send {packet.kind.name}")

    def _take(self, packet: RingPacket, ring: Ring, copiers: Copiers, memory: Memory | None) -> None:
        """Scatters a slot, unless its table names bytes that the source may not write."""
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
        num_bytes = int(length.sum()) if is_sound else 0
        is_sound = is_sound and num_bytes <= len(slot.bytes)
        if memory is None or not is_sound or not self.grants.allow(packet.region, target, length):
            self.refusals.add_write()
            self._release(packet.slot)
            raise RemoteProtocolError(f"a span of {packet} was not granted")
        try:
            copier = copiers.get(memory)
        except TransportError:
            self._release(packet.slot)
            raise
        spans = Spans(slot_offsets(length), target, length)
        copier.drain(SlotCopy(spans, memory), slot, partial(self._on_drained, packet, num_bytes))

    def _on_drained(self, packet: RingPacket, num_bytes: int, cause: str) -> None:
        """On the copier's thread: the slot is scattered, or the device failed."""
        if cause:
            # The device may still be writing: the slot is never freed, and the peer never called quiet.
            self.stop()
            return
        self._release(packet.slot)
        with suppress(OSError):  # a source that is gone needs no slots
            send_packet(self.channel, RingPacket(PacketKind.FREED, packet.batch, slot=packet.slot))
        if packet.is_silent:
            return
        landed_bytes = self._landed_bytes.get(packet.batch, 0) + num_bytes
        self._landed_bytes[packet.batch] = landed_bytes
        if landed_bytes == packet.batch_bytes:
            del self._landed_bytes[packet.batch]
            self.events.put(Landed(self.peer, packet.tag, landed_bytes))

    def _release(self, slot: int) -> None:
        with self._changed:
            self._draining.discard(slot)
            self._changed.notify_all()

    def _forget(self, batch: int, cause: str) -> None:
        self._landed_bytes.pop(batch, None)
