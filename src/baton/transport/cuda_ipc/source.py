"""The source's half: maps the target's regions and has streams copy into them.

Three threads meet here. The connection's worker maps regions and starts copies, part by part. The completer
waits for the event behind each part, in their order, and ends tickets; the worker does that itself for a
short batch that is alone. The watcher checks the deadlines while a batch is in flight.

A batch that is given up ends as FailedQuiet when the parts of it that were started are complete: they cannot
be taken back from a stream. It ends as FailedUnknown if the device fails or shows no progress for the
deadline; after a failed device this source never says that it left.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.errors import RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Completion, Description, Done, FailedQuiet, FailedUnknown, Peer
from baton.transport.common.connection import CHECK_S
from baton.transport.common.regions import Memory
from baton.transport.common.spans import coalesce, split
from baton.transport.common.threads import Watcher, WorkerThread
from baton.transport.common.tickets import CANCELLED, SubmittedBatch, Tickets
from baton.transport.common.unix import MessageKind, UnixConnection
from baton.transport.fences import CudaEvent

log = logging.getLogger(__name__)

PART_BYTES = 64 << 20
PART_SPANS = 4096
IN_FLIGHT_BYTES_MAX = 256 << 20
"""Started and not complete: what a source that is asked to leave has to wait for."""


@dataclass(frozen=True, slots=True)
class ExportedRegion:
    """What another process needs to map a region."""

    handle: str
    """Names the allocation, in the format of the device memory."""
    offset: int
    """Of the region in the allocation."""
    num_bytes: int


class CopyStream(Protocol):
    """Copies in order, from one device. A failing device raises RuntimeError."""

    def map(self, handle: str) -> int:
        """The address of another process's allocation; raises TransportError if it cannot be mapped."""

    def wait(self, event: CudaEvent) -> None:
        """Makes what follows wait for an event."""

    def copy(self, spans: Spans, source: int, target: int) -> None:
        """Starts to copy spans between two addresses."""

    def record(self, *, is_blocking: bool) -> CudaEvent:
        """An event after everything so far; waiting for it sleeps if `is_blocking`, else spins."""

    def close(self) -> None:
        """Unmaps everything; nothing is in flight."""


class DeviceMemory(Protocol):
    """The memory that regions are in."""

    def export(self, memory: Memory) -> ExportedRegion:
        """Raises TransportError if another process cannot map this memory."""

    def device_of(self, memory: Memory) -> str: ...

    def open_stream(self, memory: Memory) -> CopyStream:
        """A stream of its own on the device of this memory."""


SHORT_BYTES = 16 << 20
"""What is copied before a sleeping thread would wake up."""


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that has begun."""

    job: SubmittedBatch
    fence: CudaEvent | None
    is_started: bool = False
    """Whether anything was given to a stream."""

    def is_waiting_for_fence(self) -> bool:
        try:
            return self.fence is not None and not self.fence.query()
        except RuntimeError:
            return False  # the device failed


def _run(action: Callable[[], None]) -> None:
    action()


class CudaIpcConnection(UnixConnection):
    """The connection to one target."""

    def __init__(
        self,
        peer: Peer,
        description: Description,
        tickets: Tickets,
        watcher: Watcher,
        device_memory: DeviceMemory,
    ) -> None:
        self._device_memory = device_memory
        self._streams: dict[str, CopyStream] = {}
        self._mapped: dict[tuple[str, int], tuple[int, int]] = {}
        """By device of the source and region of the target: its address here, and its size."""
        self._changed = threading.Condition()
        self._flights: set[InFlightBatch] = set()
        self._in_flight_bytes = 0
        self._progress_s = 0.0
        self._failure = ""
        """Why the device failed: what it was given may still be written."""
        self._completer: WorkerThread | None = WorkerThread(f"cuda_ipc-completer-{peer.number}")
        super().__init__(peer, description, tickets, watcher)  # starts the worker

    def on_lost(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def unmap(self) -> bool:
        """Waits for the streams to run dry; the worker starts nothing more, as the connection is lost."""
        if self._completer is not None:
            self._completer.close()
            self._completer = None
        if self._failure:
            return False
        self._mapped.clear()
        while self._streams:
            _, stream = self._streams.popitem()
            stream.close()
        return True

    def carry(self, job: SubmittedBatch, event: CudaEvent | None) -> None:
        flight = InFlightBatch(job, event)
        with self._changed:
            job.progress_s = self._progress_s = time.monotonic()
            self._flights.add(flight)
            self.watcher.start_timer(self._tick)
        run = self._runner(flight)
        try:
            cause = self._start(flight, run)
        except TimeoutError as error:
            cause = str(error)
        except OSError as error:
            self.lose(f"the target is gone: {error}")
            cause = self.lost
        except (TransportError, RemoteProtocolError) as error:
            cause = str(error)
        except RuntimeError as error:  # what torch raises if the device fails
            cause = self._fail(str(error))
        run(partial(self._end, flight, cause))

    def _runner(self, flight: InFlightBatch) -> Callable[[Callable[[], None]], None]:
        """Where the ends of parts are waited for: here if a batch is short, ready and alone.

        The completer would take longer to wake up than such a batch takes to be copied.
        """
        assert self._completer is not None, "nothing begins once the connection is lost"
        is_short = flight.job.batch.spans.num_bytes <= SHORT_BYTES
        if is_short and len(self._flights) == 1 and not flight.is_waiting_for_fence():
            return _run
        return self._completer.put

    def _start(self, flight: InFlightBatch, run: Callable[[Callable[[], None]], None]) -> str:
        """Gives a batch to the stream, part by part; returns why it was given up, or nothing."""
        job, spans = flight.job, flight.job.batch.spans
        source = self.tickets.regions.find(job.batch.source.number)
        assert source is not None, "a job that began keeps its region"
        device = self._device_memory.device_of(source)
        if device not in self._streams:
            self._streams[device] = self._device_memory.open_stream(source)
        stream = self._streams[device]
        target = self._map(job, device, stream)
        if flight.fence is not None:
            stream.wait(flight.fence)
        for part in split(coalesce(spans), PART_BYTES, PART_SPANS):
            num_bytes = part.num_bytes
            if cause := self._wait_for_room(job, num_bytes):
                return cause
            flight.is_started = True
            stream.copy(part, source.address, target)
            event = stream.record(is_blocking=num_bytes > SHORT_BYTES)
            run(partial(self._complete, flight, event, num_bytes))
        return ""

    def _map(self, job: SubmittedBatch, device: str, stream: CopyStream) -> int:
        """The address of the target's region, which is mapped when it is first needed."""
        region = job.batch.target
        if (device, region.number) not in self._mapped:
            message, _ = self.ask(region.number, job.deadline_s)
            if message.kind is not MessageKind.MAPPED:
                raise RemoteProtocolError(f"a target answers with a region; got {message.kind.name}")
            offset, num_bytes, _, _ = message.numbers
            self._mapped[device, region.number] = stream.map(message.text) + offset, num_bytes
        address, num_bytes = self._mapped[device, region.number]
        if region.num_bytes > num_bytes:  # `submit` checked the spans up to `region.num_bytes`
            raise TransportError(f"region {region.number} has {num_bytes} bytes")
        return address

    def _wait_for_room(self, job: SubmittedBatch, num_bytes: int) -> str:
        """Waits until little enough is in flight; returns why the batch is given up, or nothing."""
        with self._changed:
            while self._in_flight_bytes and self._in_flight_bytes + num_bytes > IN_FLIGHT_BYTES_MAX:
                if self.is_stopped(job):
                    break
                self._changed.wait(CHECK_S)
            if job.is_cancelled:
                return CANCELLED
            if not self.lost:
                self._in_flight_bytes += num_bytes
            return self.lost

    def _complete(self, flight: InFlightBatch, event: CudaEvent, num_bytes: int) -> None:
        """Waits until a part is copied."""
        try:
            if flight.is_waiting_for_fence() and flight.fence is not None:
                flight.fence.synchronize()  # sleeps; the event may spin
            event.synchronize()
        except RuntimeError as error:
            self._fail(str(error))
        with self._changed:
            flight.job.progress_s = self._progress_s = time.monotonic()
            self._in_flight_bytes -= num_bytes
            self._changed.notify_all()

    def _end(self, flight: InFlightBatch, cause: str) -> None:
        """All parts that were started are complete."""
        job = flight.job
        completion: Completion = Done(job.ticket)
        if self._failure and flight.is_started:
            completion = FailedUnknown(job.ticket, self._failure)
        elif cause:
            completion = FailedQuiet(job.ticket, cause)
        self.tickets.end(job, completion)
        with self._changed:
            self._flights.discard(flight)

    def _fail(self, cause: str) -> str:
        self._failure = self._failure or f"the device failed: {cause}"
        log.error("%s; the target cannot be notified that this source left", self._failure)
        self.lose(self._failure)
        return self._failure

    def _tick(self) -> None:
        """On the watcher's thread, while a batch is in flight: gives up on overdue ones."""
        now_s = time.monotonic()
        with self._changed:
            flights = list(self._flights)
            if not flights:
                self.watcher.stop_timer(self._tick)
        if any(flight.is_waiting_for_fence() for flight in flights):
            self._progress_s = now_s  # neither the device nor the target is to blame
        for flight in flights:
            if flight.is_started and flight.job.is_overdue(now_s, self._progress_s):
                cause = f"no progress of the device for {flight.job.deadline_s} s"
                self.tickets.end(flight.job, FailedUnknown(flight.job.ticket, cause))
        self.tickets.end_overdue(self.peer, now_s, self._progress_s)
