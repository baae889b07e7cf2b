"""What all transports do alike: regions, tickets, peers by number, and events.

A transport adds a `SourceConnection` for each target that it writes to, and a `PeerWriter` for each peer
that it invited to write.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np

from baton.errors import TransportError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Bytes,
    Capabilities,
    Completion,
    Description,
    Fence,
    Invitation,
    Peer,
    Ranges,
    Region,
    RevokedQuiet,
    RevokedUnknown,
    RevokeResult,
    Ticket,
)
from baton.transport.common.regions import Grants, Memory, RegionGrant, Regions, memory_of
from baton.transport.common.tickets import NUMBER_MAX, EventQueue, SubmittedBatch, Tickets, check_batch

CLOSED = "the transport was closed"


class SourceConnection(Protocol):
    """The source's half of a connection."""

    def put(self, job: SubmittedBatch) -> None:
        """Takes a job whose fence is ready."""

    def close(self, cause: str) -> None:
        """Ends every job that it was given, and its threads."""


class PeerWriter(Protocol):
    """The target's half of a connection, from the invitation on."""

    @property
    def grants(self) -> Grants: ...

    def check_quiet(self, grant: RegionGrant) -> RevokeResult:
        """Whether no write is in progress inside ranges that are no longer granted."""

    def revoke(self, cause: str) -> RevokeResult:
        """Stops the peer from writing; can be called again after RevokedUnknown."""


ConnectionT = TypeVar("ConnectionT", bound=SourceConnection)
WriterT = TypeVar("WriterT", bound=PeerWriter)


class BaseTransport(ABC, Generic[ConnectionT, WriterT]):
    """One opened transport."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self.events = EventQueue()
        self.regions = Regions(self.incarnation)
        self.tickets = Tickets(self.regions, self.events)
        self.connections: dict[Peer, ConnectionT] = {}
        self.writers: dict[Peer, WriterT] = {}
        self.lock = threading.Lock()
        self.is_open = True
        self._numbers = itertools.count(1)

    @abstractmethod
    def open_connection(self, peer: Peer, description: Description) -> ConnectionT:
        """Starts a connection to a target."""

    @abstractmethod
    def open_writer(self, peer: Peer, secret: str) -> WriterT:
        """Prepares for one more peer that may write here."""

    @abstractmethod
    def address(self) -> str:
        """Where a source reaches this target."""

    def stop(self) -> None:
        """Ends the transport's own threads, after its peers are gone."""
        return

    def start(self, connection: ConnectionT, job: SubmittedBatch, fence: Fence) -> None:
        """Gives a job to its connection once its fence is ready."""
        fence.call_when_ready(partial(connection.put, job))

    def region_access(self, memory: Memory) -> str:
        """What a peer needs to know about a region besides its number and size."""
        return ""

    def allocate(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, dtype=np.uint8)

    def adopt(self, fd: int, num_bytes: int) -> Bytes:
        mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(fd)
        return np.frombuffer(mapped, dtype=np.uint8)

    def register(self, buffer: object) -> Region:
        with self.lock:
            self._check_open()
        memory = memory_of(buffer)
        if memory.place not in self.capabilities.places:
            places = ", ".join(sorted(place.value for place in self.capabilities.places))
            raise TransportError(f"{self.name} moves {places} memory; got {memory.place.value} memory")
        return self.regions.add(memory, self.region_access(memory))

    def unregister(self, region: Region) -> None:
        self.regions.remove(region)

    def invite(self) -> Invitation:
        secret = secrets.token_hex(16)
        with self.lock:
            self._check_open()
            peer = Peer(next(self._numbers), self.incarnation)
            self.writers[peer] = self.open_writer(peer, secret)
        return Invitation(peer, Description(self.name, self.incarnation, self.address(), peer.number, secret))

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        writer = self._writer(peer)
        memory = self.regions.acquire(region)
        try:
            if not memory.bytes.flags.writeable:
                raise TransportError(f"region {region.number} is read-only; register writable memory")
            return writer.grants.add(region, ranges)
        except TransportError:
            self.regions.release(region.number)
            raise

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        writer = self._writer(peer)
        removed = writer.grants.remove(grant)
        self.regions.release(removed.region)
        return writer.check_quiet(removed)

    def revoke(self, peer: Peer) -> RevokeResult:
        if not self.is_open:
            return RevokedUnknown(CLOSED) if peer in self.writers else RevokedQuiet()
        return self._revoke(peer, "revoked by the target")

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        return False

    def connect(self, description: Description) -> Peer:
        if description.transport != self.name:
            raise TransportError(f"{self.name} cannot connect to a peer that uses {description.transport}")
        if not 0 <= description.peer <= NUMBER_MAX:
            raise TransportError(f"no invitation has the number {description.peer}")
        with self.lock:
            self._check_open()
            peer = Peer(next(self._numbers), description.incarnation)
            self.connections[peer] = self.open_connection(peer, description)
        return peer

    def disconnect(self, peer: Peer) -> None:
        self._disconnect(peer, "disconnected by the source")

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        check_batch(batch, deadline_s)
        with self.lock:  # so that a disconnect sees the job, or the job sees the disconnect
            connection = self.connections.get(peer)
            if connection is None:
                raise TransportError(f"peer {peer.number} is not connected")
            job = self.tickets.issue(peer, batch, deadline_s)
        if batch.target.incarnation != peer.incarnation:
            self.tickets.end_waiting(
                job,
                f"region {batch.target.number} belongs to incarnation {batch.target.incarnation}, "
                f"the peer is {peer.incarnation}",
            )
        self.start(connection, job, fence)
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        self.tickets.cancel(ticket)

    def poll(self) -> list[Completion]:
        return self.events.take_all()

    def fileno(self) -> int:
        return self.events.fileno()

    def close(self) -> None:
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
            connected, invited = list(self.connections), list(self.writers)
        for peer in connected:
            self._disconnect(peer, CLOSED)
        for peer in invited:
            self._revoke(peer, CLOSED)
        self.stop()
        self.events.close()

    def _disconnect(self, peer: Peer, cause: str) -> None:
        with self.lock:
            connection = self.connections.pop(peer, None)
        if connection is None:
            raise TransportError(f"peer {peer.number} is not connected")
        self.tickets.end_all_waiting(peer, cause)
        connection.close(cause)

    def _revoke(self, peer: Peer, cause: str) -> RevokeResult:
        with self.lock:
            writer = self.writers.get(peer)
        if writer is None:
            return RevokedQuiet()
        result = writer.revoke(cause)
        if isinstance(result, RevokedQuiet):
            for grant in writer.grants.remove_all():
                self.regions.release(grant.region)
            with self.lock:
                self.writers.pop(peer, None)
        return result

    def _writer(self, peer: Peer) -> WriterT:
        writer = self.writers.get(peer)
        if writer is None:
            raise TransportError(f"peer {peer.number} was not invited, or was revoked")
        return writer

    def _check_open(self) -> None:
        if not self.is_open:
            raise TransportError(CLOSED)
