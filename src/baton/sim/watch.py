"""Who knows which page every copied byte belongs to, and tells the checkers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baton.plan.execution import Bytes
from baton.plan.tokens import Ints
from baton.sim.pool import Pool
from baton.sim.transport.endpoint import SimTransport
from baton.sim.transport.flight import Flight
from baton.sim.transport.inbox import Inbox

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Write:
    """A piece that is about to land."""

    flight: Flight
    pool: Pool
    """The target's."""
    buffer: str
    """Empty for staging."""
    index: Ints
    source: Pool
    read: Ints
    source_buffer: str


class Watch:
    """Told by the transports; tells the world's checkers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._pools: dict[str, Pool] = {}
        self._names: dict[int, str] = {}

    def add(self, transport: SimTransport, pool: Pool) -> None:
        """A rank's transport and pool belong together."""
        self._pools[transport.incarnation] = pool
        for name, raw in pool.memory.items():
            self._names[_address(raw)] = name

    def submitted(self, flight: Flight) -> None:
        """A batch was queued: whose pages does it read?"""
        pool = self._pools[flight.load.batch.source.remote.incarnation]
        name = self._names.get(_address(flight.load.memory), "")
        if name and len(flight.load.read):
            flight.mark = int(pool.owners_of(name, flight.load.read[:1])[0])
        self.world.checkers.tell("submitted", flight, pool, name)

    def landing(self, flight: Flight, inbox: Inbox, index: Ints, read: Ints) -> None:
        """A piece is about to be written."""
        pool = self._pools[inbox.incarnation]
        source = self._pools[flight.load.batch.source.remote.incarnation]
        raw = inbox.memory[flight.load.batch.target.number]
        write = Write(
            flight=flight,
            pool=pool,
            buffer=self._names.get(_address(raw), ""),
            index=index,
            source=source,
            read=read,
            source_buffer=self._names.get(_address(flight.load.memory), ""),
        )
        self.world.note(inbox.node, "write", detail=f"{len(index)} bytes of {write.buffer or 'staging'}")
        self.world.checkers.tell("landing", write)
        if write.buffer:
            np.add.at(pool.num_writes[write.buffer], index, 1)

    def ended(self, flight: Flight, how: str) -> None:
        """A batch came to its completion."""
        self.world.note(flight.outbox.node, "copied", detail=f"{flight.ticket.number} {how}")
        self.world.checkers.tell("flight_ended", flight, how)


def _address(raw: Bytes) -> int:
    return int(raw.__array_interface__["data"][0])
