"""The source's half: one thread per target, which posts to the library and polls what it posted.

A batch that failed with a post in flight ends as FailedUnknown: the library's instance is closed by then and
reads no memory, but what it sent before may still arrive. The connection ends with it. Only a refusal, and a
cancellation, which waits for what is in flight, leave the connection open.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import (
    HANDSHAKE_S,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
)
from baton.transport.common.connection import CHECK_S, WorkerConnection
from baton.transport.common.handshake import CONNECT_PROBE, introduce
from baton.transport.common.listener import stream_socket
from baton.transport.common.spans import are_inside, coalesce, cut, split
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import CANCELLED, SubmittedBatch, Tickets
from baton.transport.fences import CudaEvent
from baton.transport.library.base import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Library,
    LibrarySender,
    encode_frame,
    this_kernel,
)

NAP_S = 50e-6
NUM_EAGER_POLLS = 20
"""Polls without a nap in between: a small write is done before a nap would end."""


class RefusedError(TransportError):
    """The target refuses this batch; the connection stays usable."""


class LibraryConnection(WorkerConnection):
    """The connection to one target."""

    def __init__(
        self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher, library: Library
    ) -> None:
        self.library = library
        self.sender: LibrarySender | None = None
        self.region_bytes: dict[int, int] = {}
        """The sizes of the target's regions that were opened."""
        sock, self._address = stream_socket(description.address)
        super().__init__(peer, description, tickets, watcher, sock)  # starts the worker

    def unregister(self, number: int) -> None:
        """Unregisters a region of this side, later."""
        self.worker.put(partial(self._unregister, number))

    def connect(self, description: Description) -> None:
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.retry(partial(self.sock.connect, self._address), select.POLLOUT)
        self._send(CONNECT_PROBE)
        introduce(description, 0, self._send, self._receive)
        self.sender = self.library.open_sender(f"source-{os.getpid()}-{self.peer.number}")

    def leave(self) -> None:
        """Hangs up last: to the target that means that nothing here writes any more."""
        if self.sender is not None:
            self.sender.close()
            self.sender = None
        self.watcher.call(self.unwatch)
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def carry(self, job: SubmittedBatch, event: CudaEvent | None) -> None:
        completion: Completion = FailedUnknown(job.ticket, "the copy crashed; see the log")
        try:
            completion = self._write(job)
        finally:
            self.tickets.end(job, completion)

    def _unregister(self, number: int) -> None:
        if self.sender is not None:
            self.sender.unregister(number)

    def _write(self, job: SubmittedBatch) -> Completion:
        posts: deque[object] = deque()
        assert self.sender is not None
        try:
            self._prepare(job, self.sender)
            is_whole = self._post_all(job, self.sender, posts)
        except RefusedError as cause:
            return FailedQuiet(job.ticket, str(cause))
        except (OSError, TransportError, RemoteProtocolError) as cause:
            self.lose(str(cause))
            self.leave()
            failed = FailedUnknown if posts else FailedQuiet
            return failed(job.ticket, self.lost)
        return Done(job.ticket) if is_whole else FailedQuiet(job.ticket, CANCELLED)

    def _prepare(self, job: SubmittedBatch, sender: LibrarySender) -> None:
        """Registers both regions with the library, and checks the batch against the target's real size."""
        source, target, spans = job.batch.source, job.batch.target, job.batch.spans
        if target.number not in self.region_bytes:
            self._open_region(job, sender)
        num_bytes = self.region_bytes[target.number]
        # `submit` checked the spans against the size that the caller passed.
        if target.num_bytes > num_bytes and not are_inside(spans.target, spans.length, num_bytes):
            raise RefusedError(f"a span lies outside of region {target.number}")
        memory = self.tickets.regions.find(source.number)
        assert memory is not None, "a job keeps its region registered"
        sender.register(source.number, memory)

    def _open_region(self, job: SubmittedBatch, sender: LibrarySender) -> None:
        """Asks the target for access to a region."""
        number = job.batch.target.number
        self._send(encode_frame(FrameKind.ASK, number, payload=this_kernel()), job.deadline_s)
        header = FrameHeader.from_bytes(self._receive(HEADER_BYTES, job.deadline_s))
        payload = self._receive(header.payload_bytes, job.deadline_s)
        if header.kind is FrameKind.REFUSED:
            raise RefusedError(f"region {number} was refused: {payload.decode(errors='replace')}")
        if header.kind is not FrameKind.GIVEN or header.first != number:
            raise RemoteProtocolError(f"unexpected reply of the target: {header}")
        token = sender.open_region(number, payload)
        self._wait_for_library(job, partial(sender.is_done, token))
        self.region_bytes[number] = header.second

    def _post_all(self, job: SubmittedBatch, sender: LibrarySender, posts: deque[object]) -> bool:
        """Posts a batch and waits for everything that was posted; false if it was cancelled."""
        batch, limits = job.batch, self.library.limits
        is_whole = True
        pieces = cut(coalesce(batch.spans), limits.span_bytes_max)
        for spans in split(pieces, limits.post_bytes_max, limits.post_spans_max):
            if len(posts) >= limits.num_posts_max:
                self._wait_for_post(job, sender, posts)
            if self.lost:
                raise TransportError(self.lost)
            if job.is_cancelled:
                is_whole = False
                break
            posts.append(None)  # if the call itself fails, the post counts as in flight
            posts[-1] = sender.post(batch.source.number, batch.target.number, spans)
        while posts:
            self._wait_for_post(job, sender, posts)
        return is_whole

    def _wait_for_post(self, job: SubmittedBatch, sender: LibrarySender, posts: deque[object]) -> None:
        self._wait_for_library(job, partial(sender.is_done, posts[0]))
        posts.popleft()

    def _wait_for_library(self, job: SubmittedBatch, is_done: Callable[[], bool]) -> None:
        """Polls until an operation is done, which counts as progress."""
        checked_s = 0.0
        num_polls = 0
        while not is_done():
            num_polls += 1
            time.sleep(0 if num_polls < NUM_EAGER_POLLS else NAP_S)
            now_s = time.monotonic()
            if self.lost:
                raise TransportError(self.lost)
            if now_s > max(job.progress_s, self.progress_s) + job.deadline_s:
                raise TransportError(f"no progress for {job.deadline_s} s")
            if now_s > checked_s + CHECK_S:
                checked_s = now_s
                self.tickets.end_overdue(self.peer, now_s, self.progress_s)
        self.progress_s = time.monotonic()

    def _send(self, raw: bytes, deadline_s: float = HANDSHAKE_S) -> None:
        while raw:
            raw = raw[self.retry(partial(self.sock.send, raw), select.POLLOUT, deadline_s) :]

    def _receive(self, num_bytes: int, deadline_s: float = HANDSHAKE_S) -> bytes:
        received = b""
        while len(received) < num_bytes:
            missing = num_bytes - len(received)
            raw = self.retry(partial(self.sock.recv, missing), select.POLLIN, deadline_s)
            if not raw:
                raise ConnectionResetError("the target hung up")
            received += raw
        return received
