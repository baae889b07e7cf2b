"""The transport that simulated ranks use.

Theory. A batch waits for its fence, then draws a course: how long it takes, in how many pieces it lands, and
how it ends. Each piece is one scheduled call that copies the bytes when its time comes, so a source that
changes its pages too early, or a target that uses them too late, shows in the bytes. Pieces outlive their
batch if it failed unknown; after that only the end of the target process stops them, or a revocation, if the
transport is capable of one.

A transport without `can_enforce_grants` behaves as mapped memory does: a region is mapped by the peer when
some of it is granted, and from then on the peer can write it, granted or not.

A transport without `can_revoke` behaves as the ones over foreign libraries do: a peer is quiet only after it
has disconnected and its writes under way have drained.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import count, pairwise
from typing import Protocol

import numpy as np

from baton.errors import TransportError
from baton.plan.content import Bytes
from baton.plan.steps import Spans
from baton.plan.tokens import Ints
from baton.sim.core import Schedule, ScheduledCall, Strength
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Capabilities,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Invitation,
    Peer,
    Place,
    Ranges,
    Reach,
    Region,
    RevokedQuiet,
    RevokedUnknown,
    RevokeResult,
    Ticket,
)
from baton.transport.common.regions import Grants, Regions, do_ranges_overlap, memory_of
from baton.transport.common.tickets import check_batch

NAME = "sim"
RETRY_S = 0.02
"""How often something that a cut holds up is tried again."""
GONE_S_MAX = 0.3
"""How long a source may take to notice that its target's process is gone."""


class CopyEnd(Enum):
    """How a batch ends if nothing else happens to it."""

    DONE = "done"
    ERROR = "error"
    """FailedQuiet: the rest never lands."""
    PARTIAL = "partial"
    """FailedUnknown, although the rest never lands."""
    LATE = "late"
    """FailedUnknown, and the rest lands later."""
    AGAIN = "again"
    """FailedUnknown, and all of it is written once more, later."""
    HANG = "hang"
    """Nothing until the deadline, then FailedUnknown, and the rest lands later."""


@dataclass(slots=True)
class CopyCourse:
    """The fate of one batch, drawn when it begins to move."""

    duration_s: float
    num_pieces: int
    end: CopyEnd = CopyEnd.DONE
    share: float = 1.0
    """The share of pieces that land before an end other than done."""
    late_s: float = 0.1
    """How long after the end the rest may land."""


@dataclass(slots=True, eq=False)
class SimCopy:
    """One submitted batch: pieces that land one by one, and one completion."""

    sender: SimTransport
    ticket: Ticket
    peer: Peer
    batch: Batch
    memory: Bytes
    """The buffer that is read."""
    read: Ints
    """Byte by byte: where it is read..."""
    written: Ints
    """...and where it is written."""
    deadline_s: float
    receiver: tuple[SimTransport, InvitedPeer] | None = None
    """Set once it moves."""
    is_moving: bool = False
    is_hung: bool = False
    is_ended: bool = False
    is_dropped: bool = False
    """Whether some of it never landed, so that it cannot end as Done."""
    pending: dict[int, tuple[Ints, ScheduledCall]] = field(default_factory=dict)
    """Pieces that may still land, by number."""
    progress_s: float = 0.0
    mark: int = 0
    """The attempt whose pages it reads; the observer sets it."""

    def drop(self) -> None:
        """Nothing of it lands any more."""
        self.is_dropped = self.is_dropped or bool(self.pending)
        for _, call in self.pending.values():
            call.cancel()
        self.sender.fabric.num_pending -= len(self.pending)
        self.pending.clear()


class CopyObserver(Protocol):
    """Is called for every copy."""

    def on_submit(self, copy: SimCopy) -> None:
        """A batch was queued."""

    def on_write(self, copy: SimCopy, target: SimTransport, index: Ints, read: Ints) -> None:
        """A piece is about to be written: bytes of the target's region, and of the source's."""

    def on_end(self, copy: SimCopy, how: str) -> None:
        """A batch completed."""


@dataclass(slots=True)
class Fabric:
    """Connects all transports of a seed."""

    schedule: Schedule
    rng: random.Random
    observer: CopyObserver
    is_cut: Callable[[str, str], bool]
    """Whether nothing passes from one node to another now."""
    faults: list[Callable[[SimCopy, CopyCourse], None]] = field(default_factory=list)
    """Each may change the course of a batch that begins to move."""
    transports: dict[str, SimTransport] = field(default_factory=dict)
    """The living transports by incarnation."""
    copy_s: float = 0.0005
    corrupt: Callable[[Bytes], Bytes] | None = None
    """What a bad wire makes of the bytes of a piece."""
    num_opened: int = 0
    num_pieces: int = 0
    num_pending: int = 0
    """Pieces that may still land."""

    def draw_course(self, copy: SimCopy) -> CopyCourse:
        rng = self.rng
        course = CopyCourse(
            duration_s=self.copy_s * (0.2 + 1.6 * rng.random()), num_pieces=rng.choice((1, 1, 2, 3))
        )
        for fault in self.faults:
            fault(copy, course)
        return course

    def next_piece(self) -> int:
        self.num_pieces += 1
        self.num_pending += 1
        return self.num_pieces

    def new_incarnation(self) -> str:
        self.num_opened += 1
        return f"{self.num_opened:04x}{self.rng.getrandbits(32):08x}"


@dataclass(slots=True, eq=False)
class InvitedPeer:
    """A peer that may write here: its grants, its connection, and its copies under way."""

    peer: Peer
    secret: str
    grants: Grants = field(default_factory=Grants)
    caller: tuple[SimTransport, int] | None = None
    """The transport that is connected, and its number for this connection."""
    is_revoked: bool = False
    mapped: set[int] = field(default_factory=set)
    """Without enforced grants: the regions that the peer has mapped."""
    copies: list[SimCopy] = field(default_factory=list)

    def may_map(self, number: int) -> bool:
        """Whether the peer has mapped a region, or maps it now because some of it is granted."""
        if self.grants.has_region(number):
            self.mapped.add(number)
        return number in self.mapped

    def under_way(self) -> list[SimCopy]:
        """Copies of which something may still land."""
        self.copies = [copy for copy in self.copies if copy.pending or not copy.is_ended]
        return [copy for copy in self.copies if copy.pending]


class SimTransport:
    """One rank's transport, for the life of its process; `wake` is called when `poll` has an event."""

    name = NAME

    def __init__(
        self,
        fabric: Fabric,
        node: str,
        strength: Strength,
        *,
        instance: str,
        wake: Callable[[], None],
        is_running: Callable[[], bool],
    ) -> None:
        self.incarnation = fabric.new_incarnation()
        self.capabilities = Capabilities(
            reach=Reach.PROCESS,
            places=frozenset({Place.HOST}),
            can_refuse_strangers=True,
            can_enforce_grants=strength.can_enforce_grants,
            can_revoke=strength.can_revoke,
            needs_allocate=False,
        )
        self.fabric = fabric
        self.node = node
        self.instance = instance
        """Name and epoch of the instance."""
        self.wake = wake
        self.is_running = is_running
        """Whether the process runs."""
        self.is_alive = True
        self.regions = Regions(self.incarnation)
        self.peers: dict[int, InvitedPeer] = {}
        """Who may write here."""
        self.targets: dict[int, Description] = {}
        """Where this transport writes, by number of the connection."""
        self.copies: dict[int, SimCopy] = {}
        self.events: list[Completion] = []
        self._numbers = count(1)
        fabric.transports[self.incarnation] = self

    def allocate(self, num_bytes: int) -> Bytes:
        return np.zeros(num_bytes, dtype=np.uint8)

    def register(self, buffer: object) -> Region:
        return self.regions.add(memory_of(buffer))

    def unregister(self, region: Region) -> None:
        self.regions.remove(region)

    def poll(self) -> list[Completion]:
        events = list(self.events)
        self.events.clear()
        return events

    def fileno(self) -> int:
        raise TransportError("a simulated transport has no file descriptor; it calls back when to poll")

    def close(self) -> None:
        if self.is_alive:
            for number, description in list(self.targets.items()):
                self.disconnect(Peer(number, description.incarnation))
            self.die(lingers=False)

    def die(self, lingers: bool) -> None:
        """The process is gone with its memory; its copies under way still land if they linger."""
        self.fabric.transports.pop(self.incarnation, None)
        self.is_alive = False
        rng = self.fabric.rng
        for invited in self.peers.values():
            for copy in list(invited.copies):
                # Those who write here notice soon.
                copy.drop()
                delay_s, is_quiet = GONE_S_MAX * rng.random(), rng.random() < 0.5
                self.fabric.schedule.after(delay_s, copy.sender.fail, copy, is_quiet, "the target is gone")
        for number in self.targets:
            self._hang_up(number)
        for copy in self.copies.values():
            copy.is_ended = True
            if not lingers:
                copy.drop()

    # As a target: the invited peers, and the memory that they write.

    def invite(self) -> Invitation:
        number = next(self._numbers)
        peer = Peer(number, self.incarnation)
        secret = f"{self.fabric.rng.getrandbits(64):016x}"
        self.peers[number] = InvitedPeer(peer, secret)
        return Invitation(peer, Description(NAME, self.incarnation, self.node, number, secret))

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        number = self._invited(peer).grants.add(region, ranges)
        self.regions.acquire(region)
        return number

    def _invited(self, peer: Peer) -> InvitedPeer:
        invited = self.peers.get(peer.number)
        if invited is None:
            raise TransportError(f"peer {peer.number} was not invited, or was revoked")
        return invited

    def admit(self, description: Description) -> InvitedPeer | None:
        """The invited peer that a description is for."""
        invited = self.peers.get(description.peer)
        if invited is None or invited.secret != description.secret or invited.is_revoked:
            return None
        return invited

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        invited = self._invited(peer)
        removed = invited.grants.remove(grant)
        self.regions.release(removed.region)
        if not self.capabilities.can_revoke:
            is_near = invited.caller is not None or bool(invited.under_way())
            return RevokedUnknown("the peer knows the region") if is_near else RevokedQuiet()
        for copy in invited.under_way():
            written = Ranges(copy.batch.spans.target, copy.batch.spans.length)
            if copy.batch.target.number == removed.region and do_ranges_overlap(written, removed.ranges):
                return RevokedUnknown("a write of this peer is under way there")
        return RevokedQuiet()

    def revoke(self, peer: Peer) -> RevokeResult:
        invited = self.peers.get(peer.number)
        if invited is None:
            return RevokedQuiet()
        was_revoked, invited.is_revoked = invited.is_revoked, True
        under_way = invited.under_way()
        schedule, copy_s = self.fabric.schedule, self.fabric.copy_s
        if not self.capabilities.can_revoke and (invited.caller is not None or under_way):
            if not was_revoked and invited.caller is not None:
                schedule.after(copy_s, self._ask_to_leave, invited)
            return RevokedUnknown("the peer has not hung up, or its writes have not drained")
        for copy in list(invited.copies):
            copy.drop()
            schedule.after(copy_s, copy.sender.fail, copy, True, "revoked by the target")
        for grant in invited.grants.remove_all():
            self.regions.release(grant.region)
        del self.peers[peer.number]
        return RevokedQuiet()

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        invited = self.peers.get(peer.number)
        return invited is not None and region.number in invited.mapped

    def _ask_to_leave(self, invited: InvitedPeer) -> None:
        """Closes this half of the connection; the peer disconnects when it gets that."""
        if invited.caller is None or not self.is_alive:
            return
        caller, number = invited.caller
        if self.fabric.is_cut(self.node, caller.node) or not caller.is_running():
            self.fabric.schedule.after(RETRY_S, self._ask_to_leave, invited)
        else:
            caller.leave(number)

    def write(self, copy: SimCopy, invited: InvitedPeer, piece: Ints) -> str:
        """Writes a piece; returns the reason if it is refused."""
        number = copy.batch.target.number
        index = copy.written[piece]
        memory = self.regions.find(number)
        if memory is None or len(memory.bytes) <= int(index.max(initial=0)):
            return f"region {number} is not registered"
        is_strict = self.capabilities.can_enforce_grants
        is_granted = is_strict and invited.grants.allow(number, index, np.ones_like(index))
        if not (is_granted if is_strict else invited.may_map(number)):
            invited.is_revoked = True
            return "a write outside of what was granted was refused"
        read = copy.read[piece]
        self.fabric.observer.on_write(copy, self, index, read)
        carried = copy.memory[read]
        memory.bytes[index] = carried if self.fabric.corrupt is None else self.fabric.corrupt(carried)
        return ""

    # As a source: its connections and batches.

    def connect(self, description: Description) -> Peer:
        if description.transport != NAME:
            raise TransportError(f"{NAME} cannot connect to a peer that speaks {description.transport}")
        number = next(self._numbers)
        self.targets[number] = description
        _, invited = self._find(description)
        if invited is not None:
            invited.caller = (self, number)
        return Peer(number, description.incarnation)

    def _find(self, description: Description) -> tuple[SimTransport | None, InvitedPeer | None]:
        """The target of a description, and this transport as its peer, if the target lives and invited it."""
        target = self.fabric.transports.get(description.incarnation)
        return target, target.admit(description) if target else None

    def disconnect(self, peer: Peer) -> None:
        """Ends a connection and every ticket on it."""
        number = peer.number
        if number not in self.targets:
            raise TransportError(f"peer {number} is not connected")
        for copy in [copy for copy in self.copies.values() if copy.peer.number == number]:
            self.fail(copy, True, "disconnected by the source")
        self._hang_up(number)
        del self.targets[number]

    def leave(self, number: int) -> None:
        """The target closed the connection: copies under way may still arrive."""
        for copy in [copy for copy in self.copies.values() if copy.peer.number == number]:
            self.fail(copy, not copy.is_moving, "the target hung up")
        if number in self.targets:
            self._hang_up(number)

    def _hang_up(self, number: int) -> None:
        description = self.targets[number]
        target = self.fabric.transports.get(description.incarnation)
        invited = target.peers.get(description.peer) if target else None
        if invited is not None and invited.caller == (self, number):
            invited.caller = None

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        ticket = Ticket(next(self._numbers))
        check_batch(batch, deadline_s)
        if peer.number not in self.targets:
            raise TransportError(f"peer {peer.number} is not connected")
        read, written = _bytes_of(batch.spans)
        memory = self.regions.acquire(batch.source).bytes
        copy = SimCopy(self, ticket, peer, batch, memory, read, written, deadline_s)
        self.copies[ticket.number] = copy
        self.fabric.observer.on_submit(copy)
        if batch.target.incarnation != peer.incarnation:
            self._end(copy, FailedQuiet(ticket, "the region is of another incarnation"))
        fence.call_when_ready(partial(self._begin, copy))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancels a batch that waits; one that moves may complete first."""
        copy = self.copies.get(ticket.number)
        if copy is None:
            return
        if not copy.is_moving:
            self._end(copy, FailedQuiet(ticket, "cancelled"))
        elif not copy.is_hung and self.fabric.rng.random() < 0.6:
            delay_s = self.fabric.copy_s * self.fabric.rng.random()
            self.fabric.schedule.after(delay_s, self.fail, copy, True, "cancelled")

    def fail(self, copy: SimCopy, is_quiet: bool, cause: str) -> None:
        """Fails a batch unless it has ended; quiet means that nothing of it lands any more."""
        if copy.is_ended:
            return
        if is_quiet:
            copy.drop()
            self._end(copy, FailedQuiet(copy.ticket, cause))
        else:
            self._end(copy, FailedUnknown(copy.ticket, cause))

    def _end(self, copy: SimCopy, completion: Completion) -> None:
        copy.is_ended = True
        self.copies.pop(copy.ticket.number, None)
        self.regions.release(copy.batch.source.number)
        self.fabric.observer.on_end(copy, type(completion).__name__)
        self.events.append(completion)
        self.wake()

    def _begin(self, copy: SimCopy) -> None:
        """The fence is ready."""
        if copy.is_ended or not self.is_alive:
            return
        copy.is_moving = True
        target, invited = self._find(self.targets[copy.peer.number])
        schedule = self.fabric.schedule
        if target is None or invited is None:
            schedule.after(self.fabric.copy_s, self.fail, copy, True, "no target that invited this peer")
            return
        copy.receiver = (target, invited)
        copy.progress_s = schedule.now
        invited.copies.append(copy)
        self._schedule_pieces(copy, self.fabric.draw_course(copy))
        schedule.after(copy.deadline_s, self._check_progress, copy)

    def _schedule_pieces(self, copy: SimCopy, course: CopyCourse) -> None:
        """Schedules the pieces, in random order and at random moments, and the end."""
        rng, schedule = self.fabric.rng, self.fabric.schedule
        num_bytes = len(copy.written)
        shares = [rng.random() for _ in range(course.num_pieces - 1)]
        cuts = sorted({0, num_bytes, *(int(share * num_bytes) for share in shares)})
        pieces = [np.arange(start, stop) for start, stop in pairwise(cuts)]
        rng.shuffle(pieces)
        is_done = course.end is CopyEnd.DONE
        num_before = len(pieces) if is_done else int(len(pieces) * course.share)
        for piece in pieces[:num_before]:
            self._schedule_piece(copy, piece, rng.random() * course.duration_s)
        end_s = course.duration_s * 1.01
        match course.end:
            case CopyEnd.DONE:
                schedule.after(end_s, self._finish, copy)
                return
            case CopyEnd.HANG:
                copy.is_hung = True
                end_s = copy.deadline_s
            case _:
                is_quiet, cause = course.end is CopyEnd.ERROR, f"{course.end.value} on purpose"
                schedule.after(end_s, self.fail, copy, is_quiet, cause)
        if course.end in (CopyEnd.LATE, CopyEnd.HANG, CopyEnd.AGAIN):
            for piece in pieces if course.end is CopyEnd.AGAIN else pieces[num_before:]:
                self._schedule_piece(copy, piece, end_s + course.late_s * (0.01 + rng.random()))

    def _schedule_piece(self, copy: SimCopy, piece: Ints, delay_s: float) -> None:
        number = self.fabric.next_piece()
        copy.pending[number] = (piece, self.fabric.schedule.after(delay_s, self._land, copy, number))

    def _land(self, copy: SimCopy, number: int) -> None:
        piece, _ = copy.pending.pop(number)
        self.fabric.num_pending -= 1
        assert copy.receiver is not None
        target, invited = copy.receiver
        if self.fabric.is_cut(self.node, target.node):
            self._schedule_piece(copy, piece, RETRY_S)
            return
        if cause := target.write(copy, invited, piece):
            copy.drop()
            self.fail(copy, True, cause)
            return
        copy.progress_s = self.fabric.schedule.now

    def _finish(self, copy: SimCopy) -> None:
        if copy.is_ended or copy.is_dropped:
            return
        if copy.pending:
            self.fabric.schedule.after(RETRY_S, self._finish, copy)
            return
        self._end(copy, Done(copy.ticket))

    def _check_progress(self, copy: SimCopy) -> None:
        """Fails a batch that has not moved for too long."""
        if copy.is_ended:
            return
        left_s = copy.progress_s + copy.deadline_s - self.fabric.schedule.now
        if left_s > 1e-9:
            self.fabric.schedule.after(left_s, self._check_progress, copy)
        else:
            self.fail(copy, False, f"no progress for {copy.deadline_s:g} s")


def _bytes_of(spans: Spans) -> tuple[Ints, Ints]:
    """The spans byte by byte: where each is read and where it is written."""
    lengths = spans.length
    if not len(lengths):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
    return np.repeat(spans.source, lengths) + within, np.repeat(spans.target, lengths) + within
