"""The transport that simulated ranks use.

Theory. A batch waits for its fence, then draws a fate: how long it takes, in how many pieces it lands, and
how it ends. Each piece is one entry of the schedule and is copied when its time comes, so a source that
changes its pages too early, or a target that uses them too late, is found out by the bytes. A piece outlives
its batch where the batch failed unknown; only the end of the target, or a revocation that the transport is
capable of, stops it then.

A transport without `can_enforce_grants` behaves as mapped memory does: a region is handed out when something
of it is granted, and is the peer's to write from then on, granted or not.

A transport without `can_revoke` behaves as the ones over foreign libraries do: the peer is quiet once it has
hung up and what it had under way has drained, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np

from baton.errors import TransportError
from baton.plan.execution import Bytes
from baton.sim.transport.fabric import Fabric
from baton.sim.transport.inbox import Inbox, Writer
from baton.sim.transport.outbox import Outbox
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Capabilities,
    Counters,
    Description,
    Event,
    Fence,
    Invitation,
    Peer,
    Place,
    Ranges,
    Reach,
    Region,
    RemoteRegion,
    RevokeResult,
    Ticket,
)

NAME = "sim"


@dataclass(frozen=True, slots=True)
class Strength:
    """What this transport is capable of."""

    can_enforce_grants: bool = True
    can_revoke: bool = True
    can_announce: bool = False

    def capabilities(self) -> Capabilities:
        """The same in the contract's words."""
        return Capabilities(
            reach=Reach.PROCESS,
            places=frozenset({Place.HOST}),
            batch_spans_max=2**31,
            can_refuse_strangers=True,
            can_enforce_grants=self.can_enforce_grants,
            can_revoke=self.can_revoke,
            can_announce=self.can_announce,
            needs_allocate=False,
        )


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a transport is in."""

    node: str
    life: str
    """The incarnation of the instance."""
    on_event: Callable[[], None]
    """Called when `poll` has something."""
    is_running: Callable[[], bool]


class SimTransport:
    """One rank's transport, for the life of its process."""

    name = NAME

    def __init__(self, fabric: Fabric, owner: Owner, strength: Strength) -> None:
        self.incarnation = fabric.incarnation()
        self.capabilities = strength.capabilities()
        self._fabric = fabric
        self._numbers = count(1)
        self._regions: dict[int, Region] = {}
        self._memory: dict[int, Bytes] = {}
        self._events: list[Event] = []
        self.inbox = Inbox(
            fabric, owner.node, self.incarnation, self.capabilities, self._memory, self._events
        )
        self.outbox = Outbox(
            fabric, owner.node, owner.life, self._memory, self._events, owner.on_event, owner.is_running
        )
        fabric.living[self.incarnation] = self.inbox

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed memory."""
        return np.zeros(num_bytes, dtype=np.uint8)

    def register(self, buffer: object) -> Region:
        """Makes an array known."""
        assert isinstance(buffer, np.ndarray), "simulated memory is numpy"
        raw = buffer.reshape(-1).view(np.uint8)
        if not len(raw):
            raise TransportError("an empty buffer cannot be registered")
        number = next(self._numbers)
        region = Region(RemoteRegion(self.incarnation, number, len(raw)), Place.HOST)
        self._regions[number], self._memory[number] = region, raw
        return region

    def unregister(self, region: Region) -> None:
        """Forgets a region that nobody uses."""
        number = region.number
        if self._regions.get(number) != region:
            raise TransportError(f"region {number} is not registered with this transport")
        is_read = any(flight.load.batch.source == region for flight in self.outbox.flights.values())
        granted = (found for writer in self.inbox.writers.values() for found, _ in writer.granted.values())
        if is_read or number in granted:
            raise TransportError(f"region {number} is in use; let tickets and grants end first")
        del self._regions[number], self._memory[number]

    def invite(self) -> Invitation:
        """Admits one more peer."""
        number = next(self._numbers)
        peer = Peer(number, self.incarnation)
        secret = f"{self._fabric.chance.getrandbits(64):016x}"
        self.inbox.writers[number] = Writer(peer, secret)
        return Invitation(peer, Description(NAME, self.incarnation, self.inbox.node, number, secret))

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        """Lets an invited peer write these bytes too."""
        return self.inbox.writer(peer).add(region, ranges)

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        """Takes one grant back."""
        return self.inbox.ungrant(peer, grant)

    def revoke(self, peer: Peer) -> RevokeResult:
        """Ends an invited peer with all its grants."""
        return self.inbox.revoke(peer)

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether grants no longer bear on what a peer writes into a region."""
        return self.inbox.is_unchecked(peer, region)

    def connect(self, description: Description) -> Peer:
        """Begins a connection."""
        if description.transport != NAME:
            raise TransportError(f"{NAME} cannot connect to a peer that speaks {description.transport}")
        number = next(self._numbers)
        self.outbox.connect(number, description)
        return Peer(number, description.incarnation)

    def disconnect(self, peer: Peer) -> None:
        """Ends a connection and every ticket on it."""
        self.outbox.disconnect(peer.number)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch."""
        if self._regions.get(batch.source.number) != batch.source:
            raise TransportError(f"region {batch.source.number} is not registered with this transport")
        ticket = Ticket(next(self._numbers))
        self.outbox.submit(ticket, peer, batch, fence, deadline_s)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Asks that a batch be given up."""
        self.outbox.cancel(ticket)

    def poll(self) -> list[Event]:
        """What happened since the last call."""
        found = list(self._events)
        self._events.clear()
        return found

    def fileno(self) -> int:
        """There is none: whoever runs this transport is told when to poll."""
        raise TransportError("a simulated transport has no file descriptor; it says when to poll")

    def counters(self) -> Counters:
        """What was turned away so far."""
        return self.inbox.counters()

    def close(self) -> None:
        """Ends every ticket, connection and invitation."""
        if not self.inbox.is_alive:
            return
        for number in list(self.outbox.targets):
            self.outbox.disconnect(number)
        self.die(lingers=False)

    def die(self, lingers: bool) -> None:
        """The process is gone; what it had under way lands all the same if it lingers."""
        self._fabric.living.pop(self.incarnation, None)
        self.inbox.die()
        self.outbox.die(lingers)
