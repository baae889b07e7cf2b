"""The source's half: streams that each send parts on a thread of their own, and one verdict on all of them.

Threads. Senders block in sendmsg. The watcher's thread reads what the target says, keeps the deadlines, and
is the only one that gives a connection up: it shuts the sockets, waits until no sender reads source memory
any more, and then says how each batch ended. A batch of which bytes may be under way is FailedUnknown, unless
the target said goodbye, which it does after it has stopped all writing.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import (
    DEADLINE_S,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
)
from baton.transport.parts.proof import CHALLENGE_BYTES, KNOCK, WELCOME_BYTES, is_welcome, make_hello
from baton.transport.parts.tickets import CANCELLED, Job, Tickets
from baton.transport.parts.watcher import Watcher
from baton.transport.tcp.frames import read_words
from baton.transport.tcp.parcels import Delivery, Parcels, Part, make_parts, send_part
from baton.transport.tcp.wire import acknowledged_bytes, receive_exactly

HEARD_BYTES_MAX = 1 << 16


@dataclass(slots=True, eq=False)
class Stream:
    """One socket, the thread that sends on it, and what is under way."""

    index: int
    sock: socket.socket
    thread: threading.Thread = field(default_factory=threading.Thread)
    heard: bytearray = field(default_factory=bytearray)
    under_way: list[Delivery] = field(default_factory=list)
    """Of the parts that were begun and not acknowledged, in order."""
    acknowledged_bytes: int = 0


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of a target."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise TransportError(f"'{address}' is not host:port")
    return host, int(port)


class Source:
    """The connection to one target."""

    def __init__(self, peer: Peer, tickets: Tickets, watcher: Watcher) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.parcels = Parcels()
        self.deliveries: dict[int, Delivery] = {}
        self.lock = threading.Lock()
        self.streams: list[Stream] = []
        self.are_started = threading.Event()
        self.progress_s = 0.0
        self.lost = ""

    def open(self, description: Description, num_streams: int) -> None:
        """Starts a thread per stream, each of which connects first."""
        host, _ = parse_address(description.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for index in range(num_streams):
            stream = Stream(index, socket.socket(family, socket.SOCK_STREAM))
            name = f"tcp-source-{self.peer.number}-{index}"
            stream.thread = threading.Thread(
                target=self._run, args=(stream, description), name=name, daemon=True
            )
            self.streams.append(stream)
        for stream in self.streams:
            stream.thread.start()
        self.are_started.set()

    def put(self, job: Job) -> None:
        """Queues a batch; cutting it up is left to a sender."""
        job.progress_s = time.monotonic()
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
            return
        self.parcels.put(job)
        self.watcher.start_clock(self._tick)

    def close(self, cause: str) -> None:
        """Ends the connection; what is under way may still arrive."""
        self.watcher.call(partial(self._lose, cause))

    def _run(self, stream: Stream, description: Description) -> None:
        """A sender's life."""
        self.are_started.wait()  # who gives the connection up joins them all
        try:
            self._connect(stream, description)
        except (OSError, TransportError) as cause:
            self.watcher.post(partial(self._lose, f"cannot connect to {description.address}: {cause}"))
            return
        try:
            while (item := self.parcels.take()) is not None:
                part = self._part_of(item)
                if part is not None:
                    part.delivery.is_on_wire = True
                    stream.under_way.append(part.delivery)
                    send_part(stream.sock, part)
        except OSError as cause:
            self.watcher.post(partial(self._hear_last, stream, f"the connection was lost: {cause}"))

    def _connect(self, stream: Stream, description: Description) -> None:
        if self.lost:
            raise TransportError(self.lost)
        sock = stream.sock
        sock.settimeout(DEADLINE_S)
        sock.connect(parse_address(description.address))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(KNOCK)
        challenge = receive_exactly(sock, CHALLENGE_BYTES)
        hello = make_hello(description, stream.index, bytes(challenge or b""))
        sock.sendall(hello)
        welcome = receive_exactly(sock, WELCOME_BYTES)
        if challenge is None or not is_welcome(bytes(welcome or b""), description, hello, bytes(challenge)):
            raise TransportError("it did not accept this invitation")
        sock.settimeout(None)
        self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._hear(stream))

    def _part_of(self, item: Job | Part) -> Part | None:
        """What to send for an item of the queue, if anything."""
        if isinstance(item, Job):
            if not self.tickets.begin(item):
                return None
            item, *others = make_parts(item, len(self.streams))
            with self.lock:
                self.deliveries[item.delivery.job.ticket.number] = item.delivery
            self.parcels.put_first(others)
        if item.delivery.job.is_cancelled:
            item.delivery.is_cut_short = True
            self._account_for(item.delivery)
            return None
        return item

    def _account_for(self, delivery: Delivery) -> None:
        """One part less to wait for; with the last one the batch is over."""
        with self.lock:
            delivery.num_left -= 1
            if delivery.num_left:
                return
            self.deliveries.pop(delivery.job.ticket.number, None)
        ticket = delivery.job.ticket
        self.tickets.end(
            delivery.job, FailedQuiet(ticket, CANCELLED) if delivery.is_cut_short else Done(ticket)
        )

    def _hear(self, stream: Stream) -> None:
        """On the watcher's thread: what the target says."""
        try:
            raw = stream.sock.recv(HEARD_BYTES_MAX, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as cause:
            self._lose(f"the connection was lost: {cause}")
            return
        stream.heard += raw
        try:
            for word in read_words(stream.heard):
                self._obey(stream, word)
        except RemoteProtocolError as cause:
            self._lose(str(cause))
        if not raw:
            self._lose("the target hung up")

    def _obey(self, stream: Stream, word: int | str) -> None:
        if isinstance(word, str):
            self._lose(word, is_quiet=True)
            return
        if not stream.under_way or stream.under_way[0].job.ticket.number != word:
            raise RemoteProtocolError(f"the target acknowledged ticket {word} out of turn")
        self._note_progress(stream)
        self._account_for(stream.under_way.pop(0))

    def _note_progress(self, stream: Stream) -> None:
        self.progress_s = time.monotonic()
        for delivery in stream.under_way:
            delivery.job.progress_s = self.progress_s

    def _look_for_progress(self) -> None:
        """A stream whose target's kernel takes bytes is alive, though a part be long and the link slow."""
        for stream in self.streams:
            if stream.under_way:
                num_bytes = acknowledged_bytes(stream.sock)
                if num_bytes != stream.acknowledged_bytes:
                    stream.acknowledged_bytes = num_bytes
                    self._note_progress(stream)

    def _hear_last(self, stream: Stream, cause: str) -> None:
        """On the watcher's thread: a sender failed; the target may have said why."""
        if not self.lost:
            self._hear(stream)
        self._lose(cause)

    def _tick(self) -> None:
        """On the watcher's thread: fails what has gone without progress for too long."""
        self.watcher.stop_clock(self._tick)  # before looking, so that a job put meanwhile starts it again
        if self.lost:
            return
        self._look_for_progress()
        now_s = time.monotonic()
        is_busy = False
        for job in self.tickets.unended(self.peer):
            if not job.progress_s:
                continue
            is_busy = True
            cause = f"no progress for {job.deadline_s} s"
            if job.ticket.number in self.deliveries:
                if now_s > job.progress_s + job.deadline_s:
                    self._lose(cause)
            elif now_s > max(job.progress_s, self.progress_s) + job.deadline_s:
                self.tickets.end_waiting(job, cause)
        if is_busy and not self.lost:
            self.watcher.start_clock(self._tick)

    def _lose(self, cause: str, *, is_quiet: bool = False) -> None:
        """On the watcher's thread: ends the connection and everything on it."""
        if self.lost:
            return
        self.lost = cause
        self.parcels.close()
        for stream in self.streams:
            with suppress(OSError):
                stream.sock.shutdown(socket.SHUT_RDWR)
        for stream in self.streams:
            stream.thread.join()
        for stream in self.streams:
            self.watcher.unwatch(stream.sock.fileno())
            stream.sock.close()
        deliveries, self.deliveries = self.deliveries, {}
        for delivery in deliveries.values():
            is_known = is_quiet or not delivery.is_on_wire
            ticket = delivery.job.ticket
            completion: Completion = FailedQuiet(ticket, cause) if is_known else FailedUnknown(ticket, cause)
            self.tickets.end(delivery.job, completion)
        for job in self.tickets.unended(self.peer):
            self.tickets.end_waiting(job, cause)
