"""The target's half: which peers may map the segments, or fill a ring."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from baton.transport.base import Peer, Quiet, RevokeResult
from baton.transport.common.regions import Regions
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import EventQueue
from baton.transport.common.transport import Refusals
from baton.transport.common.unix_messages import MessageKind, UnixMessage, send_message
from baton.transport.common.unix_target import UnixWriter
from baton.transport.shm.ring import Staging
from baton.transport.shm.ring_reader import RingReader


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
        events: EventQueue,
        refusals: Refusals,
        staging: Staging,
        locate: Callable[[int], SegmentRange | str],
    ) -> None:
        super().__init__(peer, secret, watcher=watcher, events=events, refusals=refusals)
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
        return ring_reader.settle() if ring_reader and isinstance(result, Quiet) else result

    def _hand_out_ring(self, sock: socket.socket, number: int) -> None:
        memory = self.regions.find(number)
        if memory is None:
            self.refuse(sock, f"region {number} is not registered")
            return
        if self.ring_reader is None:
            self.ring_reader = RingReader(
                self.peer,
                self.grants,
                self.staging,
                regions=self.regions,
                events=self.events,
                refusals=self.refusals,
            )
        self.ring_reader.hand_out(sock, len(memory.bytes))

    def _hand_out_segment(self, sock: socket.socket, number: int) -> None:
        located = self.locate(number)
        if isinstance(located, str):
            self.refuse(sock, located)
            return
        self.mapped.add(number)
        numbers = (located.segment, located.segment_bytes, located.offset, located.num_bytes)
        send_message(sock, UnixMessage(MessageKind.MAPPED, numbers), located.fd)
