"""A ring of slots between two processes, for device memory that the other process cannot store into.

Theory. The target makes a ring of host memory for each source that needs one: a few slots, each with a table
of the spans in it. Both processes map it, and pin their mapping if a device copies from or to it. The source
gathers a slotful of spans into a free slot and, when the copy is complete, sends a packet over the ring's
own socket. The target checks the table against its grants, scatters the slot into its region and, when that
is complete, frees the slot. A freed slot therefore means that its bytes are in place: a batch is Done when
all of its slots were freed, and a batch that was given up is quiet then.

The two ends wait for each other only through slots, and only a thread inside the wait of one event waits for
a device. The stream that reads the source waits for a fence that is a CUDA event. Streams keep their order,
and so do the fences of one connection: a batch waits for those submitted before it.

The source maps the ring only, never the region itself. A target therefore enforces grants on this path, and
a peer is quiet, even while alive, as soon as the slots taken from it are scattered.

Rings and target buffers lie in segments: shared memory without a name (a memfd), mapped by its owner and by
each process that gets its descriptor.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import mmap
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Batch, Bytes, Place
from baton.transport.common.regions import Memory
from baton.transport.common.spans import coalesce, copy_spans, split
from baton.transport.common.threads import WorkerThread
from baton.transport.fences import CudaEvent

POPULATE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment as its owner keeps it, to hand its descriptor out."""

    fd: int
    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Mapping:
    """A segment as this process has it mapped."""

    map: mmap.mmap
    bytes: Bytes
    address: int


def create_segment(name: str, num_bytes: int) -> int:
    """A descriptor of zeroed memory with a sealed size."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    # A peer that could shrink the segment could kill its owner with SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def map_segment(fd: int, num_bytes: int, is_stopped: Callable[[], bool]) -> Mapping:
    """Maps a segment and populates its pages, so that copies do not pay for page faults."""
    mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # A child must not inherit the mapping: `revoke` takes the death of this process for quiet.
    mapped.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel may be built without huge pages, or set to never use them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(mapped, dtype=np.uint8)
    mapping = Mapping(mapped, flat, flat.ctypes.data)
    for start in range(0, num_bytes, POPULATE_BYTES):
        if is_stopped():
            break
        length = min(POPULATE_BYTES, num_bytes - start)
        if _madvise(mapping.address + start, length, _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            if error not in (0, 22):  # EINVAL: before Linux 5.14, which goes without
                # Fail now: without the memory, a later store would raise SIGBUS.
                raise TransportError(f"no memory for a segment of {num_bytes} bytes: {os.strerror(error)}")
            break
    return mapping


TABLE_SPANS = 8192
"""Spans that fit into a slot, however short they are."""
LONG_BYTES = 32 << 10
"""Spans of this mean length are worth a copy each."""
CUDA = "cuda"
"""The `access` of a region on a device."""
_TABLE_BYTES = TABLE_SPANS * 16
_PAGE_BYTES = 4096
_PACKET = struct.Struct("<B7x3Q")
_NUM_SLOTS_MAX = 256


@dataclass(frozen=True, slots=True)
class RingShape:
    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        """A source takes these numbers from a target, so they are checked."""
        if not 2 <= self.num_slots <= _NUM_SLOTS_MAX:
            raise ConfigError(f"a ring has 2 to {_NUM_SLOTS_MAX} slots; got {self.num_slots}")
        if self.slot_bytes < _PAGE_BYTES or self.slot_bytes % _PAGE_BYTES:
            raise ConfigError(f"a slot is a multiple of {_PAGE_BYTES} bytes; got {self.slot_bytes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole ring, its tables included."""
        return self.num_slots * (self.slot_bytes + _TABLE_BYTES)

    def slotfuls(self, spans: Spans) -> list[Spans]:
        """A batch by slots; an empty batch takes one empty slot, which the target checks."""
        if not len(spans):
            return [spans]
        joined = coalesce(spans)
        # Spans of one length are gathered by one index: do not lose that for a few that happen to adjoin.
        has_one_length = bool((spans.length == spans.length[0]).all())
        if has_one_length and 4 * len(joined) > len(spans) and not are_long(joined):
            joined = spans
        return list(split(joined, self.slot_bytes, TABLE_SPANS))


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot as this process has it mapped."""

    index: int
    bytes: Bytes
    table: NDArray[np.int64]


class Ring:
    """A ring as this process has it mapped; unmapped when the last array of it is dropped."""

    def __init__(self, fd: int, shape: RingShape) -> None:
        self.shape = shape
        self.bytes = map_segment(fd, shape.num_bytes, lambda: False).bytes
        tables = self.bytes[: shape.num_slots * _TABLE_BYTES].view(np.int64).reshape(-1, 2, TABLE_SPANS)
        slots = self.bytes[shape.num_slots * _TABLE_BYTES :].reshape(-1, shape.slot_bytes)
        self.slots = [Slot(index, slots[index], tables[index]) for index in range(shape.num_slots)]


def are_long(spans: Spans) -> bool:
    """Whether the spans are long enough on average to be copied one by one."""
    return spans.num_bytes >= LONG_BYTES * max(1, len(spans))


def slot_offsets(length: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where spans of these lengths start in a slot that holds them one after the other."""
    return np.cumsum(length) - length


class PacketKind(IntEnum):
    FILLED = 1  # source: a slot holds spans of a batch
    FREED = 2  # target: the spans of a slot are in their region; the slot may be filled again


@dataclass(frozen=True, slots=True)
class RingPacket:
    """One packet about a slot; FREED names nothing else."""

    kind: PacketKind
    slot: int
    region: int = 0
    num_spans: int = 0


def send_packet(sock: socket.socket, packet: RingPacket) -> None:
    """Sends without blocking: there are fewer packets in flight than the socket holds."""
    raw = _PACKET.pack(packet.kind, packet.slot, packet.region, packet.num_spans)
    sock.send(raw, socket.MSG_DONTWAIT)


def receive_packet(sock: socket.socket) -> RingPacket | None:
    """Waits for the next packet; None once the other side has hung up."""
    raw = sock.recv(_PACKET.size + 1)
    if not raw:
        return None
    try:
        kind, slot, region, num_spans = _PACKET.unpack(raw)
        return RingPacket(PacketKind(kind), slot, region, num_spans)
    except (struct.error, ValueError) as cause:
        raise RemoteProtocolError(f"not a packet of a ring: {raw!r} ({cause})") from None


OnCopied: TypeAlias = Callable[[str], None]
"""Called when a copy is complete, with why it failed, or nothing."""


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """Spans between a region and a slot, in the direction of the batch."""

    spans: Spans
    region: Memory
    fence: CudaEvent | None = None


class SlotCopier(Protocol):
    """Copies between the slots of one ring and one device; calls back in order, from its own thread."""

    def fill(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        """From the region into the slot, once the fence is ready."""

    def drain(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        """From the slot into the region."""

    def close(self) -> None:
        """Completes what it was given and releases the ring."""


@dataclass(frozen=True, slots=True)
class RingStaging:
    """How a transport stages: the rings it makes, which batches go through one, and what copies them."""

    shape: RingShape
    is_needed: Callable[[Batch], bool]
    open_copier: Callable[[Memory, Ring], SlotCopier]


class HostCopier:
    """Copies host memory, with one thread."""

    def __init__(self) -> None:
        self._worker = WorkerThread("shm-staged-host")

    def fill(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        self._worker.put(partial(self._copy, copy, copy.region.bytes, slot.bytes, on_copied))

    def drain(self, copy: SlotCopy, slot: Slot, on_copied: OnCopied) -> None:
        self._worker.put(partial(self._copy, copy, slot.bytes, copy.region.bytes, on_copied))

    def _copy(self, copy: SlotCopy, source: Bytes, target: Bytes, on_copied: OnCopied) -> None:
        if copy.fence is not None:
            copy.fence.synchronize()
        copy_spans(copy.spans, source, target, lambda: False)
        on_copied("")

    def close(self) -> None:
        self._worker.close()


class Copiers:
    """The copiers of one ring, one for each device, opened when first needed."""

    def __init__(self, staging: RingStaging, ring: Ring) -> None:
        self._staging = staging
        self._ring = ring
        self._copiers: dict[str, SlotCopier] = {}

    def get(self, memory: Memory) -> SlotCopier:
        """The copier for regions on the same device as this one."""
        is_on_device = memory.place is Place.CUDA
        device = str(getattr(memory.owner, "device", "")) if is_on_device else Place.HOST.value
        if device not in self._copiers:
            self._copiers[device] = self._staging.open_copier(memory, self._ring)
        return self._copiers[device]

    def close(self) -> None:
        for copier in self._copiers.values():
            copier.close()
        self._copiers.clear()


def open_copier(memory: Memory, ring: Ring) -> SlotCopier:
    """A copier for regions on the same device as this one."""
    if memory.place is Place.HOST:
        return HostCopier()
    # torch takes seconds to import; a process with a region on a device has imported it.
    copier: SlotCopier = importlib.import_module("baton.transport.shm.cuda").open_cuda_copier(memory, ring)
    return copier


def is_staging_needed(batch: Batch) -> bool:
    """Whether one end of a batch is on a device."""
    return batch.source.place is Place.CUDA or batch.target.access == CUDA
