"""The target's half: a thread per stream that reads parts straight into granted memory.

A part names its ranges before its bytes come, and is looked at as a whole: what lies outside of a registered
region or of what was granted to this very peer is refused before a byte of it is written. The refusal ends
the peer: its other streams are stopped too, then it is told goodbye, and what it still sends is read by
nobody.
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
from baton.transport.base import Bytes, Landed, Peer, Quiet, Ranges, Stillness, Unknown
from baton.transport.parts.copying import copy_spans
from baton.transport.parts.grants import Granted, Grants, overlap
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.regions import Regions
from baton.transport.parts.spans import are_inside
from baton.transport.parts.tally import Tally
from baton.transport.tcp.frames import (
    PART_HEADER_BYTES,
    TABLE_ROW_BYTES,
    PartHeader,
    goodbye,
    landed,
)
from baton.transport.tcp.wire import is_scattered, receive_all, receive_exactly, windows

STREAMS_MAX = 64
LOOK_MS = 50


@dataclass(slots=True, eq=False)
class Receiver:
    """One stream: its socket, its thread, and where it is writing."""

    sock: socket.socket
    thread: threading.Thread
    writing: Granted | None = None


@dataclass(slots=True)
class Arrival:
    """A batch of which some parts have landed."""

    num_left: int
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Writer:
    """One invited peer."""

    peer: Peer
    secret: str
    regions: Regions
    mailbox: Mailbox
    tally: Tally
    grants: Grants = field(default_factory=Grants)
    receivers: dict[int, Receiver | None] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    expelling: threading.Lock = field(default_factory=threading.Lock)
    is_expelled: bool = False

    def is_still(self, granted: Granted) -> Stillness:
        """Whether no stream is writing there: each says where before it asks whether it may."""
        with self.lock:
            writing = [receiver.writing for receiver in self.receivers.values() if receiver]
        for found in writing:
            if found and found.region == granted.region and overlap(found.ranges, granted.ranges):
                return Unknown("a write that was allowed before is under way")
        return Quiet()

    def revoke(self, cause: str) -> Stillness:
        """Stops every stream; when it returns nothing is written any more."""
        self.expel(cause)
        return Quiet()

    def expel(self, cause: str) -> None:
        """Ends the peer from any thread but its receivers'."""
        with self.expelling:
            with self.lock:
                self.is_expelled = True
                receivers = [receiver for receiver in self.receivers.values() if receiver]
                self.receivers.clear()
                _wake(receivers)
            for receiver in receivers:
                receiver.thread.join()
            for receiver in receivers:
                with suppress(OSError):
                    receiver.sock.send(goodbye(cause), socket.MSG_DONTWAIT)
                receiver.sock.close()

    def attach(self, index: int, sock: socket.socket) -> Receiver | None:
        """Takes a stream on, the current thread with it; each index is good for one."""
        with self.lock:
            if self.is_expelled or index in self.receivers or index >= STREAMS_MAX:
                return None
            receiver = self.receivers[index] = Receiver(sock, threading.current_thread())
            return receiver

    def receive(self, index: int, receiver: Receiver) -> None:
        """A receiver's life."""
        try:
            while not self.is_expelled and self._receive_part(receiver):
                pass
        except OSError:
            pass  # the source is gone; what it meant to send is its own affair
        except RemoteProtocolError as refused:
            with self.lock:
                is_first, self.is_expelled = not self.is_expelled, True
            if is_first:
                self.tally.add_refused_write()
            threading.Thread(target=self.expel, args=(str(refused),), daemon=True).start()
            return
        with self.lock:
            if not self.is_expelled:
                self.receivers[index] = None
                receiver.sock.close()

    def _receive_part(self, receiver: Receiver) -> bool:
        """One part; false when the stream has ended."""
        raw = receive_exactly(receiver.sock, PART_HEADER_BYTES)
        if raw is None:
            return False
        header = PartHeader.from_bytes(bytes(raw))
        table = receive_exactly(receiver.sock, header.num_spans * TABLE_ROW_BYTES)
        if table is None:
            return False
        rows = np.frombuffer(table, dtype="<i8").astype(np.int64).reshape(-1, 2)
        ranges = Ranges(rows[:, 0].copy(), rows[:, 1].copy())
        memory = self.regions.use_number(header.region)
        if memory is None:
            raise RemoteProtocolError(f"region {header.region} is not registered")
        try:
            receiver.writing = Granted(header.region, ranges)
            self._check(header, ranges, len(memory))
            if not self._fill(receiver.sock, memory, ranges):
                return False
        finally:
            receiver.writing = None
            self.regions.leave(header.region)
        self._account_for(header)
        self._say(receiver.sock, landed(header.ticket))
        return True

    def _check(self, header: PartHeader, ranges: Ranges, region_bytes: int) -> None:
        if not are_inside(ranges.start, ranges.length, region_bytes):
            raise RemoteProtocolError(f"a write outside of region {header.region} was refused")
        if int(ranges.length.sum()) != header.num_bytes:
            raise RemoteProtocolError(f"a part of {header.num_bytes} bytes has ranges for another number")
        if not self.grants.allow(header.region, ranges.start, ranges.length):
            raise RemoteProtocolError(f"a write to region {header.region} that was not granted was refused")

    def _fill(self, sock: socket.socket, memory: Bytes, ranges: Ranges) -> bool:
        """Reads the bytes of a part to where they belong; false when the stream ends."""
        if is_scattered(ranges.length):
            swept = receive_exactly(sock, int(ranges.length.sum()))
            if swept is None:
                return False
            start = np.cumsum(ranges.length) - ranges.length
            spans = Spans(start, ranges.start, ranges.length)
            return copy_spans(spans, np.frombuffer(swept, dtype=np.uint8), memory, lambda: self.is_expelled)
        for views in windows(memory, ranges.start, ranges.length):
            if self.is_expelled or not receive_all(sock, views):
                return False
        return True

    def _account_for(self, header: PartHeader) -> None:
        """With the last part of a batch the batch is announced."""
        with self.lock:
            arrival = self.arrivals.setdefault(header.ticket, Arrival(header.num_parts))
            arrival.num_left -= 1
            arrival.num_bytes += header.num_bytes
            if arrival.num_left > 0:
                return
            del self.arrivals[header.ticket]
        self.mailbox.put(Landed(self.peer, header.tag, arrival.num_bytes))

    def _say(self, sock: socket.socket, word: bytes) -> None:
        """Sends a few bytes, which waits only for a source that has stopped listening."""
        while word and not self.is_expelled:
            try:
                word = word[sock.send(word, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                poller = select.poll()
                poller.register(sock, select.POLLOUT)
                poller.poll(LOOK_MS)


def _wake(receivers: list[Receiver]) -> None:
    """Makes blocked reads return; goodbye can still be said."""
    for receiver in receivers:
        with suppress(OSError):
            receiver.sock.shutdown(socket.SHUT_RD)
