"""The target's half: who was invited, what they may write, and what of it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from baton.errors import TransportError
from baton.plan.execution import Bytes
from baton.plan.tokens import Ints
from baton.sim.transport.fabric import Fabric
from baton.sim.transport.flight import Flight
from baton.transport.base import (
    Capabilities,
    Counters,
    Event,
    Landed,
    Peer,
    Quiet,
    Ranges,
    Region,
    RevokeResult,
    Unknown,
)

if TYPE_CHECKING:
    from baton.sim.transport.outbox import Outbox

TURNED_OUT = "turned out by the target"
GONE = "the target is gone"
LEAVE_RETRY_S = 0.02
GONE_S_MAX = 0.3
"""How long a source may take to notice that its target's process is gone."""


@dataclass(slots=True, eq=False)
class Writer:
    """A peer that was invited."""

    peer: Peer
    secret: str
    allowed: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    """By region: how many grants each byte has."""
    granted: dict[int, tuple[int, Ints]] = field(default_factory=dict)
    num_granted: int = 0
    caller: tuple[Outbox, int] | None = None
    """Who is connected, and what it calls this connection."""
    is_revoked: bool = False
    mapped: set[int] = field(default_factory=set)
    """Where grants are not enforced: regions that it has come to write by itself."""
    flights: list[Flight] = field(default_factory=list)

    def add(self, region: Region, ranges: Ranges) -> int:
        """Allows ranges too."""
        stop = ranges.start + ranges.length
        if len(stop) and not ((ranges.start >= 0) & (ranges.length > 0) & (stop <= region.num_bytes)).all():
            raise TransportError(f"a granted range lies outside of region {region.number}")
        pieces = [np.arange(a, b) for a, b in zip(ranges.start.tolist(), stop.tolist(), strict=True)]
        index = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        allowed = self.allowed.setdefault(region.number, np.zeros(region.num_bytes, dtype=np.int64))
        np.add.at(allowed, index, 1)
        self.num_granted += 1
        self.granted[self.num_granted] = (region.number, index)
        return self.num_granted

    def remove(self, grant: int) -> tuple[int, Ints]:
        """Takes one grant back."""
        if grant not in self.granted:
            raise TransportError(f"grant {grant} of this peer is not there; it may be taken back once")
        number, index = self.granted.pop(grant)
        np.subtract.at(self.allowed[number], index, 1)
        return number, index

    def may_write(self, number: int, index: Ints) -> bool:
        """Whether every one of these bytes was granted."""
        allowed = self.allowed.get(number)
        return allowed is not None and bool((allowed[index] > 0).all())

    def may_map(self, number: int) -> bool:
        """Whether a region was handed out before, or is now because something of it is granted."""
        if any(number == granted for granted, _ in self.granted.values()):
            self.mapped.add(number)
        return number in self.mapped

    def under_way(self) -> list[Flight]:
        """Flights of which something may still land."""
        self.flights = [flight for flight in self.flights if flight.pending or not flight.is_ended]
        return [flight for flight in self.flights if flight.pending]


@dataclass(slots=True, eq=False)
class Inbox:
    """The writers of one transport and the memory that they write into."""

    fabric: Fabric
    node: str
    incarnation: str
    capabilities: Capabilities
    memory: dict[int, Bytes]
    """Registered buffers by number."""
    events: list[Event]
    writers: dict[int, Writer] = field(default_factory=dict)
    is_alive: bool = True
    num_strangers: int = 0
    num_refused: int = 0

    def counters(self) -> Counters:
        """What was turned away so far."""
        return Counters(self.num_strangers, self.num_refused)

    def writer(self, peer: Peer) -> Writer:
        """An invited peer that was not revoked."""
        found = self.writers.get(peer.number)
        if found is None:
            raise TransportError(f"peer {peer.number} was not invited, or was revoked")
        return found

    def welcome(self, number: int, secret: str) -> Writer | None:
        """The writer that a description belongs to."""
        found = self.writers.get(number)
        if found is None or found.secret != secret or found.is_revoked:
            self.num_strangers += 1
            return None
        return found

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        """Takes one grant back."""
        writer = self.writer(peer)
        number, index = writer.remove(grant)
        if not self.capabilities.can_revoke:
            is_near = writer.caller is not None or bool(writer.under_way())
            return Unknown("the peer knows the region") if is_near else Quiet()
        for flight in writer.under_way():
            if flight.load.batch.target.number == number and np.isin(flight.load.written, index).any():
                return Unknown("a write of this peer is under way there")
        return Quiet()

    def revoke(self, peer: Peer) -> RevokeResult:
        """Ends an invited peer."""
        writer = self.writers.get(peer.number)
        if writer is None:
            return Quiet()
        was_revoked, writer.is_revoked = writer.is_revoked, True
        under_way = writer.under_way()
        if not self.capabilities.can_revoke and (writer.caller is not None or under_way):
            if not was_revoked and writer.caller is not None:
                self.fabric.schedule.after(self.fabric.copy_s, self._ask_to_leave, writer)
            return Unknown("the peer has not hung up, or what it wrote has not drained")
        for flight in list(writer.flights):
            flight.drop()
            self.fabric.schedule.after(self.fabric.copy_s, flight.outbox.lose, flight, True, TURNED_OUT)
        del self.writers[peer.number]
        return Quiet()

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether a peer has come to write a region by itself."""
        writer = self.writers.get(peer.number)
        return writer is not None and region.number in writer.mapped

    def _ask_to_leave(self, writer: Writer) -> None:
        """Closes this end's half; the peer hangs up when it hears of it."""
        if writer.caller is None or not self.is_alive:
            return
        outbox, number = writer.caller
        if self.fabric.is_cut(self.node, outbox.node) or not outbox.can_hear():
            self.fabric.schedule.after(LEAVE_RETRY_S, self._ask_to_leave, writer)
        else:
            outbox.leave(number)

    def land(self, flight: Flight, writer: Writer, piece: Ints) -> str:
        """Writes a piece; answers why not if it is refused."""
        number = flight.load.batch.target.number
        index = flight.load.written[piece]
        raw = self.memory.get(number)
        if raw is None or len(raw) <= int(index.max(initial=0)):
            return f"region {number} is not registered"
        is_strict = self.capabilities.can_enforce_grants
        if not (writer.may_write(number, index) if is_strict else writer.may_map(number)):
            self.num_refused += 1
            writer.is_revoked = True
            return "a write outside of what was granted was refused"
        read = flight.load.read[piece]
        self.fabric.watcher.landing(flight, self, index, read)
        carried = flight.load.memory[read]
        raw[index] = carried if self.fabric.spoil is None else self.fabric.spoil(carried)
        return ""

    def announce(self, flight: Flight, writer: Writer) -> None:
        """Tells the target that a batch is there."""
        if self.capabilities.can_announce:
            self.events.append(Landed(writer.peer, flight.load.batch.tag, len(flight.load.written)))

    def die(self) -> None:
        """The process is gone, and its memory with it: whoever writes here hears of it soon."""
        self.is_alive = False
        chance = self.fabric.chance
        for writer in self.writers.values():
            for flight in list(writer.flights):
                flight.drop()
                delay_s, is_quiet = GONE_S_MAX * chance.random(), chance.random() < 0.5
                self.fabric.schedule.after(delay_s, flight.outbox.lose, flight, is_quiet, GONE)
