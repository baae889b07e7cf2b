"""The source's half of a ring: fills slots, and ends a ticket when the target gave all of its slots back.

Three threads meet here: the connection's lane fills, the movers' say that a slot is full, and the ring's own
reader takes slots back. The connection's watcher looks at the clock while a batch is under way.

A batch that is given up (cancelled, overdue, or lost with its connection) ends at once as FailedQuiet where
the target has none of its slots: those still being filled are never announced. Where the target has some, it
ends when they came back, or as FailedUnknown when the deadline passes or the target is gone.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from baton.errors import ConfigError, RemoteProtocolError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import DEADLINE_S, Completion, Done, FailedQuiet, FailedUnknown, Peer
from baton.transport.parts.buffers import Memory
from baton.transport.parts.tickets import CANCELLED, Job, Tickets
from baton.transport.parts.watcher import Watcher
from baton.transport.shm.messages import receive_message
from baton.transport.shm.staged.movers import Event, Move, Mover, Staging, place_of
from baton.transport.shm.staged.ring import (
    Packet,
    Ring,
    RingShape,
    Slot,
    Word,
    receive_packet,
    send_packet,
    slot_offsets,
)

LOOK_S = 0.05


@dataclass(slots=True, eq=False)
class _Load:
    """A batch on its way through the ring."""

    number: int
    job: Job
    fence: Event | None
    batch_bytes: int
    num_filling: int = 0
    num_away: int = 0
    was_announced: bool = False
    is_all_filled: bool = False
    """Whether no more slots will be taken for it."""
    is_ended: bool = False
    cause: str = ""
    """Why it was given up."""


class Feeder:
    """Fills the ring of one connection."""

    def __init__(self, peer: Peer, tickets: Tickets, watcher: Watcher, staging: Staging) -> None:
        self.tickets = tickets
        self.watcher = watcher
        self.staging = staging
        self.region_bytes: dict[int, int] = {}
        """Regions that the target said it takes, and their sizes."""
        self._peer = peer
        self._ends: _Ends | None = None
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._away: dict[int, _Load] = {}
        self._loads: dict[int, _Load] = {}
        self._numbers = itertools.count(1)
        self._news = _News()

    @property
    def has_ring(self) -> bool:
        """Whether the target has handed one out."""
        return self._ends is not None

    def attach(self, channel: socket.socket, shape: RingShape) -> None:
        """Maps the ring that comes over its own channel, and begins to listen for slots that come back."""
        ends = _Ends.receive(channel, shape)
        self._ends = ends
        self._free = list(ends.ring.slots)
        ends.reader = threading.Thread(
            target=self._listen, args=(channel,), name="shm-ring-source", daemon=True
        )
        ends.reader.start()

    def carry(self, job: Job, fence: Event | None) -> None:
        """On the connection's lane: fills slot after slot; the ticket ends when they came back."""
        ends, spans = self._ends, job.batch.spans
        memory = self.tickets.regions.memory(job.batch.source.number)
        assert ends is not None, "a job is carried through a ring"
        assert memory is not None, "a begun job keeps its region"
        load = _Load(next(self._numbers), job, fence, spans.num_bytes)
        with self._changed:
            job.progress_s = self._news.progress_s = time.monotonic()
            self._loads[load.number] = load
            self.watcher.start_clock(self._tick)
        try:
            mover = ends.mover(memory, self.staging)
            for part in ends.ring.shape.parts(spans):
                slot = self._take_slot(load)
                if slot is None:
                    break
                self._fill(load, mover, slot, Move(_into_slot(part), memory, fence), part)
        except TransportError as cause:
            self.lose(str(cause))
        with self._changed:
            load.is_all_filled = True
            self._settle(load)

    def lose(self, cause: str) -> None:
        """Gives up everything: the target is gone, or this connection is."""
        with self._changed:
            self._news.lost = self._news.lost or cause
            for load in list(self._loads.values()):
                self._give_up(load, self._news.lost)
                self._end_unknown(load)
            self._changed.notify_all()

    def close(self) -> None:
        """Lets go of the ring; nothing may be carried any more."""
        self.lose("the connection was closed")
        ends, self._ends = self._ends, None
        if ends is not None:
            ends.close()
        self._free = []

    def _take_slot(self, load: _Load) -> Slot | None:
        """A slot that the target does not have, or None once the batch was given up."""
        with self._changed:
            while not self._free:
                if load.cause or load.job.is_cancelled or self._news.lost:
                    break
                self._changed.wait(LOOK_S)
            if load.job.is_cancelled:
                self._give_up(load, CANCELLED)
            if self._news.lost:
                self._give_up(load, self._news.lost)
            if load.cause:
                return None
            load.num_filling += 1
            return self._free.pop()

    def _fill(self, load: _Load, mover: Mover, slot: Slot, move: Move, part: Spans) -> None:
        batch, num_spans = load.job.batch, len(part)
        slot.table[0, :num_spans], slot.table[1, :num_spans] = part.target, part.length
        packet = Packet(
            Word.FILLED,
            load.number,
            batch.target.number,
            slot.index,
            num_spans,
            load.batch_bytes,
            batch.tag,
            is_silent=not batch.is_announced,
        )
        mover.fill(move, slot, partial(self._filled, load, slot, packet))

    def _filled(self, load: _Load, slot: Slot, packet: Packet, cause: str) -> None:
        """On the mover's thread: the slot is full, or the device failed."""
        with self._changed:
            load.num_filling -= 1
            if cause:
                self._give_up(load, cause)
            elif load.cause or self._news.lost:
                self._free.append(slot)
                self._changed.notify_all()
            else:
                load.job.progress_s = self._news.progress_s = time.monotonic()
                load.num_away += 1
                self._away[slot.index] = load
                load.was_announced = True
                cause = self._tell(packet)
            self._settle(load)
        if cause:
            self.lose(cause)

    def _tell(self, packet: Packet) -> str:
        """Sends a packet; says why it could not."""
        try:
            assert self._ends is not None
            send_packet(self._ends.channel, packet)
        except OSError as error:
            return f"the target is gone: {error}"
        return ""

    def _listen(self, channel: socket.socket) -> None:
        """The reader's thread."""
        lost = "the target hung up"
        try:
            while (packet := receive_packet(channel)) is not None:
                self._take_back(packet)
        except (OSError, RemoteProtocolError) as cause:
            lost = f"the target is gone: {cause}"
        self.lose(lost)

    def _take_back(self, packet: Packet) -> None:
        with self._changed:
            load = self._away.pop(packet.slot, None)
            if packet.word is not Word.FREED or load is None or self._ends is None:
                raise RemoteProtocolError(f"the target gave a slot back that it did not have: {packet}")
            self._free.append(self._ends.ring.slots[packet.slot])
            load.num_away -= 1
            load.job.progress_s = self._news.progress_s = time.monotonic()
            self._settle(load)
            self._changed.notify_all()

    def _give_up(self, load: _Load, cause: str) -> None:
        load.cause = load.cause or cause
        self._settle(load)

    def _settle(self, load: _Load) -> None:
        """Ends a ticket of which the target has nothing any more."""
        if load.num_away:
            return
        if load.cause:
            self._end(load, FailedQuiet(load.job.ticket, load.cause))
        elif load.is_all_filled and not load.num_filling:
            self._end(load, Done(load.job.ticket))

    def _end_unknown(self, load: _Load) -> None:
        """Ends a ticket of which the target still has slots."""
        if load.num_away:
            self._end(load, FailedUnknown(load.job.ticket, load.cause))

    def _end(self, load: _Load, completion: Completion) -> None:
        if load.is_ended:
            return
        load.is_ended = True
        self._loads.pop(load.number, None)
        if load.was_announced and not isinstance(completion, Done) and not self._news.lost:
            # If this fails the channel is gone, which its reader hears too.
            self._tell(Packet(Word.DROPPED, load.number, load.job.batch.target.number))
        self.tickets.end(load.job, completion)

    def _tick(self) -> None:
        """On the watcher's thread, while a batch is under way: who is cancelled or overdue is given up."""
        now_s = time.monotonic()
        with self._changed:
            if any(_is_held(load) for load in self._loads.values()):
                self._news.progress_s = now_s
            for load in list(self._loads.values()):
                if load.job.is_cancelled and (load.num_filling or not load.is_all_filled):
                    self._give_up(load, CANCELLED)
                elif now_s > self._news.progress_s + load.job.deadline_s:
                    self._give_up(load, f"no progress on this connection for {load.job.deadline_s} s")
                    self._end_unknown(load)
            for job in self.tickets.unended(self._peer):
                if job.progress_s and now_s > max(job.progress_s, self._news.progress_s) + job.deadline_s:
                    self.tickets.end_waiting(job, f"no progress on this connection for {job.deadline_s} s")
            self._changed.notify_all()
            if not self._loads:
                self.watcher.stop_clock(self._tick)


@dataclass(slots=True)
class _News:
    """When the connection last made progress, and why it is lost."""

    progress_s: float = 0.0
    lost: str = ""


class _Ends:
    """What a connection with a ring has to give back."""

    def __init__(self, channel: socket.socket, ring: Ring) -> None:
        self.channel = channel
        self.ring = ring
        self.movers: dict[str, Mover] = {}
        self.reader: threading.Thread | None = None

    @staticmethod
    def receive(channel: socket.socket, shape: RingShape) -> _Ends:
        """The ring whose memory comes as the channel's first message."""
        channel.settimeout(DEADLINE_S)
        message, fd = receive_message(channel)
        channel.settimeout(None)
        if message is None or fd is None:
            raise TransportError("the target handed out a ring without memory")
        try:
            return _Ends(channel, Ring(fd, shape))
        finally:
            os.close(fd)

    def mover(self, memory: Memory, staging: Staging) -> Mover:
        """What fills slots from where this region is."""
        place = place_of(memory)
        if place not in self.movers:
            self.movers[place] = staging.open_mover(memory, self.ring)
        return self.movers[place]

    def close(self) -> None:
        """Ends the threads, those of the movers when their moves are complete."""
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        if self.reader is not None and self.reader is not threading.current_thread():
            self.reader.join()
        for mover in self.movers.values():
            mover.close()
        self.channel.close()


def _into_slot(part: Spans) -> Spans:
    return Spans(part.source, slot_offsets(part.length), part.length)


def _is_held(load: _Load) -> bool:
    """Whether it waits for its own fence, for which the target is not to blame."""
    return load.num_filling > 0 and load.fence is not None and not load.fence.query()


def read_shape(numbers: tuple[int, int, int, int]) -> RingShape:
    """The shape of a ring as a target gives it."""
    try:
        return RingShape(numbers[0], numbers[1])
    except ConfigError as cause:
        raise TransportError(f"the target's ring is none: {cause}") from None
