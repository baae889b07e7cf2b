"""A transport behind a simulated link of a given speed, for benchmarks and demonstrations.

Theory. The inner transport copies as fast as it can, as soon as a fence is ready. Beside it every batch is
put on a `LinkSchedule`, which only computes times: a batch of B bytes starts to cross when it is ready and
the one before it has crossed, takes B / bytes_per_s, and arrives latency_s later. Done is reported when both
the link and the inner transport have delivered the batch. So Done is never early and always true; it is late
if the inner transport is slower than the link. All peers share one link, as those of a rank share its network
card; it carries batches in the order in which their fences become ready.

Only the source's completion is timed; the bytes are in the target's memory earlier.

A batch that is cancelled, disconnected or closed while the link holds it back ends in FailedQuiet: its bytes
may be there, and nothing more of it moves. The link then goes on with the next one at once. The link always
makes progress, so deadlines are the inner transport's alone.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from baton.errors import ConfigError
from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Completion,
    Done,
    FailedQuiet,
    Fence,
    Peer,
    Ticket,
    Transport,
)
from baton.transport.common.threads import Watcher
from baton.transport.common.tickets import CANCELLED, EventQueue

_TIMER_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm(Protocol):
    """A file descriptor that is readable from a certain time on."""

    def set(self, when_s: float) -> None:
        """Replaces the time, whether reached or not; infinite is never."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since some moment; never goes back."""

    def alarm(self) -> Alarm: ...


class SystemClock:
    """The monotonic clock, with alarms of the kernel, which wake a sleeper within 15 to 40 us."""

    def now_s(self) -> float:
        return time.monotonic()

    def alarm(self) -> TimerFd:
        return TimerFd()


class TimerFd:
    """A timerfd on the monotonic clock; Python has none before 3.13."""

    def __init__(self) -> None:
        flags = os.O_NONBLOCK | os.O_CLOEXEC  # the values of TFD_NONBLOCK and TFD_CLOEXEC
        self._fd: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, flags)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def set(self, when_s: float) -> None:
        when_ns = 0 if when_s == math.inf else max(1, math.ceil(when_s * 1e9))
        # Two timespecs: the interval, none, and the first time; zero turns the timer off.
        setting = (ctypes.c_long * 4)(0, 0, when_ns // 10**9, when_ns % 10**9)
        if _libc.timerfd_settime(self._fd, _TIMER_ABSOLUTE, setting, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class TransportWrapper(ABC):
    """A transport that is another one except for its tickets and events.

    One thread waits on the inner descriptor and passes every event to `on_event`, so that the wrapper's own
    descriptor is readable only when its `poll` has something, however long an event is held back.
    """

    def __init__(self, inner: Transport, clock: Clock) -> None:
        self.inner = inner
        self.clock = clock
        self.lock = threading.Lock()
        self.events = EventQueue()
        self._is_open = True
        self._watcher = Watcher(f"wrapper-{inner.incarnation}")

    def start(self) -> None:
        """Starts to read the inner events; the subclass calls it at the end of its `__init__`."""
        self._watcher.watch(self.inner.fileno(), select.EPOLLIN, lambda mask: self.read_events())

    @abstractmethod
    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket: ...

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None: ...

    @abstractmethod
    def on_event(self, event: Completion) -> None:
        """With the lock held: handles one event of the inner transport."""

    @abstractmethod
    def end_held(self, peer: Peer | None, cause: str) -> None:
        """With the lock held: ends tickets of a peer, or all, that the inner transport is done with."""

    def __getattr__(self, name: str) -> Any:
        """All else is the inner transport's: a wrapped end and a plain one can connect, and a revocation
        holds, since all that a wrapper sends crosses the inner connection."""
        return getattr(self.inner, name)

    def disconnect(self, peer: Peer) -> None:
        self.inner.disconnect(peer)
        self.read_events()
        with self.lock:
            self.end_held(peer, "disconnected by the source")

    def poll(self) -> list[Completion]:
        return self.events.take_all()

    def fileno(self) -> int:
        return self.events.fileno()

    def close(self) -> None:
        with self.lock:
            if not self._is_open:
                return
            self._is_open = False
        self._watcher.close()
        self.inner.close()
        self.read_events()
        with self.lock:
            self.end_held(None, "the transport was closed")
        self.events.close()

    def done_s(self, event: Done) -> float:
        """When the inner transport knew, on this wrapper's clock."""
        return event.at_s if event.at_s and isinstance(self.clock, SystemClock) else self.clock.now_s()

    def read_events(self) -> None:
        with self.lock:
            for event in self.inner.poll():
                self.on_event(event)


@dataclass(slots=True, eq=False)
class LinkItem:
    """Something of a size that crosses a link."""

    num_bytes: int
    ready_s: float = math.inf
    """When it may start to cross."""
    crossed_s: float = math.inf
    """When its last byte is on the link; known once it is the first in the queue."""
    has_arrived: bool = False
    """Whether the inner transport has delivered it, so that it waits only for its time."""
    is_dropped: bool = False

    @property
    def is_on_link(self) -> bool:
        return self.ready_s < math.inf


ItemT = TypeVar("ItemT", bound=LinkItem)


class LinkSchedule(Generic[ItemT]):
    """Computes when items are due; the caller passes the times, and it holds no lock and no clock."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_s = -math.inf
        self._queue: deque[ItemT] = deque()
        self._crossed: deque[ItemT] = deque()

    def put(self, item: ItemT, ready_s: float) -> None:
        """Appends an item that may cross from this time on."""
        item.ready_s = ready_s
        self._queue.append(item)
        if len(self._queue) == 1:
            self._begin_next()

    def drop(self, item: ItemT, now_s: float) -> None:
        """Removes an item; the items behind it use the time that it has not used."""
        self._cross(now_s)
        item.is_dropped = True
        if self._queue and self._queue[0] is item:
            self._free_s = max(self._free_s, now_s)
            self._begin_next()

    def take_due(self, now_s: float) -> list[ItemT]:
        """The items that are due by now, each once."""
        self._cross(now_s)
        due: list[ItemT] = []
        while self._crossed and self._crossed[0].crossed_s + self._latency_s <= now_s:
            item = self._crossed.popleft()
            if not item.is_dropped:
                due.append(item)
        return due

    def next_due_s(self) -> float:
        """When the first of the items that have arrived is due; infinite if there is none."""
        for item in self._crossed:
            if item.has_arrived and not item.is_dropped:
                return item.crossed_s + self._latency_s
        free_s = self._free_s
        for item in self._queue:
            if not item.is_dropped:
                free_s = self._time_across(item, free_s)
                if item.has_arrived:
                    return free_s + self._latency_s
        return math.inf

    def _cross(self, now_s: float) -> None:
        while self._queue and self._queue[0].crossed_s <= now_s:
            item = self._queue.popleft()
            self._free_s = item.crossed_s
            self._crossed.append(item)
            self._begin_next()

    def _begin_next(self) -> None:
        while self._queue and self._queue[0].is_dropped:
            self._queue.popleft()
        if self._queue:
            self._queue[0].crossed_s = self._time_across(self._queue[0], self._free_s)

    def _time_across(self, item: LinkItem, free_s: float) -> float:
        return max(free_s, item.ready_s) + item.num_bytes / self._bytes_per_s


@dataclass(frozen=True, slots=True)
class ThrottledConfig:
    """The speed of the link; 100 Gb/s is 12.5e9 bytes per second."""

    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise ConfigError(f"bytes_per_s has to be positive; got {self.bytes_per_s}")
        if not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"latency_s has to be a number of seconds, 0 or more; got {self.latency_s}")


@dataclass(slots=True, eq=False, kw_only=True)
class _LinkBatch(LinkItem):
    ticket: Ticket
    peer: Peer
    arrived_s: float = 0.0
    is_due: bool = False
    is_cancelled: bool = False


class Throttled(TransportWrapper):
    """A transport whose batches are Done no sooner than the one link of its peers would have carried them."""

    def __init__(self, inner: Transport, config: ThrottledConfig, clock: Clock | None = None) -> None:
        super().__init__(inner, clock or SystemClock())
        self.config = config
        self.link: LinkSchedule[_LinkBatch] = LinkSchedule(config.bytes_per_s, config.latency_s)
        self.batches: dict[Ticket, _LinkBatch] = {}
        self._alarm_s = math.inf
        self._alarm = self.clock.alarm()
        self._epoll = select.epoll()
        self._epoll.register(self._alarm.fileno(), select.EPOLLIN)
        self._epoll.register(self.events.fileno(), select.EPOLLIN)
        self.start()

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch with the inner transport and, when its fence is ready, on the link."""
        now_s = self.clock.now_s()
        is_ready = fence.is_ready()
        with self.lock:  # held while submitting, so that no completion comes before its batch is known
            ticket = self.inner.submit(peer, batch, fence, deadline_s)
            item = self.batches[ticket] = _LinkBatch(batch.spans.num_bytes, ticket=ticket, peer=peer)
            if is_ready:
                self.link.put(item, now_s)
        if not is_ready:
            fence.call_when_ready(partial(self._on_ready, item))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a batch that the link holds back; any other is the inner transport's to cancel."""
        with self.lock:
            batch = self.batches.get(ticket)
            if batch is None:
                return
            batch.is_cancelled = True
            if batch.has_arrived:
                self._fail(batch, CANCELLED)
        self.inner.cancel(ticket)

    def poll(self) -> list[Completion]:
        if self._alarm_s <= self.clock.now_s():
            with self.lock:
                self._deliver(self.clock.now_s())
        return self.events.take_all()

    def fileno(self) -> int:
        """Readable when a batch is due, by a timer of the kernel, and when one failed or was late."""
        return self._epoll.fileno()

    def close(self) -> None:
        super().close()
        with self.lock:
            if not self._epoll.closed:
                self._epoll.close()
                self._alarm.close()

    def on_event(self, event: Completion) -> None:
        """Holds Done back until it is due, and passes failures on at once."""
        batch = self.batches[event.ticket]
        if not isinstance(event, Done):
            self._forget(batch)
            self.events.put(event)
            return
        batch.has_arrived, batch.arrived_s = True, self.done_s(event)
        if batch.is_cancelled:
            self._fail(batch, CANCELLED)
        elif batch.is_due:
            self._finish(batch)
        else:
            now_s = self.clock.now_s()
            if not batch.is_on_link:  # the inner fence callback may come first
                self.link.put(batch, now_s)
            self._deliver(now_s)

    def end_held(self, peer: Peer | None, cause: str) -> None:
        for batch in list(self.batches.values()):
            if batch.has_arrived and peer in (None, batch.peer):
                self._fail(batch, cause)

    def _on_ready(self, batch: _LinkBatch) -> None:
        now_s = self.clock.now_s()
        with self.lock:
            if not batch.is_on_link and not batch.is_dropped:
                self.link.put(batch, now_s)

    def _deliver(self, now_s: float) -> None:
        """Reports what is due and has arrived."""
        for batch in self.link.take_due(now_s):
            batch.is_due = True
            if batch.has_arrived:
                self._finish(batch)
        self._set_alarm()

    def _set_alarm(self) -> None:
        due_s = self.link.next_due_s()
        if due_s != self._alarm_s:
            self._alarm_s = due_s
            self._alarm.set(due_s)

    def _finish(self, batch: _LinkBatch) -> None:
        del self.batches[batch.ticket]
        due_s = batch.crossed_s + self.config.latency_s
        self.events.put(Done(batch.ticket, max(due_s, batch.arrived_s)))

    def _fail(self, batch: _LinkBatch, cause: str) -> None:
        self._forget(batch)
        self.events.put(FailedQuiet(batch.ticket, cause))

    def _forget(self, batch: _LinkBatch) -> None:
        del self.batches[batch.ticket]
        batch.is_dropped = True
        if batch.is_on_link and not batch.is_due:
            self.link.drop(batch, self.clock.now_s())
            self._set_alarm()


def throttle(inner: Transport, bytes_per_s: float, latency_s: float = 0.0) -> Transport:
    """Puts a transport behind a link of this speed; the wrapper owns the inner transport from now on."""
    return cast(Transport, Throttled(inner, ThrottledConfig(bytes_per_s, latency_s)))
