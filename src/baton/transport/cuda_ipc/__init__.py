"""CUDA memory between processes of one host: sources map the target's pools and copy into place.

Theory. Control is that of shm: an invited source connects to an abstract unix socket whose name holds the
incarnation, authenticates, and asks for a region when it first writes to it. The target answers with the
CUDA IPC handle of the allocation that the region lies in, and the region's offset in it: a pool is usually a
part of a segment of torch's caching allocator, and a handle names a whole allocation. The source maps it and
copies on a stream of its own, which first waits for the batch's CUDA event. When the stream has passed a
batch, its bytes are in the target's memory; only then the source reports Done, so a kernel that the target
launches after it learnt of that reads the new bytes.

A handle opens only while its exporter lives, and a mapping keeps the memory it was made for: a successor of
the target has other memory and another socket, so nothing that was meant for its predecessor reaches it.

The target cannot see or stop the copies of a source that has its memory mapped: grants are enforced per
region only, a mapping reaches the whole allocation, and `revoke` returns RevokedQuiet when the source's
process is dead or has reported that it unmapped everything, which it does when its stream has run dry. A
source whose device has failed cannot know that, and never reports it.

device.py has everything that touches CUDA.
"""

from __future__ import annotations

import importlib
import select
import socket
from dataclasses import dataclass

from baton.errors import ConfigError, TransportError
from baton.transport.base import (
    Bytes,
    Capabilities,
    Description,
    Peer,
    Place,
    Reach,
    Region,
    RevokedQuiet,
    RevokedUnknown,
    RevokeResult,
)
from baton.transport.common.threads import has_events
from baton.transport.common.unix import (
    MessageKind,
    UnixMessage,
    UnixTransport,
    UnixWriter,
    send_message,
)
from baton.transport.cuda_ipc.source import CudaIpcConnection, DeviceMemory, ExportedRegion


@dataclass(frozen=True, slots=True)
class CudaIpcConfig:
    """There are no options."""


class CudaIpcWriter(UnixWriter):
    """One invited peer."""

    exported: dict[int, ExportedRegion]
    """The transport's regions."""

    def check_mapped(self) -> RevokeResult:
        """Unknown also while a forked child of a dead peer lives: it may hold the peer's device files."""
        result = super().check_mapped()
        is_dead = isinstance(result, RevokedQuiet) and bool(self.mapped) and not self.has_left
        if is_dead and self.sock is not None and not has_events(self.sock.fileno(), select.POLLRDHUP):
            return RevokedUnknown("the writer's process has ended, and a child of it has its socket open")
        return result

    def hand_out(self, sock: socket.socket, number: int, *, is_staged: bool) -> None:
        """On the watcher's thread."""
        region = self.exported[number]
        self.mapped.add(number)
        numbers = (region.offset, region.num_bytes, 0, 0)
        send_message(sock, UnixMessage(MessageKind.MAPPED, numbers, region.handle))


class CudaIpcTransport(UnixTransport[CudaIpcConnection, CudaIpcWriter]):
    """One opened cuda_ipc transport."""

    name = "cuda_ipc"
    capabilities = Capabilities(
        reach=Reach.HOST,
        places=frozenset({Place.CUDA}),
        can_refuse_strangers=True,
        can_enforce_grants=False,
        can_revoke=False,
        needs_allocate=False,
        needs_own_memory=True,  # memory that was mapped by CUDA IPC cannot be handed out again
    )

    def __init__(self, config: CudaIpcConfig) -> None:
        self.device_memory = self.open_device_memory()  # raises before there is anything to close
        super().__init__()
        self.exported: dict[int, ExportedRegion] = {}

    def open_device_memory(self) -> DeviceMemory:
        """Raises ConfigError without a GPU."""
        try:
            device = importlib.import_module("baton.transport.cuda_ipc.device")
        except ImportError as error:
            raise ConfigError(f"cuda_ipc needs torch ({error}); use shm for host memory") from None
        memory: DeviceMemory = device.CudaMemory()
        return memory

    def allocate(self, num_bytes: int) -> Bytes:
        raise TransportError("cuda_ipc moves cuda memory and allocates none; register a CUDA tensor")

    def register(self, buffer: object) -> Region:
        """Memory that no other process can map fails here, not at the first hand-over."""
        region = super().register(buffer)
        memory = self.regions.find(region.number)
        assert memory is not None
        try:
            self.exported[region.number] = self.device_memory.export(memory)
        except TransportError:
            super().unregister(region)
            raise
        return region

    def unregister(self, region: Region) -> None:
        super().unregister(region)
        self.exported.pop(region.number, None)

    def open_connection(self, peer: Peer, description: Description) -> CudaIpcConnection:
        return CudaIpcConnection(peer, description, self.tickets, self.watcher, self.device_memory)

    def open_writer(self, peer: Peer, secret: str) -> CudaIpcWriter:
        self.listen()
        writer = CudaIpcWriter(peer, secret, self.watcher)
        writer.exported = self.exported
        return writer


CONFIG = CudaIpcConfig
TRANSPORT = CudaIpcTransport
