"""The source's half: one thread per target, which posts parcels to the library and looks how they fare.

A batch that failed with a parcel under way is FailedUnknown: the library's instance is closed by then and
reads no memory, but what it sent before may still arrive. Its connection ends with it; only a refusal and a
cancellation, which wait for what is under way, leave the connection as it is.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

from baton.errors import RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import (
    DEADLINE_S,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Peer,
)
from baton.transport.parts.foreign.frames import HEADER_BYTES, Header, Kind, frame
from baton.transport.parts.foreign.kernels import this_kernel
from baton.transport.parts.foreign.library import Library, Limits, Outlet
from baton.transport.parts.lanes import Lane
from baton.transport.parts.proof import CHALLENGE_BYTES, KNOCK, WELCOME_BYTES, is_welcome, make_hello
from baton.transport.parts.spans import are_inside, coalesce, cut, split
from baton.transport.parts.tickets import CANCELLED, Job, Tickets
from baton.transport.parts.watcher import Watcher

LOOK_S = 0.05
"""How often a thread that waits looks whether tickets in its queue are overdue."""
NAP_S = 50e-6
NUM_EAGER_LOOKS = 20
"""Looks without a nap between them: a small write is there before a nap would be over."""


class RefusedError(TransportError):
    """The target does not let this batch in; the connection is none the worse for it."""


class Source:
    """The connection to one target."""

    def __init__(self, peer: Peer, tickets: Tickets, watcher: Watcher, library: Library) -> None:
        self.peer = peer
        self.tickets = tickets
        self.watcher = watcher
        self.library = library
        self.lane = Lane(f"foreign-source-{peer.number}")
        self.sock: socket.socket | None = None
        self.outlet: Outlet | None = None
        self.regions: dict[int, int] = {}
        self.progress_s = 0.0
        self.lost = ""

    def open(self, description: Description) -> None:
        """Begins to connect."""
        self.lane.put(partial(self._connect, description))

    def put(self, job: Job) -> None:
        """Queues a batch."""
        job.progress_s = time.monotonic()
        self.lane.put(partial(self._carry, job))

    def forget(self, number: int) -> None:
        """Lets go of a region of this side, some time."""
        self.lane.put(partial(self._forget, number))

    def close(self, cause: str) -> None:
        """Gives up what is under way, closes the library's instance, and hangs up."""
        self.lost = self.lost or cause
        self.lane.put(self._leave)
        self.lane.close()

    def _connect(self, description: Description) -> None:
        host, _, port = description.address.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = self.sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            self._reach(sock, (host.strip("[]"), int(port)))
            self._send(sock, KNOCK, DEADLINE_S)
            challenge = self._receive(sock, CHALLENGE_BYTES, DEADLINE_S)
            hello = make_hello(description, 0, challenge)
            self._send(sock, hello, DEADLINE_S)
            welcome = self._receive(sock, WELCOME_BYTES, DEADLINE_S)
            if not is_welcome(welcome, description, hello, challenge):
                raise TransportError("it did not accept this invitation")
            self.outlet = self.library.open_outlet(f"source-{os.getpid()}-{self.peer.number}")
        except (OSError, TransportError) as cause:
            self._lose(f"cannot connect to {description.address}: {cause}")
            self._leave()
            return
        self.watcher.watch(sock.fileno(), select.EPOLLRDHUP, self._hear_hangup)

    def _reach(self, sock: socket.socket, address: tuple[str, int]) -> None:
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._wait_for_socket(sock, select.POLLOUT, time.monotonic() + DEADLINE_S)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _hear_hangup(self, mask: int) -> None:
        """On the watcher's thread: the target died, or wants this source to leave."""
        self._unwatch()
        self._lose("the target hung up")
        self.lane.put(self._leave)

    def _unwatch(self) -> None:
        if self.sock is not None:
            self.watcher.unwatch(self.sock.fileno())

    def _lose(self, cause: str) -> None:
        self.lost = self.lost or cause
        for job in self.tickets.unended(self.peer):
            self.tickets.end_waiting(job, self.lost)

    def _leave(self) -> None:
        """Hangs up last: to the target that means that nothing here writes any more."""
        if self.outlet is not None:
            self.outlet.close()
            self.outlet = None
        if self.sock is not None:
            self.watcher.call(self._unwatch)
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()
            self.sock = None

    def _forget(self, number: int) -> None:
        if self.outlet is not None:
            self.outlet.forget(number)

    def _carry(self, job: Job) -> None:
        if self.lost:
            self.tickets.end_waiting(job, self.lost)
        elif self.tickets.begin(job):
            completion: Completion = FailedUnknown(job.ticket, "the copy crashed; see the log")
            try:
                completion = self._move(job)
            finally:
                self.tickets.end(job, completion)
            if isinstance(completion, Done):
                self._announce(job)

    def _announce(self, job: Job) -> None:
        """Tells the target, after the source's own caller: waking the other process takes a while."""
        assert self.sock is not None
        landed = frame(Kind.LANDED, job.batch.tag, job.batch.spans.num_bytes)
        try:
            self._send(self.sock, landed, job.deadline_s)
        except (OSError, TransportError) as cause:
            self._lose(f"the target is gone: {cause}")
            self._leave()

    def _move(self, job: Job) -> Completion:
        flying: deque[object] = deque()
        assert self.sock is not None
        assert self.outlet is not None
        try:
            self._prepare(job, self.sock, self.outlet)
            is_whole = self._fly(job, self.outlet, flying)
        except RefusedError as cause:
            return FailedQuiet(job.ticket, str(cause))
        except (OSError, TransportError, RemoteProtocolError) as cause:
            self._lose(str(cause))
            self._leave()
            failed = FailedUnknown if flying else FailedQuiet
            return failed(job.ticket, self.lost)
        return Done(job.ticket) if is_whole else FailedQuiet(job.ticket, CANCELLED)

    def _prepare(self, job: Job, sock: socket.socket, outlet: Outlet) -> None:
        """Makes both regions known to the library, and checks the batch against the target's true size."""
        source, target, spans = job.batch.source, job.batch.target, job.batch.spans
        if target.number not in self.regions:
            self._ask(job, sock, outlet)
        num_bytes = self.regions[target.number]
        # What was submitted was checked against the size that the caller believes in.
        if target.num_bytes > num_bytes and not are_inside(spans.target, spans.length, num_bytes):
            raise RefusedError(f"a span lies outside of region {target.number}")
        memory = self.tickets.regions.memory(source.number)
        assert memory is not None, "a job keeps its region registered"
        outlet.load(source.number, memory)

    def _ask(self, job: Job, sock: socket.socket, outlet: Outlet) -> None:
        number = job.batch.target.number
        self._send(sock, frame(Kind.ASK, number, payload=this_kernel()), job.deadline_s)
        header = Header.from_bytes(self._receive(sock, HEADER_BYTES, job.deadline_s))
        payload = self._receive(sock, header.payload_bytes, job.deadline_s)
        if header.kind is Kind.REFUSED:
            raise RefusedError(f"region {number} was refused: {payload.decode(errors='replace')}")
        if header.kind is not Kind.GIVEN or header.first != number:
            raise RemoteProtocolError(f"a target does not answer {header}")
        token = outlet.aim(number, payload)
        self._wait_for_library(job, partial(outlet.is_done, token))
        self.regions[number] = header.second

    def _fly(self, job: Job, outlet: Outlet, flying: deque[object]) -> bool:
        """Posts the parcels of a batch and waits for all that were posted; false if it was cancelled."""
        batch, limits = job.batch, self.library.limits
        is_whole = True
        for parcel in _parcels(batch.spans, limits):
            if len(flying) >= limits.num_parcels:
                self._wait_for_parcel(job, outlet, flying)
            if self.lost:
                raise TransportError(self.lost)
            if job.is_cancelled:
                is_whole = False
                break
            flying.append(None)  # should the post itself fail, the parcel counts as under way
            flying[-1] = outlet.post(batch.source.number, batch.target.number, parcel)
        while flying:
            self._wait_for_parcel(job, outlet, flying)
        return is_whole

    def _wait_for_parcel(self, job: Job, outlet: Outlet, flying: deque[object]) -> None:
        self._wait_for_library(job, partial(outlet.is_done, flying[0]))
        flying.popleft()

    def _wait_for_library(self, job: Job, is_done: Callable[[], bool]) -> None:
        """Looks until something is done, which is progress."""
        looked_s = 0.0
        num_looks = 0
        while not is_done():
            num_looks += 1
            time.sleep(0 if num_looks < NUM_EAGER_LOOKS else NAP_S)
            now_s = time.monotonic()
            if self.lost:
                raise TransportError(self.lost)
            if now_s > max(job.progress_s, self.progress_s) + job.deadline_s:
                raise TransportError(f"no progress for {job.deadline_s} s")
            if now_s > looked_s + LOOK_S:
                looked_s = now_s
                self._end_overdue(now_s)
        self.progress_s = time.monotonic()

    def _end_overdue(self, now_s: float) -> None:
        for job in self.tickets.unended(self.peer):
            if job.progress_s and now_s > max(job.progress_s, self.progress_s) + job.deadline_s:
                self.tickets.end_waiting(job, f"no progress on this connection for {job.deadline_s} s")

    def _send(self, sock: socket.socket, raw: bytes, deadline_s: float) -> None:
        limit_s = time.monotonic() + deadline_s
        while raw:
            try:
                raw = raw[sock.send(raw) :]
            except BlockingIOError:
                self._wait_for_socket(sock, select.POLLOUT, limit_s)

    def _receive(self, sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
        limit_s = time.monotonic() + deadline_s
        found = b""
        while len(found) < num_bytes:
            try:
                raw = sock.recv(num_bytes - len(found))
            except BlockingIOError:
                self._wait_for_socket(sock, select.POLLIN, limit_s)
                continue
            if not raw:
                raise ConnectionResetError("the target hung up")
            found += raw
        return found

    def _wait_for_socket(self, sock: socket.socket, mask: int, limit_s: float) -> None:
        poller = select.poll()
        poller.register(sock, mask)
        while not poller.poll(LOOK_S * 1e3):
            now_s = time.monotonic()
            if self.lost:
                raise TransportError(self.lost)
            if now_s > limit_s:
                raise TransportError("the target did not react within the deadline")
            self._end_overdue(now_s)


def _parcels(spans: Spans, limits: Limits) -> Iterator[Spans]:
    pieces = cut(coalesce(spans), limits.piece_bytes)
    if 0 < len(pieces) <= limits.parcel_spans and pieces.num_bytes <= limits.parcel_bytes:
        return iter((pieces,))
    return split(pieces, limits.parcel_bytes, limits.parcel_spans)
