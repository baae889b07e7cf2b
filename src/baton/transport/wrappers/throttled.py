"""A link of a given speed in front of a transport.

Theory. The inner transport copies as fast as it can, as soon as a fence is ready; beside it every batch is
put on a `Link`, which is arithmetic alone: a batch of B bytes begins to cross when it is ready and the one
before it has crossed, takes B / bytes_per_s, and is there latency_s later. Done is reported when the link has
delivered the batch *and* the inner transport has. So Done is never early and always true; it is late where
the inner transport is slower than the link. Links carry in the order in which fences become ready.

What is timed is the source's completion alone. The bytes are in the target's memory before their time, and
its inner transport would announce them then; a target behind this wrapper therefore announces nothing
(`can_announce` is false) and learns of a batch from its source. A target that is not wrapped hears Landed
early: for measurements wrap both ends.

A batch that is cancelled, disconnected or closed while the link holds it back ends in FailedQuiet: its bytes
may be there, and nothing of it moves any more. The link then goes on with the next one at once. The link
always makes progress, so a deadline is the inner transport's alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
from dataclasses import dataclass, replace
from functools import partial

from baton.errors import ConfigError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Capabilities,
    Done,
    Event,
    FailedQuiet,
    Fence,
    Landed,
    Peer,
    Ticket,
    Transport,
)
from baton.transport.parts.tickets import CANCELLED
from baton.transport.wrappers.links import Link, Parcel
from baton.transport.wrappers.passing import Passing
from baton.transport.wrappers.timing import Time


@dataclass(frozen=True, slots=True)
class ThrottledConfig:
    """How fast the link is; 100 Gb/s is 12.5e9 bytes per second."""

    bytes_per_s: float
    latency_s: float = 0.0
    is_shared: bool = False
    """Whether all peers share one link; otherwise each has its own."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s has to be positive; got {self.bytes_per_s}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s has to be a number of seconds, 0 or more; got {self.latency_s}")


@dataclass(slots=True, eq=False)
class _Road:
    """A link and when the first of the loads on it is due that have arrived."""

    link: Link[_Load]
    due_s: float = math.inf


@dataclass(slots=True, eq=False, kw_only=True)
class _Load(Parcel):
    """A batch on its link."""

    ticket: Ticket
    peer: Peer
    road: _Road | None = None
    """Where it crosses; none before its fence is ready."""
    arrived_s: float = 0.0
    is_due: bool = False
    is_cancelled: bool = False


class Throttled(Passing):
    """A transport whose batches are done no sooner than a link would have carried them."""

    def __init__(self, inner: Transport, config: ThrottledConfig, time: Time | None = None) -> None:
        self.config = config
        self.roads: dict[Peer | None, _Road] = {}
        self.loads: dict[Ticket, _Load] = {}
        self._due: list[tuple[float, int, _Road]] = []
        self._numbers = itertools.count()
        self._alarm_s = math.inf
        super().__init__(inner, time)
        self._alarm = self.time.alarm()
        self._epoll = select.epoll()
        self._epoll.register(self._alarm.fileno(), select.EPOLLIN)
        self._epoll.register(self.mailbox.fileno(), select.EPOLLIN)
        self.listen()

    @property
    def capabilities(self) -> Capabilities:
        """The inner one's, without announcements: they would come before their time."""
        return replace(self.inner.capabilities, can_announce=False)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch with the inner transport and, when its fence is ready, on the link."""
        now_s = self.time.now_s()
        is_ready = fence.is_ready()
        with self.lock:  # held while submitting, so that no completion is heard before its load is known
            ticket = self.inner.submit(peer, batch, fence, deadline_s)
            load = self.loads[ticket] = _Load(batch.spans.num_bytes, ticket=ticket, peer=peer)
            if is_ready:
                self._enter(load, now_s)
        if not is_ready:
            fence.call_when_ready(partial(self._become_ready, load))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a batch that the link holds back; asks the inner transport about any other."""
        with self.lock:
            load = self.loads.get(ticket)
            if load is None:
                return
            load.is_cancelled = True
            if load.has_arrived:
                self._fail(load, CANCELLED)
        self.inner.cancel(ticket)

    def disconnect(self, peer: Peer) -> None:
        """Ends a connection, every ticket on it, and its link."""
        super().disconnect(peer)
        with self.lock:
            self.roads.pop(peer, None)

    def poll(self) -> list[Event]:
        """What happened since the last call and is due."""
        if self._alarm_s <= self.time.now_s():
            with self.lock:
                self._deliver(self.time.now_s())
        return self.mailbox.take()

    def fileno(self) -> int:
        """Readable while `poll` has something: a timer of the kernel rings, or a batch failed or was late."""
        return self._epoll.fileno()

    def close(self) -> None:
        """Closes the inner transport and ends what the link holds back."""
        super().close()
        with self.lock:
            if not self._epoll.closed:
                self._epoll.close()
                self._alarm.close()

    def hear(self, event: Event) -> None:
        """Holds Done back until it is due, and lets failures through at once."""
        if isinstance(event, Landed):
            return
        load = self.loads[event.ticket]
        if not isinstance(event, Done):
            self._forget(load)
            self.mailbox.put(event)
            return
        load.has_arrived, load.arrived_s = True, self.known_s(event)
        if load.is_cancelled:
            self._fail(load, CANCELLED)
        elif load.is_due:
            self._finish(load)
        else:
            now_s = self.time.now_s()
            road = load.road or self._enter(load, now_s)  # the inner transport may hear of a fence first
            self._deliver_from(road, now_s)
            self._set_alarm()

    def end_held(self, peer: Peer | None, cause: str) -> None:
        """Ends what has arrived and is not due."""
        for load in list(self.loads.values()):
            if load.has_arrived and peer in (None, load.peer):
                self._fail(load, cause)

    def _become_ready(self, load: _Load) -> None:
        now_s = self.time.now_s()
        with self.lock:
            if load.road is None and not load.is_dropped:
                self._enter(load, now_s)

    def _enter(self, load: _Load, ready_s: float) -> _Road:
        road = load.road = self._road(load.peer)
        road.link.put(load, ready_s)
        return road

    def _road(self, peer: Peer) -> _Road:
        key = None if self.config.is_shared else peer
        road = self.roads.get(key)
        if road is None:
            road = self.roads[key] = _Road(Link(self.config.bytes_per_s, self.config.latency_s))
        return road

    def _deliver(self, now_s: float) -> None:
        """Reports what is due and has arrived, on any road."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, road = heapq.heappop(self._due)
            if due_s == road.due_s:
                self._deliver_from(road, now_s)
        self._set_alarm()

    def _deliver_from(self, road: _Road, now_s: float) -> None:
        for load in road.link.take_due(now_s):
            load.is_due = True
            if load.has_arrived:
                self._finish(load)
        self._look_ahead(road)

    def _look_ahead(self, road: _Road) -> None:
        due_s = road.link.next_due_s()
        if due_s != road.due_s and due_s < math.inf:
            heapq.heappush(self._due, (due_s, next(self._numbers), road))
        road.due_s = due_s

    def _set_alarm(self) -> None:
        while self._due and self._due[0][0] != self._due[0][2].due_s:
            heapq.heappop(self._due)  # its road is due at another time by now
        due_s = self._due[0][0] if self._due else math.inf
        if due_s != self._alarm_s:
            self._alarm_s = due_s
            self._alarm.set(due_s)

    def _finish(self, load: _Load) -> None:
        del self.loads[load.ticket]
        due_s = load.crossed_s + self.config.latency_s
        self.mailbox.put(Done(load.ticket, max(due_s, load.arrived_s)))

    def _fail(self, load: _Load, cause: str) -> None:
        self._forget(load)
        self.mailbox.put(FailedQuiet(load.ticket, cause))

    def _forget(self, load: _Load) -> None:
        del self.loads[load.ticket]
        load.is_dropped = True
        if load.road is not None and not load.is_due:
            load.road.link.drop(load, self.time.now_s())
            if load.road.due_s < math.inf:
                self._look_ahead(load.road)
                self._set_alarm()


def throttled(inner: Transport, config: ThrottledConfig, time: Time | None = None) -> Transport:
    """A transport behind a link of the configured speed."""
    return Throttled(inner, config, time)


CONFIG = ThrottledConfig
WRAPPER = throttled
