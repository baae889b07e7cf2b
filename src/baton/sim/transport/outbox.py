"""The source's half: every batch from its submission to its one completion, and what lands after that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np

from baton.errors import TransportError
from baton.plan.execution import Bytes
from baton.plan.tokens import Ints
from baton.sim.transport.fabric import Fabric
from baton.sim.transport.fate import End, Fate
from baton.sim.transport.flight import Flight, Load, spelt_out
from baton.transport.base import (
    Batch,
    Completion,
    Description,
    Done,
    Event,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Peer,
    Ticket,
)
from baton.transport.common.tickets import check_batch

CUT_RETRY_S = 0.02
GIVEN_UP = "cancelled"


@dataclass(slots=True, eq=False)
class Outbox:
    """The batches and connections of one transport."""

    fabric: Fabric
    node: str
    life: str
    memory: dict[int, Bytes]
    """Registered buffers by number."""
    events: list[Event]
    wake: Callable[[], None]
    can_hear: Callable[[], bool]
    """Whether the process runs."""
    targets: dict[int, Description] = field(default_factory=dict)
    flights: dict[int, Flight] = field(default_factory=dict)
    is_alive: bool = True

    def connect(self, number: int, description: Description) -> None:
        """Begins a connection."""
        self.targets[number] = description
        inbox = self.fabric.living.get(description.incarnation)
        writer = inbox.welcome(description.peer, description.secret) if inbox else None
        if writer is not None:
            writer.caller = (self, number)

    def disconnect(self, number: int) -> None:
        """Ends a connection and every ticket on it."""
        if number not in self.targets:
            raise TransportError(f"peer {number} is not connected")
        for flight in [found for found in self.flights.values() if found.peer.number == number]:
            self.lose(flight, True, "disconnected by the source")
        self._hang_up(number)
        del self.targets[number]

    def leave(self, number: int) -> None:
        """The target wants this source gone: what is under way may still arrive."""
        for flight in [found for found in self.flights.values() if found.peer.number == number]:
            self.lose(flight, not flight.is_moving, "the target hung up")
        if number in self.targets:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        description = self.targets[number]
        inbox = self.fabric.living.get(description.incarnation)
        writer = inbox.writers.get(description.peer) if inbox else None
        if writer is not None and writer.caller == (self, number):
            writer.caller = None

    def submit(self, ticket: Ticket, peer: Peer, batch: Batch, fence: Fence, deadline_s: float) -> None:
        """Queues a batch."""
        check_batch(batch, deadline_s)
        if peer.number not in self.targets:
            raise TransportError(f"peer {peer.number} is not connected")
        load = Load(batch, self.memory[batch.source.number], *spelt_out(batch.spans))
        flight = Flight(self, ticket, peer, load, deadline_s)
        self.flights[ticket.number] = flight
        self.fabric.watcher.submitted(flight)
        if batch.target.incarnation != peer.incarnation:
            self._end(flight, FailedQuiet(ticket, "the region is of another incarnation"))
        fence.call_when_ready(partial(self._begin, flight))

    def cancel(self, ticket: Ticket) -> None:
        """Gives up what waits; what moves may be done before it hears of it."""
        flight = self.flights.get(ticket.number)
        if flight is None:
            return
        if not flight.is_moving:
            self._end(flight, FailedQuiet(ticket, GIVEN_UP))
        elif not flight.is_hung and self.fabric.chance.random() < 0.6:
            delay_s = self.fabric.copy_s * self.fabric.chance.random()
            self.fabric.schedule.after(delay_s, self.lose, flight, True, GIVEN_UP)

    def die(self, lingers: bool) -> None:
        """The process is gone; what it had under way lands all the same if it lingers."""
        self.is_alive = False
        for number in self.targets:
            self._hang_up(number)
        for flight in self.flights.values():
            flight.is_ended = True
            if not lingers:
                flight.drop()

    def lose(self, flight: Flight, is_quiet: bool, cause: str) -> None:
        """Ends a batch as failed, unless it has ended; quiet means that nothing of it lands any more."""
        if flight.is_ended:
            return
        if is_quiet:
            flight.drop()
            self._end(flight, FailedQuiet(flight.ticket, cause))
        else:
            self._end(flight, FailedUnknown(flight.ticket, cause))

    def _end(self, flight: Flight, completion: Completion) -> None:
        flight.is_ended = True
        self.flights.pop(flight.ticket.number, None)
        self.fabric.watcher.ended(flight, type(completion).__name__)
        self.events.append(completion)
        self.wake()

    def _begin(self, flight: Flight) -> None:
        """The fence is ready."""
        if flight.is_ended or not self.is_alive:
            return
        flight.is_moving = True
        description = self.targets[flight.peer.number]
        inbox = self.fabric.living.get(description.incarnation)
        writer = inbox.welcome(description.peer, description.secret) if inbox else None
        schedule = self.fabric.schedule
        if inbox is None or writer is None:
            schedule.after(self.fabric.copy_s, self.lose, flight, True, "no target that invited this peer")
            return
        flight.ends = (inbox, writer)
        flight.progress_s = schedule.now
        writer.flights.append(flight)
        self._launch(flight, self.fabric.draw(flight))
        schedule.after(flight.deadline_s, self._watch, flight)

    def _launch(self, flight: Flight, fate: Fate) -> None:
        """Lays out the pieces, in random order and at random moments, and the end."""
        chance, schedule = self.fabric.chance, self.fabric.schedule
        pieces = _pieces(len(flight.load.written), [chance.random() for _ in range(fate.num_pieces - 1)])
        chance.shuffle(pieces)
        num_before = len(pieces) if fate.end is End.DONE else int(len(pieces) * fate.share)
        for piece in pieces[:num_before]:
            self._put(flight, piece, chance.random() * fate.duration_s)
        end_s = fate.duration_s * 1.01
        match fate.end:
            case End.DONE:
                schedule.after(end_s, self._finish, flight)
                return
            case End.HANG:
                flight.is_hung = True
                end_s = flight.deadline_s
            case _:
                is_quiet, cause = fate.end is End.ERROR, f"{fate.end.value} on purpose"
                schedule.after(end_s, self.lose, flight, is_quiet, cause)
        if fate.end in (End.LATE, End.HANG, End.AGAIN):
            for piece in pieces if fate.end is End.AGAIN else pieces[num_before:]:
                self._put(flight, piece, end_s + fate.late_s * (0.01 + chance.random()))

    def _put(self, flight: Flight, piece: Ints, delay_s: float) -> None:
        number = self.fabric.next_piece()
        entry = self.fabric.schedule.after(delay_s, self._land, flight, number)
        flight.pending[number] = (piece, entry)

    def _land(self, flight: Flight, number: int) -> None:
        piece, _ = flight.pending.pop(number)
        self.fabric.num_pending -= 1
        assert flight.ends is not None
        inbox, writer = flight.ends
        if self.fabric.is_cut(self.node, inbox.node):
            self._put(flight, piece, CUT_RETRY_S)
            return
        if cause := inbox.land(flight, writer, piece):
            flight.drop()
            self.lose(flight, True, cause)
            return
        flight.progress_s = self.fabric.schedule.now

    def _finish(self, flight: Flight) -> None:
        if flight.is_ended or flight.is_dropped:
            return
        if flight.pending:
            self.fabric.schedule.after(CUT_RETRY_S, self._finish, flight)
            return
        assert flight.ends is not None
        flight.ends[0].announce(flight, flight.ends[1])
        self._end(flight, Done(flight.ticket))

    def _watch(self, flight: Flight) -> None:
        """Fails a batch that has not moved for too long."""
        if flight.is_ended:
            return
        left_s = flight.progress_s + flight.deadline_s - self.fabric.schedule.now
        if left_s > 1e-9:
            self.fabric.schedule.after(left_s, self._watch, flight)
        else:
            self.lose(flight, False, f"no progress for {flight.deadline_s:g} s")


def _pieces(num_bytes: int, shares: list[float]) -> list[Ints]:
    cuts = sorted({0, num_bytes, *(int(share * num_bytes) for share in shares)})
    return [np.arange(start, stop) for start, stop in pairwise(cuts)]
