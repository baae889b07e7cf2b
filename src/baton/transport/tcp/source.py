"""The source's half: streams that each send parts on a thread of their own.

Threads. Senders block in sendmsg. The watcher's thread reads the target's replies, checks the deadlines, and
is the only one that ends a connection: it shuts the sockets down, waits until no sender reads source memory
any more, and then ends the tickets. A batch whose bytes may be in flight ends as FailedUnknown, unless the
target said goodbye, which it does after it has stopped all writing.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from baton.errors import RemoteProtocolError, TransportError
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
from baton.transport.common.handshake import CONNECT_PROBE, introduce
from baton.transport.common.listener import receive_exactly, stream_socket
from baton.transport.common.spans import coalesce, copy_spans, join_ranges, split
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import CANCELLED, SubmittedBatch, Tickets
from baton.transport.tcp.wire import (
    PART_SPANS_MAX,
    PartHeader,
    acknowledged_bytes,
    is_scattered,
    read_replies,
    send_all,
    views_by_call,
)

PART_BYTES_MIN = 1 << 20
PART_BYTES_MAX = 16 << 20
RECEIVE_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class SentBatch:
    """A batch that was cut into parts, and how many of them are neither acknowledged nor dropped."""

    job: SubmittedBatch
    num_left: int
    is_on_wire: bool = False
    is_cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one stream sends at a time."""

    batch: SentBatch
    spans: Spans


def make_parts(job: SubmittedBatch, num_streams: int) -> list[Part]:
    """A batch in parts that keep all streams busy; an empty batch is one part, which the target checks."""
    spans = coalesce(job.batch.spans)
    share = -(-spans.num_bytes // num_streams)
    part_bytes = min(max(share, PART_BYTES_MIN), PART_BYTES_MAX)
    parts = list(split(spans, part_bytes, PART_SPANS_MAX)) or [spans]
    batch = SentBatch(job, len(parts))
    return [Part(batch, part) for part in parts]


def send_part(sock: socket.socket, part: Part) -> None:
    job, spans = part.batch.job, part.spans
    table = np.stack(join_ranges(spans.target, spans.length), axis=1).astype("<i8", copy=False)
    header = PartHeader(
        region=job.batch.target.number,
        ticket=job.ticket.number,
        num_spans=len(table),
        num_bytes=spans.num_bytes,
    )
    front = [memoryview(header.to_bytes()), memoryview(table.tobytes())]
    for views in _payload(spans, job.source):
        send_all(sock, front + views)
        front = []
    if front:
        send_all(sock, front)


def _payload(spans: Spans, source: Bytes) -> Iterator[list[memoryview]]:
    """The bytes of a part, one list for each system call; very short spans are gathered first."""
    start, length = join_ranges(spans.source, spans.length)
    if is_scattered(length):
        gathered = np.empty(int(length.sum()), dtype=np.uint8)
        copy_spans(Spans(start, np.cumsum(length) - length, length), source, gathered, lambda: False)
        source, start, length = gathered, start[:1] * 0, np.array([len(gathered)])
    yield from views_by_call(source, start, length)


class SendQueue:
    """Jobs and parts in the order in which they are to be sent."""

    def __init__(self) -> None:
        self._items: deque[SubmittedBatch | Part] = deque()
        self._changed = threading.Condition()
        self._is_open = True

    def put(self, job: SubmittedBatch) -> None:
        with self._changed:
            self._items.append(job)
            self._changed.notify()

    def put_first(self, parts: list[Part]) -> None:
        with self._changed:
            self._items.extendleft(reversed(parts))
            self._changed.notify(len(parts))

    def take(self) -> SubmittedBatch | Part | None:
        """Waits for the next item; None once closed."""
        with self._changed:
            while self._is_open and not self._items:
                self._changed.wait()
            return self._items.popleft() if self._is_open else None

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._items.clear()
            self._changed.notify_all()


@dataclass(slots=True, eq=False)
class SendStream:
    """One socket, the thread that sends on it, and what it has in flight."""

    index: int
    sock: socket.socket
    address: tuple[str, int]
    """Of the target."""
    thread: threading.Thread = field(default_factory=threading.Thread)
    received: bytearray = field(default_factory=bytearray)
    in_flight: list[SentBatch] = field(default_factory=list)
    """The batch of each part that was begun and is not acknowledged, in order."""
    acknowledged_bytes: int = 0


class TcpConnection:
    """The connection to one target."""

    def __init__(self, peer: Peer, tickets: Tickets, watcher: Watcher) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.queue = SendQueue()
        self.batches: dict[int, SentBatch] = {}
        self.lock = threading.Lock()
        self.streams: list[SendStream] = []
        self.are_started = threading.Event()
        self.progress_s = 0.0
        self.lost = ""

    def open(self, description: Description, num_streams: int) -> None:
        """Starts a thread per stream, which connects first."""
        for index in range(num_streams):
            stream = SendStream(index, *stream_socket(description.address))
            name = f"tcp-source-{self.peer.number}-{index}"
            stream.thread = threading.Thread(
                target=self._run, args=(stream, description), name=name, daemon=True
            )
            self.streams.append(stream)
        for stream in self.streams:
            stream.thread.start()
        self.are_started.set()

    def put(self, job: SubmittedBatch) -> None:
        """Queues a batch; a sender thread cuts it into parts."""
        job.progress_s = time.monotonic()
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
            return
        self.queue.put(job)
        self.watcher.start_timer(self._tick)

    def close(self, cause: str) -> None:
        """Ends the connection; bytes in flight may still arrive."""
        self.watcher.call(partial(self._lose, cause))

    def _run(self, stream: SendStream, description: Description) -> None:
        """The thread of a sender."""
        self.are_started.wait()  # `_lose` joins all of the threads
        try:
            self._connect(stream, description)
        except (OSError, TransportError) as cause:
            self.watcher.post(partial(self._lose, f"cannot connect to {description.address}: {cause}"))
            return
        try:
            while (item := self.queue.take()) is not None:
                part = self._next_part(item)
                if part is not None:
                    part.batch.is_on_wire = True
                    stream.in_flight.append(part.batch)
                    send_part(stream.sock, part)
        except OSError as cause:
            self.watcher.post(partial(self._on_send_error, stream, f"the connection was lost: {cause}"))

    def _connect(self, stream: SendStream, description: Description) -> None:
        if self.lost:
            raise TransportError(self.lost)
        sock = stream.sock
        sock.settimeout(HANDSHAKE_S)
        sock.connect(stream.address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(CONNECT_PROBE)
        introduce(description, stream.index, sock.sendall, lambda num: receive_exactly(sock, num) or b"")
        sock.settimeout(None)
        self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._receive(stream))

    def _next_part(self, item: SubmittedBatch | Part) -> Part | None:
        """The part to send for an item of the queue, if any."""
        if isinstance(item, SubmittedBatch):
            if not self.tickets.begin(item):
                return None
            item, *others = make_parts(item, len(self.streams))
            with self.lock:
                self.batches[item.batch.job.ticket.number] = item.batch
            self.queue.put_first(others)
        if item.batch.job.is_cancelled:
            item.batch.is_cut_short = True
            self._finish_part(item.batch)
            return None
        return item

    def _finish_part(self, batch: SentBatch) -> None:
        """Counts a part that was acknowledged or dropped; the last one ends the ticket."""
        with self.lock:
            batch.num_left -= 1
            if batch.num_left:
                return
            self.batches.pop(batch.job.ticket.number, None)
        ticket = batch.job.ticket
        self.tickets.end(batch.job, FailedQuiet(ticket, CANCELLED) if batch.is_cut_short else Done(ticket))

    def _receive(self, stream: SendStream) -> None:
        """On the watcher's thread: reads the target's replies."""
        try:
            raw = stream.sock.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as cause:
            self._lose(f"the connection was lost: {cause}")
            return
        stream.received += raw
        try:
            for reply in read_replies(stream.received):
                self._on_reply(stream, reply)
        except RemoteProtocolError as cause:
            self._lose(str(cause))
        if not raw:
            self._lose("the target hung up")

    def _on_reply(self, stream: SendStream, reply: int | str) -> None:
        if isinstance(reply, str):
            self._lose(reply, is_quiet=True)
            return
        if not stream.in_flight or stream.in_flight[0].job.ticket.number != reply:
            raise RemoteProtocolError(f"the target acknowledged ticket {reply} out of order")
        self._note_progress(stream)
        self._finish_part(stream.in_flight.pop(0))

    def _note_progress(self, stream: SendStream) -> None:
        self.progress_s = time.monotonic()
        for batch in stream.in_flight:
            batch.job.progress_s = self.progress_s

    def _on_send_error(self, stream: SendStream, cause: str) -> None:
        """On the watcher's thread: a sender failed; the target may have said why."""
        if not self.lost:
            self._receive(stream)
        self._lose(cause)

    def _tick(self) -> None:
        """On the watcher's thread: fails what made no progress until its deadline."""
        self.watcher.stop_timer(self._tick)  # first, so that a job put in the meantime starts it again
        if self.lost:
            return
        try:
            for stream in self.streams:
                # A stream whose target's kernel takes bytes makes progress, however long the part.
                num_bytes = acknowledged_bytes(stream.sock) if stream.in_flight else stream.acknowledged_bytes
                if num_bytes != stream.acknowledged_bytes:
                    stream.acknowledged_bytes = num_bytes
                    self._note_progress(stream)
        except OSError as error:
            self._lose(f"the connection was lost: {error}")
            return
        now_s = time.monotonic()
        is_busy = False
        for job in self.tickets.unended(self.peer):
            if not job.progress_s:
                continue
            is_busy = True
            cause = f"no progress for {job.deadline_s} s"
            if job.ticket.number in self.batches:
                if job.is_overdue(now_s):
                    self._lose(cause)
            elif job.is_overdue(now_s, self.progress_s):
                self.tickets.end_waiting(job, cause)
        if is_busy and not self.lost:
            self.watcher.start_timer(self._tick)

    def _lose(self, cause: str, *, is_quiet: bool = False) -> None:
        """On the watcher's thread: ends the connection and everything on it."""
        if self.lost:
            return
        self.lost = cause
        self.queue.close()
        for stream in self.streams:
            with suppress(OSError):
                stream.sock.shutdown(socket.SHUT_RDWR)
        for stream in self.streams:
            stream.thread.join()
        for stream in self.streams:
            self.watcher.unwatch(stream.sock.fileno())
            stream.sock.close()
        batches, self.batches = self.batches, {}
        for batch in batches.values():
            ticket, is_known = batch.job.ticket, is_quiet or not batch.is_on_wire
            completion: Completion = FailedQuiet(ticket, cause) if is_known else FailedUnknown(ticket, cause)
            self.tickets.end(batch.job, completion)
        self.tickets.end_all_waiting(self.peer, cause)
