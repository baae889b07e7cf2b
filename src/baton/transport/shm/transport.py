"""Same host, one copy: the target's memory is mapped by its sources, which copy straight into place.

Theory. A target's buffers lie in memfd segments. An invited source connects to an abstract unix socket whose
name holds the incarnation, proves itself, and is handed the descriptor of a segment when it first writes to a
region of it. It copies with plain stores and then sends a packet over that socket: the system call orders the
stores before the news on every kind of processor. Neither segments nor socket have a name in a file system,
so nothing outlives the processes that hold them, however they end; and a successor has other segments and
another socket, so that what was meant for the dead lands in memory that nobody reads.

The target cannot see or stop the stores of a source that has its memory mapped: grants are enforced per
region only, and `revoke` is Quiet when the source's process is dead (by pidfd) or has said that it unmapped
everything. It is asked to by a half-closed socket, and does so within a burst of its copy if it is alive.

Where one end of a batch is on a device, nothing can be copied straight into place: such batches go through a
bounded ring of pinned host memory instead (staged/). Both ways share the connection and its end.
"""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.transport.base import (
    Batch,
    Bytes,
    Capabilities,
    Counters,
    Description,
    Fence,
    Peer,
    Place,
    Reach,
    Region,
)
from baton.transport.parts.buffers import Memory
from baton.transport.parts.cuda_fences import CudaFence
from baton.transport.parts.endpoint import Endpoint, Outgoing
from baton.transport.parts.tally import Tally
from baton.transport.parts.tickets import Job
from baton.transport.parts.watcher import Watcher
from baton.transport.shm.segments import Mapping, create_segment, map_segment
from baton.transport.shm.source import Source
from baton.transport.shm.staged.movers import CUDA, Staging, is_staging_needed, open_mover
from baton.transport.shm.staged.ring import RingShape
from baton.transport.shm.staged.source import Feeder
from baton.transport.shm.staged.target import Shore
from baton.transport.shm.target import Located, Porch, Writer


@dataclass(frozen=True, slots=True)
class ShmConfig:
    """The ring that a target makes for each source with which it shares a batch from or to a device.

    A slot costs either end about half a millisecond of Python, which at 50 GB/s is the time of 24 MiB.
    """

    slot_bytes: int = 32 << 20
    num_slots: int = 4


@dataclass(frozen=True, slots=True)
class _Segment:
    fd: int
    address: int
    num_bytes: int

    def holds(self, address: int, num_bytes: int) -> bool:
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


class ShmTransport(Endpoint):
    """One opened shm transport."""

    name = "shm"
    capabilities = Capabilities(
        reach=Reach.HOST,
        places=frozenset({Place.HOST, Place.CUDA}),
        batch_spans_max=2**31,
        can_refuse_strangers=True,
        can_enforce_grants=False,
        can_revoke=False,
        can_announce=True,
        needs_allocate=True,
    )

    def __init__(self, config: ShmConfig) -> None:
        super().__init__()
        self.watcher = Watcher(f"shm-{self.incarnation}")
        self.tally = Tally()
        self.porch: Porch | None = None
        self.segments: dict[int, _Segment] = {}
        self.staging = Staging(RingShape(config.num_slots, config.slot_bytes), is_staging_needed, open_mover)
        self._segment_numbers = itertools.count(1)

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed memory in a segment of its own; it goes back when nothing refers to it any more."""
        if num_bytes < 1:
            raise ConfigError(f"a segment needs at least one byte; got {num_bytes}")
        fd = create_segment(f"baton-{self.incarnation}", num_bytes)
        mapping: Mapping = map_segment(fd, num_bytes, lambda: False)
        number = next(self._segment_numbers)
        self.segments[number] = _Segment(fd, mapping.address, num_bytes)
        weakref.finalize(mapping.bytes, _drop_segment, self.segments, number)
        return mapping.bytes

    def access_to(self, memory: Memory) -> str:
        """Whether a region is on a device, so that a source goes through a ring."""
        return CUDA if memory.place is Place.CUDA else ""

    def pass_fence(self, outgoing: Outgoing, job: Job, fence: Fence) -> None:
        """Lets the stream that reads a device wait for an event of it; other fences call back."""
        if isinstance(fence, CudaFence) and isinstance(outgoing, Source) and self.can_wait(job.batch):
            outgoing.put_behind(job, fence.event)
        else:
            super().pass_fence(outgoing, job, fence)

    def can_wait(self, batch: Batch) -> bool:
        """Whether a batch is read by a stream."""
        return batch.source.place is Place.CUDA

    def reach(self, peer: Peer, description: Description) -> Source:
        """Begins a connection."""
        return Source(peer, description, Feeder(peer, self.tickets, self.watcher, self.staging))

    def admit(self, peer: Peer, secret: str) -> Writer:
        """Makes ready for one more writer."""
        if self.porch is None:
            self.porch = self.watcher.call(self._open_porch)
        return Writer(peer, secret, self.watcher)

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether a peer has a region mapped; who goes through a ring is held to its grants."""
        writer = self.incoming.get(peer)
        return isinstance(writer, Writer) and region.number in writer.mapped and writer.drainer is None

    def address(self) -> str:
        """The name of the socket; it is in no file system."""
        return f"baton-shm-{self.incarnation}"

    def counters(self) -> Counters:
        """What was turned away so far."""
        return self.tally.counters()

    def stop(self) -> None:
        """Ends the thread and gives the descriptors back; memory goes when its last array does."""
        if self.porch is not None:
            self.watcher.call(self.porch.close)
        for writer in list(self.incoming.values()):
            if isinstance(writer, Writer):
                writer.end()
        self.watcher.close()
        for number in list(self.segments):
            _drop_segment(self.segments, number)

    def _open_porch(self) -> Porch:
        shore = Shore(self.regions, self.mailbox, self.tally, self.staging)
        return Porch(self.address(), self.watcher, self.mailbox, self._locate, self._writer, shore)

    def _writer(self, number: int) -> Writer | None:
        found = self.incoming.get(Peer(number, self.incarnation))
        return found if isinstance(found, Writer) else None

    def _locate(self, number: int) -> Located | str:
        memory = self.regions.memory(number)
        if memory is None:
            return f"region {number} is not registered"
        num_bytes = len(memory.bytes)
        for index, segment in list(self.segments.items()):
            if segment.holds(memory.address, num_bytes):
                offset = memory.address - segment.address
                return Located(index, segment.num_bytes, offset, num_bytes, segment.fd)
        return f"region {number} is not in shared memory; take target buffers from allocate()"


def _drop_segment(segments: dict[int, _Segment], number: int) -> None:
    segment = segments.pop(number, None)
    if segment is not None:
        os.close(segment.fd)


CONFIG = ShmConfig
TRANSPORT = ShmTransport
