"""The target's half: a thread per stream that receives parts straight into granted memory.

A part names its ranges before its bytes, and is checked as a whole. If a range lies outside of a registered
region or of what was granted to this peer, the part is refused before a byte of it is written. A refusal
ends the peer: its other streams are stopped too, then it is sent a goodbye, and nothing more is read from
it.
"""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from baton.errors import RemoteProtocolError
from baton.plan.steps import Spans
from baton.transport.base import Bytes, Ranges, RevokedQuiet, RevokedUnknown, RevokeResult
from baton.transport.common.listener import receive_all, receive_exactly
from baton.transport.common.regions import Grants, RegionGrant, Regions, do_ranges_overlap
from baton.transport.common.spans import are_inside, copy_spans
from baton.transport.tcp.wire import (
    PART_HEADER_BYTES,
    TABLE_ROW_BYTES,
    PartHeader,
    goodbye,
    is_scattered,
    landed,
    views_by_call,
)

STREAMS_MAX = 64
POLL_MS = 50


@dataclass(slots=True, eq=False)
class ReceiveStream:
    """One stream: its socket, its thread, and the ranges that it is writing."""

    sock: socket.socket
    thread: threading.Thread = field(default_factory=threading.Thread)
    writing: RegionGrant | None = None


@dataclass(slots=True, eq=False)
class TcpWriter:
    """One invited peer."""

    secret: str
    regions: Regions
    grants: Grants = field(default_factory=Grants)
    streams: dict[int, ReceiveStream | None] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Lock = field(default_factory=threading.Lock)
    is_ended: bool = False

    def check_quiet(self, grant: RegionGrant) -> RevokeResult:
        """Whether no stream is writing there; a stream sets `writing` before it checks the grants."""
        with self.lock:
            writing = [stream.writing for stream in self.streams.values() if stream]
        for write in writing:
            if write and write.region == grant.region and do_ranges_overlap(write.ranges, grant.ranges):
                return RevokedUnknown("a write that was allowed before is in progress")
        return RevokedQuiet()

    def revoke(self, cause: str) -> RevokeResult:
        """Stops every stream and says goodbye; nothing is written after it returns.

        It must not be called from a thread of a stream.
        """
        with self.ending:
            with self.lock:
                self.is_ended = True
                streams = [stream for stream in self.streams.values() if stream]
                self.streams.clear()
                for stream in streams:
                    with suppress(OSError):
                        stream.sock.shutdown(socket.SHUT_RD)  # blocked reads return; goodbye can be sent
            for stream in streams:
                stream.thread.join()
            for stream in streams:
                with suppress(OSError):
                    stream.sock.send(goodbye(cause), socket.MSG_DONTWAIT)
                stream.sock.close()
        return RevokedQuiet()

    def attach(self, index: int, sock: socket.socket) -> bool:
        """Takes over a stream with a thread of its own; each index can be used once."""
        with self.lock:
            if self.is_ended or index in self.streams or index >= STREAMS_MAX:
                return False
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = self.streams[index] = ReceiveStream(sock)
            stream.thread = threading.Thread(
                target=self._receive, args=(index, stream), name="tcp-receiver", daemon=True
            )
            stream.thread.start()
            return True

    def _receive(self, index: int, stream: ReceiveStream) -> None:
        try:
            while not self.is_ended and self._receive_part(stream):
                pass
        except OSError:
            pass  # the source is gone
        except RemoteProtocolError as refused:
            with self.lock:
                self.is_ended = True
            threading.Thread(target=self.revoke, args=(str(refused),), daemon=True).start()
            return
        with self.lock:
            if not self.is_ended:
                self.streams[index] = None
                stream.sock.close()

    def _receive_part(self, stream: ReceiveStream) -> bool:
        """Receives one part; false if the stream has ended."""
        raw = receive_exactly(stream.sock, PART_HEADER_BYTES)
        if raw is None:
            return False
        header = PartHeader.from_bytes(bytes(raw))
        table = receive_exactly(stream.sock, header.num_spans * TABLE_ROW_BYTES)
        if table is None:
            return False
        rows = np.frombuffer(table, dtype="<i8").astype(np.int64).reshape(-1, 2)
        ranges = Ranges(rows[:, 0].copy(), rows[:, 1].copy())
        memory = self.regions.acquire_number(header.region)
        if memory is None:
            raise RemoteProtocolError(f"region {header.region} is not registered")
        try:
            stream.writing = RegionGrant(header.region, ranges)
            self._check(header, ranges, len(memory))
            if not self._fill(stream.sock, memory, ranges):
                return False
        finally:
            stream.writing = None
            self.regions.release(header.region)
        self._send(stream.sock, landed(header.ticket))
        return True

    def _check(self, header: PartHeader, ranges: Ranges, region_bytes: int) -> None:
        if not are_inside(ranges.start, ranges.length, region_bytes):
            raise RemoteProtocolError(f"a write outside of region {header.region} was refused")
        if int(ranges.length.sum()) != header.num_bytes:
            raise RemoteProtocolError(f"the ranges of a part do not add up to its {header.num_bytes} bytes")
        if not self.grants.allow(header.region, ranges.start, ranges.length):
            raise RemoteProtocolError(f"a write to region {header.region} that was not granted was refused")

    def _fill(self, sock: socket.socket, memory: Bytes, ranges: Ranges) -> bool:
        """Receives the bytes of a part into place; false if the stream ends."""
        if is_scattered(ranges.length):
            gathered = receive_exactly(sock, int(ranges.length.sum()))
            if gathered is None:
                return False
            start = np.cumsum(ranges.length) - ranges.length
            spans = Spans(start, ranges.start, ranges.length)
            return copy_spans(spans, np.frombuffer(gathered, dtype=np.uint8), memory, lambda: self.is_ended)
        for views in views_by_call(memory, ranges.start, ranges.length):
            if self.is_ended or not receive_all(sock, views):
                return False
        return True

    def _send(self, sock: socket.socket, raw: bytes) -> None:
        """Sends a few bytes; blocks only if the source has stopped reading."""
        while raw and not self.is_ended:
            try:
                raw = raw[sock.send(raw, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(sock, select.POLLOUT)
                poller.poll(POLL_MS)
