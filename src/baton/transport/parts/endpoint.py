"""What all transports do alike: regions, tickets, peers by number, and events.

A transport adds two things: an `Outgoing` for each peer that it writes to, and an `Incoming` for each peer
that it invited to write.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from abc import ABC, abstractmethod
from functools import partial
from typing import ClassVar, Protocol

import numpy as np

from baton.errors import TransportError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Bytes,
    Capabilities,
    Counters,
    Description,
    Event,
    Fence,
    Invitation,
    Peer,
    Quiet,
    Ranges,
    Region,
    Stillness,
    Ticket,
    Unknown,
)
from baton.transport.parts.buffers import Memory, memory_of
from baton.transport.parts.grants import Granted, Grants
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.regions import Regions
from baton.transport.parts.tickets import NUMBER_MAX, Job, Tickets, check_batch

CLOSED = "the transport was closed"


class Outgoing(Protocol):
    """The source's half of a connection."""

    def put(self, job: Job) -> None:
        """Takes a job whose fence is ready."""

    def close(self, cause: str) -> None:
        """Ends every job that it was given, and its threads."""


class Incoming(Protocol):
    """The target's half of a connection, from its invitation on."""

    @property
    def grants(self) -> Grants:
        """What this peer may write."""

    def is_still(self, granted: Granted) -> Stillness:
        """Whether no write is under way inside ranges that are granted no longer."""

    def revoke(self, cause: str) -> Stillness:
        """Turns the peer out; may be asked again after Unknown."""


class Endpoint(ABC):
    """One opened transport."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self.mailbox = Mailbox()
        self.regions = Regions(self.incarnation)
        self.tickets = Tickets(self.regions, self.mailbox)
        self.outgoing: dict[Peer, Outgoing] = {}
        self.incoming: dict[Peer, Incoming] = {}
        self.lock = threading.Lock()
        self.is_open = True
        self._numbers = itertools.count(1)

    @abstractmethod
    def reach(self, peer: Peer, description: Description) -> Outgoing:
        """Begins a connection."""

    @abstractmethod
    def admit(self, peer: Peer, secret: str) -> Incoming:
        """Makes ready for one more writer."""

    @abstractmethod
    def address(self) -> str:
        """Where a writer finds this target."""

    @abstractmethod
    def counters(self) -> Counters:
        """What was turned away so far."""

    def stop(self) -> None:
        """Ends what the transport itself has running, after its peers are gone."""
        return

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed host memory that peers can write into."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def pass_fence(self, outgoing: Outgoing, job: Job, fence: Fence) -> None:
        """Gives a job to its connection when its fence is ready, or with it where a stream can wait."""
        fence.call_when_ready(partial(outgoing.put, job))

    def access_to(self, memory: Memory) -> str:
        """What a peer needs to know about a region besides its number."""
        return ""

    def register(self, buffer: object) -> Region:
        """Makes a contiguous buffer known."""
        memory = memory_of(buffer)
        if memory.place not in self.capabilities.places:
            places = ", ".join(sorted(place.value for place in self.capabilities.places))
            raise TransportError(f"{self.name} moves {places} memory; got {memory.place.value} memory")
        return self.regions.add(memory, self.access_to(memory))

    def unregister(self, region: Region) -> None:
        """Forgets a region that nobody uses."""
        self.regions.remove(region)

    def invite(self) -> Invitation:
        """Admits one more peer."""
        secret = secrets.token_hex(16)
        with self.lock:
            self._check_open()
            peer = Peer(next(self._numbers), self.incarnation)
            self.incoming[peer] = self.admit(peer, secret)
        return Invitation(peer, Description(self.name, self.incarnation, self.address(), peer.number, secret))

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        """Lets an invited peer write these bytes too."""
        incoming = self._incoming(peer)
        memory = self.regions.use(region)
        try:
            if not memory.bytes.flags.writeable:
                raise TransportError(f"region {region.number} is read-only; peers cannot be let write it")
            return incoming.grants.add(region, ranges)
        except TransportError:
            self.regions.leave(region.number)
            raise

    def ungrant(self, peer: Peer, grant: int) -> Stillness:
        """Takes one grant back."""
        incoming = self._incoming(peer)
        granted = incoming.grants.remove(grant)
        self.regions.leave(granted.region)
        return incoming.is_still(granted)

    def revoke(self, peer: Peer) -> Stillness:
        """Ends an invited peer with all its grants."""
        if not self.is_open:
            return Unknown(CLOSED) if peer in self.incoming else Quiet()
        return self._revoke(peer, "revoked by the target")

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether grants no longer bear on what a peer writes into a region; here they always do."""
        return False

    def connect(self, description: Description) -> Peer:
        """Begins a connection."""
        if description.transport != self.name:
            raise TransportError(f"{self.name} cannot connect to a peer that speaks {description.transport}")
        if not 0 <= description.peer <= NUMBER_MAX:
            raise TransportError(f"no invitation has the number {description.peer}")
        with self.lock:
            self._check_open()
            peer = Peer(next(self._numbers), description.incarnation)
            self.outgoing[peer] = self.reach(peer, description)
        return peer

    def disconnect(self, peer: Peer) -> None:
        """Ends a connection and every ticket on it."""
        self._disconnect(peer, "disconnected by the source")

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch."""
        check_batch(batch, deadline_s)
        with self.lock:  # so that a disconnect sees the job, or the job sees the disconnect
            outgoing = self.outgoing.get(peer)
            if outgoing is None:
                raise TransportError(f"peer {peer.number} is not connected")
            job = self.tickets.issue(peer, batch, deadline_s)
        if batch.target.incarnation != peer.incarnation:
            self.tickets.end_waiting(
                job,
                f"region {batch.target.number} belongs to incarnation {batch.target.incarnation}, "
                f"the peer is {peer.incarnation}",
            )
        self.pass_fence(outgoing, job, fence)
        return job.ticket

    def cancel(self, ticket: Ticket) -> None:
        """Asks that a batch be given up."""
        self.tickets.cancel(ticket)

    def poll(self) -> list[Event]:
        """What happened since the last call."""
        return self.mailbox.take()

    def fileno(self) -> int:
        """Readable while `poll` has something."""
        return self.mailbox.fileno()

    def close(self) -> None:
        """Ends every ticket, connection and invitation."""
        with self.lock:
            if not self.is_open:
                return
            self.is_open = False
            outgoing, incoming = list(self.outgoing), list(self.incoming)
        for peer in outgoing:
            self._disconnect(peer, CLOSED)
        for peer in incoming:
            self._revoke(peer, CLOSED)
        self.stop()
        self.mailbox.close()

    def _disconnect(self, peer: Peer, cause: str) -> None:
        with self.lock:
            outgoing = self.outgoing.pop(peer, None)
        if outgoing is None:
            raise TransportError(f"peer {peer.number} is not connected")
        for job in self.tickets.unended(peer):
            self.tickets.end_waiting(job, cause)
        outgoing.close(cause)

    def _revoke(self, peer: Peer, cause: str) -> Stillness:
        with self.lock:
            incoming = self.incoming.get(peer)
        if incoming is None:
            return Quiet()
        stillness = incoming.revoke(cause)
        if isinstance(stillness, Quiet):
            for granted in incoming.grants.remove_all():
                self.regions.leave(granted.region)
            with self.lock:
                self.incoming.pop(peer, None)
        return stillness

    def _incoming(self, peer: Peer) -> Incoming:
        incoming = self.incoming.get(peer)
        if incoming is None:
            raise TransportError(f"peer {peer.number} was not invited, or was revoked")
        return incoming

    def _check_open(self) -> None:
        if not self.is_open:
            raise TransportError(CLOSED)
