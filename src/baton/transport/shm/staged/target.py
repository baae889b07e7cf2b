"""The target's half of a ring: checks what a source put into a slot, scatters it, and gives the slot back."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Landed, Peer, Quiet, Stillness, Unknown
from baton.transport.parts.buffers import Memory
from baton.transport.parts.grants import Grants
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.regions import Regions
from baton.transport.parts.spans import are_inside
from baton.transport.parts.tally import Tally
from baton.transport.shm.messages import Kind, Message, send_message
from baton.transport.shm.segments import create_segment
from baton.transport.shm.staged.movers import Move, Mover, Staging, place_of
from baton.transport.shm.staged.ring import (
    TABLE_SPANS,
    Packet,
    Ring,
    Word,
    receive_packet,
    send_packet,
    slot_offsets,
)

SETTLE_S = 1.0
"""How long `settle` waits for a device before it says Unknown."""


@dataclass(frozen=True, slots=True)
class Shore:
    """What the rings of one target share."""

    regions: Regions
    mailbox: Mailbox
    tally: Tally
    staging: Staging


class Drainer:
    """Empties the ring of one peer, with one thread that waits for packets."""

    def __init__(self, peer: Peer, grants: Grants, shore: Shore) -> None:
        self.peer = peer
        self.grants = grants
        self.shore = shore
        self.channel, self._handed_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._movers: dict[str, Mover] = {}
        self._landed_bytes: dict[int, int] = {}
        self._changed = threading.Condition()
        self._draining: set[int] = set()
        self._is_barred = False
        fd = create_segment(f"baton-ring-{peer.incarnation}", shore.staging.shape.num_bytes)
        send_message(self.channel, Message(Kind.STAGED), fd)
        self._thread = threading.Thread(target=self._run, args=(fd,), name="shm-ring-target", daemon=True)
        self._thread.start()

    def hand_out(self, sock: socket.socket, region_bytes: int) -> None:
        """Tells a source of its ring, and the first time how to reach it."""
        shape = self.shore.staging.shape
        message = Message(Kind.STAGED, (shape.num_slots, shape.slot_bytes, region_bytes, 0))
        is_first = self._handed_out.fileno() >= 0
        send_message(sock, message, self._handed_out.fileno() if is_first else None)
        self._handed_out.close()

    def bar(self) -> None:
        """Takes nothing more from the source."""
        with self._changed:
            self._is_barred = True
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def settle(self) -> Stillness:
        """Waits for the slots that were taken before this call; what comes later is held to later grants."""
        with self._changed:
            waited_for = set(self._draining)
            if self._changed.wait_for(lambda: not waited_for & self._draining, SETTLE_S):
                return Quiet()
        return Unknown(f"{len(waited_for)} slots are being scattered for more than {SETTLE_S} s")

    def close(self) -> None:
        """Ends the thread when what it took is scattered, and lets go of the ring."""
        self.bar()
        self._thread.join()
        self.channel.close()
        self._handed_out.close()

    def _run(self, fd: int) -> None:
        try:
            ring = Ring(fd, self.shore.staging.shape)
            while (packet := receive_packet(self.channel)) is not None:
                self._obey(packet, ring)
        except (OSError, RemoteProtocolError, TransportError):
            self.bar()
        finally:
            os.close(fd)
            for mover in self._movers.values():
                mover.close()
            self._movers.clear()

    def _obey(self, packet: Packet, ring: Ring) -> None:
        memory = self.shore.regions.memory(packet.region)
        match packet.word:
            case Word.FILLED:
                self._take(packet, ring, memory)
            case Word.DROPPED:
                if memory is None:
                    self._forget(packet.batch, "")
                else:  # behind the slots of this batch that are being scattered
                    self._mover(memory, ring).after(partial(self._forget, packet.batch))
            case _:
                raise RemoteProtocolError(f"a source does not say {packet.word.name}")

    def _take(self, packet: Packet, ring: Ring, memory: Memory | None) -> None:
        """Scatters a slot, unless something in its table is not the source's to write."""
        if packet.slot >= len(ring.slots) or packet.num_spans > TABLE_SPANS:
            raise RemoteProtocolError(f"there is no such slot: {packet}")
        slot = ring.slots[packet.slot]
        with self._changed:
            if self._is_barred or packet.slot in self._draining:
                raise RemoteProtocolError(f"slot {packet.slot} is not the source's to fill")
            # From here on `settle` waits for this slot; the grants are looked at after that.
            self._draining.add(packet.slot)
        # A copy: the source could change the table after it was checked.
        target, length = slot.table[:, : packet.num_spans].copy()
        is_sound = memory is not None and are_inside(target, length, len(memory.bytes))
        num_bytes = int(length.sum()) if is_sound else 0
        is_sound = is_sound and num_bytes <= len(slot.bytes)
        if memory is None or not is_sound or not self.grants.allow(packet.region, target, length):
            self.shore.tally.add_refused_write()
            self._leave(packet.slot)
            raise RemoteProtocolError(f"a span of {packet} was not granted")
        try:
            mover = self._mover(memory, ring)
        except TransportError:
            self._leave(packet.slot)
            raise
        spans = Spans(slot_offsets(length), target, length)
        mover.drain(Move(spans, memory), slot, partial(self._drained, packet, num_bytes))

    def _mover(self, memory: Memory, ring: Ring) -> Mover:
        place = place_of(memory)
        if place not in self._movers:
            self._movers[place] = self.shore.staging.open_mover(memory, ring)
        return self._movers[place]

    def _drained(self, packet: Packet, num_bytes: int, cause: str) -> None:
        """On the mover's thread: the slot is scattered, or the device failed."""
        if cause:
            # The device may still be at it: this slot is never given back, nor the peer called quiet.
            self.bar()
            return
        self._leave(packet.slot)
        with suppress(OSError):  # a source that is gone needs no slots
            send_packet(self.channel, Packet(Word.FREED, packet.batch, slot=packet.slot))
        if packet.is_silent:
            return
        landed_bytes = self._landed_bytes.get(packet.batch, 0) + num_bytes
        self._landed_bytes[packet.batch] = landed_bytes
        if landed_bytes == packet.batch_bytes:
            del self._landed_bytes[packet.batch]
            self.shore.mailbox.put(Landed(self.peer, packet.tag, landed_bytes))

    def _leave(self, slot: int) -> None:
        with self._changed:
            self._draining.discard(slot)
            self._changed.notify_all()

    def _forget(self, batch: int, cause: str) -> None:
        self._landed_bytes.pop(batch, None)
