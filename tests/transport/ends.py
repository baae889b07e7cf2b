"""One end of a connection under test, in this process or in one of its own.

`End` holds an opened transport and offers what the checks need at either side. `RemoteEnd` runs one in a
child process, which can be killed and stopped; calls and answers cross a socket pair as pickles.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from tests.transport.broken import BROKEN
from tests.transport.fork_server import fork_server
from tests.transport.subjects import SUBJECTS

from baton.plan.steps import Spans
from baton.transport import (
    NOW,
    Batch,
    Completion,
    Description,
    Invitation,
    Peer,
    Place,
    Ranges,
    Region,
    RemoteRegion,
    RevokeResult,
    Ticket,
    Transport,
    wait_for_events,
)


def device_tensor(device: int) -> Any:
    """What a transport reads of a tensor on a GPU, without one; its bytes must not be touched."""
    kept = np.zeros(4096, dtype=np.uint8)
    return SimpleNamespace(
        data_ptr=lambda: kept.ctypes.data,
        is_contiguous=lambda: True,
        nbytes=kept.nbytes,
        device=SimpleNamespace(type="cuda", index=device),
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds and has used."""

    num_fds: int
    rss_bytes: int
    cpu_s: float


@dataclass(slots=True)
class End:
    """A transport with the buffers and events of one side of a check."""

    transport: Transport
    regions: dict[int, Region] = field(default_factory=dict)
    buffers: dict[int, Any] = field(default_factory=dict)
    """Arrays, or what looks like one on a device."""
    peers: dict[int, Peer] = field(default_factory=dict)
    waiting: list[Completion] = field(default_factory=list)

    def expose(self, num_bytes: int, fill: int = 0) -> RemoteRegion:
        """A target region, every byte of which is `fill`."""
        if self.is_on_device:
            return self.keep(np.full(num_bytes, fill, dtype=np.uint8)).remote
        buffer = self.transport.allocate(num_bytes)
        buffer[:] = fill
        return self.keep(buffer).remote

    def load(self, num_bytes: int, seed: int) -> Region:
        """A source region with random content."""
        content = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
        return self.keep(content)

    @property
    def is_on_device(self) -> bool:
        return Place.HOST not in self.transport.capabilities.places

    def keep(self, buffer: np.ndarray) -> Region:
        """Registers a buffer, or what a device has of its content."""
        if self.is_on_device:
            from tests.transport.device_array import DeviceArray  # imports torch

            array = DeviceArray(buffer)
            region = self.transport.register(array.tensor)
            self.buffers[region.number] = array
        else:
            region = self.transport.register(buffer)
            self.buffers[region.number] = buffer
        self.regions[region.number] = region
        return region

    def forget(self, number: int) -> None:
        self.transport.unregister(self.regions.pop(number))
        del self.buffers[number]

    def invite(self) -> Invitation:
        return self.transport.invite()

    def grant(self, peer: Peer, number: int, ranges: Ranges | None = None) -> int:
        region = self.regions[number]
        return self.transport.grant(peer, region, ranges or Ranges.whole(region))

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        return self.transport.ungrant(peer, grant)

    def revoke(self, peer: Peer) -> RevokeResult:
        return self.transport.revoke(peer)

    def is_unchecked(self, peer: Peer, number: int) -> bool:
        return self.transport.is_unchecked(peer, self.regions[number])

    def read(self, number: int, start: int = 0, stop: int | None = None) -> bytes:
        return self.buffers[number][start:stop].tobytes()

    def digest(self, number: int) -> str:
        return hashlib.blake2b(np.asarray(self.buffers[number])).hexdigest()

    def connect(self, description: Description) -> Peer:
        return self.transport.connect(description)

    def send(self, peer: Peer, source: Region, target: RemoteRegion, spans: Spans, **how: Any) -> Ticket:
        """Submits a batch; `how` may hold fence and deadline_s."""
        batch = Batch(source, target, spans)
        return self.transport.submit(peer, batch, how.pop("fence", NOW), **how)

    def events(self, count: int, timeout_s: float) -> list[Completion]:
        """The next events, fewer only when the time is up."""
        limit = time.monotonic() + timeout_s
        while len(self.waiting) < count and time.monotonic() < limit:
            self.waiting += wait_for_events(self.transport, limit - time.monotonic())
        events, self.waiting = self.waiting[:count], self.waiting[count:]
        return events

    def check_slots(self, number: int, slots: np.ndarray) -> bool:
        words = np.asarray(self.buffers[number]).view(np.int64)
        return bool((words[slots] == slots + 1).all())

    def fork(self) -> int:
        """A child that does nothing; whoever asked for it ends it."""
        pid = os.fork()
        if not pid:
            signal.pause()
        return pid

    def usage(self) -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        num_fds = len(os.listdir("/proc/self/fd"))
        return Usage(num_fds, pages * os.sysconf("SC_PAGE_SIZE"), used.ru_utime + used.ru_stime)

    def close(self) -> None:
        self.transport.close()


class Handle(Protocol):
    """An End as a check sees it, here or in another process."""

    pid: int | None

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any: ...
    def begin(self, method: str, *args: Any) -> Callable[[], Any]: ...
    def end(self) -> None: ...


class LocalEnd:
    """An End in this process, for transports that reach no further."""

    pid = None

    def __init__(self, subject: str, variant: str | None, options: dict[str, Any]) -> None:
        self.inner = open_end(subject, variant, options)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, method)(*args, **kwargs)

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """A call whose answer is fetched later; here it is made when fetched."""
        return lambda: self.call(method, *args)

    def end(self) -> None:
        self.inner.close()


class RemoteEnd:
    """An End in a child process."""

    def __init__(self, subject: str, variant: str | None, options: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.child = fork_server().start(theirs, subject, variant, options)
        self.pid = self.child.pid
        self.pipe = Connection(ours.detach())
        self.call("usage")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.pipe.send((method, args, kwargs))
        return self._answer()

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """A call whose answer is fetched later."""
        self.pipe.send((method, args, {}))
        return self._answer

    def _answer(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def signal(self, number: int) -> None:
        self.child.signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.child.wait(60), f"process {self.pid} does not end"

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.pipe.close()
        self.child.wait(5)
        self.kill()
        self.child.close()


def open_end(subject: str, variant: str | None, options: dict[str, Any] | None = None) -> End:
    transport = SUBJECTS[subject](**(options or {}))
    return End(BROKEN[variant](transport) if variant else transport)


def serve(pipe: Connection, end: End) -> None:
    while True:
        try:
            method, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(end, method)(*args, **kwargs)
        except Exception as error:
            answer = error
        pipe.send(answer)
