"""Shared memory between processes of one host: sources map the target's memory and copy into place.

Theory. A target's buffers lie in memfd segments. An invited source connects to an abstract unix socket whose
name holds the incarnation, authenticates, and gets the descriptor of a segment when it first writes to a
region of it. It copies with plain stores; the system call by which its process passes on that the batch is
Done orders the stores before that message on every CPU architecture. Neither segments nor socket have a name
in a file system, so nothing outlives the processes that hold them, however they end; and a successor has
other segments and another socket, so a write meant for a dead target lands in memory that nothing reads.

The target cannot see or stop the stores of a source that has its memory mapped: grants are enforced per
region only, and `revoke` returns RevokedQuiet when the source's process is dead (by pidfd) or has reported
that it unmapped everything. A half-closed socket asks it to; a living source does so within one burst of its
copy.

If one end of a batch is on a device, nothing can be copied straight into place: such batches go through a
bounded ring of pinned host memory (ring.py). Both paths share the connection.
"""

from __future__ import annotations

import itertools
import os
import weakref
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.transport.base import (
    Bytes,
    Capabilities,
    Description,
    Peer,
    Place,
    Reach,
    Region,
)
from baton.transport.common.regions import Memory
from baton.transport.common.unix import UnixTransport
from baton.transport.shm.ring import (
    CUDA,
    RingShape,
    RingStaging,
    Segment,
    create_segment,
    is_staging_needed,
    map_segment,
    open_copier,
)
from baton.transport.shm.source import ShmConnection
from baton.transport.shm.target import SegmentRange, ShmWriter


@dataclass(frozen=True, slots=True)
class ShmConfig:
    """The ring that a target makes for each source that sends it a batch from or to a device.

    A slot costs either end about half a millisecond of Python, which at 50 GB/s is the time of 24 MiB.
    """

    slot_bytes: int = 32 << 20
    num_slots: int = 4

    def __post_init__(self) -> None:
        for name in ("slot_bytes", "num_slots"):
            if getattr(self, name) < 1:
                raise ConfigError(f"shm {name} {getattr(self, name)}: use 1 or more")


class ShmTransport(UnixTransport[ShmConnection, ShmWriter]):
    """One opened shm transport."""

    name = "shm"
    capabilities = Capabilities(
        reach=Reach.HOST,
        places=frozenset({Place.HOST, Place.CUDA}),
        can_refuse_strangers=True,
        can_enforce_grants=False,
        can_revoke=False,
        needs_allocate=True,
    )

    def __init__(self, config: ShmConfig) -> None:
        super().__init__()
        self.segments: dict[int, Segment] = {}
        self.staging = RingStaging(
            RingShape(config.num_slots, config.slot_bytes), is_staging_needed, open_copier
        )
        self._segment_numbers = itertools.count(1)

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed memory in a segment of its own, freed when nothing refers to it any more."""
        if num_bytes < 1:
            raise ConfigError(f"a segment needs at least one byte; got {num_bytes}")
        return self.adopt(create_segment(f"baton-{self.incarnation}", num_bytes), num_bytes)

    def adopt(self, fd: int, num_bytes: int) -> Bytes:
        """Memory in a segment that this process keeps open, freed when nothing refers to it any more."""
        mapping = map_segment(fd, num_bytes, lambda: False)
        number = next(self._segment_numbers)
        self.segments[number] = Segment(fd, mapping.address, num_bytes)
        weakref.finalize(mapping.bytes, _close_segment, self.segments, number)
        return mapping.bytes

    def region_access(self, memory: Memory) -> str:
        """Marks a region on a device, so that sources use a ring."""
        return CUDA if memory.place is Place.CUDA else ""

    def open_connection(self, peer: Peer, description: Description) -> ShmConnection:
        return ShmConnection(peer, description, self.tickets, self.watcher, self.staging)

    def open_writer(self, peer: Peer, secret: str) -> ShmWriter:
        self.listen()
        return ShmWriter(
            peer,
            secret,
            watcher=self.watcher,
            regions=self.regions,
            staging=self.staging,
            locate=self._locate,
        )

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether a peer has a region mapped; a peer that goes through a ring is held to its grants."""
        writer = self.writers.get(peer)
        return super().is_unchecked(peer, region) and writer is not None and writer.ring_reader is None

    def stop(self) -> None:
        """Ends the thread and closes the descriptors; memory is freed with its last array."""
        super().stop()
        for number in list(self.segments):
            _close_segment(self.segments, number)

    def _locate(self, number: int) -> SegmentRange | str:
        memory = self.regions.find(number)
        if memory is None:
            return f"region {number} is not registered"
        num_bytes = len(memory.bytes)
        for index, segment in list(self.segments.items()):
            offset = memory.address - segment.address
            if offset >= 0 and offset + num_bytes <= segment.num_bytes:
                return SegmentRange(index, segment.num_bytes, offset, num_bytes, segment.fd)
        return f"region {number} is not in shared memory; take target buffers from allocate()"


def _close_segment(segments: dict[int, Segment], number: int) -> None:
    segment = segments.pop(number, None)
    if segment is not None:
        os.close(segment.fd)


CONFIG = ShmConfig
TRANSPORT = ShmTransport
