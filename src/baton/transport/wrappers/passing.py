"""What all wrappers do alike: pass calls on, and listen to the events of the transport inside.

One thread sleeps on the inner descriptor and gives every event to `hear`, so that the wrapper's own
descriptor is readable only when its `poll` has something, however long an event is held back.
"""

from __future__ import annotations

import select
import threading
from abc import ABC, abstractmethod

from baton.transport.base import (
    DEADLINE_S,
    Batch,
    Bytes,
    Capabilities,
    Counters,
    Description,
    Done,
    Event,
    Fence,
    Invitation,
    Peer,
    Ranges,
    Region,
    Stillness,
    Ticket,
    Transport,
)
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.watcher import Watcher
from baton.transport.wrappers.timing import SystemTime, Time


class Passing(ABC):
    """A transport that is another one but for its tickets and events."""

    def __init__(self, inner: Transport, time: Time | None) -> None:
        self.inner = inner
        self.lock = threading.Lock()
        self.mailbox = Mailbox()
        self._system = SystemTime(f"time-{inner.incarnation}")
        self.time = time or self._system
        self._is_open = True
        self._watcher = Watcher(f"wrapper-{inner.incarnation}")

    def listen(self) -> None:
        """Begins to hear; for the wrapper to call when it is ready to."""
        self._watcher.watch(self.inner.fileno(), select.EPOLLIN, lambda mask: self.hear_all())

    @abstractmethod
    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Queues a batch."""

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Asks that a batch be given up."""

    @abstractmethod
    def hear(self, event: Event) -> None:
        """With the lock held: takes one event of the inner transport."""

    @abstractmethod
    def end_held(self, peer: Peer | None, cause: str) -> None:
        """With the lock held: ends tickets of a peer, or of all, that the inner transport is done with."""

    @property
    def name(self) -> str:
        """The inner one's: a wrapped end and a plain one understand each other."""
        return self.inner.name

    @property
    def incarnation(self) -> str:
        """The inner one's."""
        return self.inner.incarnation

    @property
    def capabilities(self) -> Capabilities:
        """The inner one's."""
        return self.inner.capabilities

    def allocate(self, num_bytes: int) -> Bytes:
        """Memory of the inner transport."""
        return self.inner.allocate(num_bytes)

    def register(self, buffer: object) -> Region:
        """Makes a buffer known to the inner transport."""
        return self.inner.register(buffer)

    def unregister(self, region: Region) -> None:
        """Forgets a region."""
        self.inner.unregister(region)

    def invite(self) -> Invitation:
        """Admits one more peer."""
        return self.inner.invite()

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        """Lets an invited peer write these bytes too."""
        return self.inner.grant(peer, region, ranges)

    def ungrant(self, peer: Peer, grant: int) -> Stillness:
        """Takes one grant back."""
        return self.inner.ungrant(peer, grant)

    def revoke(self, peer: Peer) -> Stillness:
        """The inner one's word: whatever a wrapper sends, late or not, crosses the inner connection."""
        return self.inner.revoke(peer)

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """The inner one's word."""
        return self.inner.is_unchecked(peer, region)

    def connect(self, description: Description) -> Peer:
        """Begins a connection."""
        return self.inner.connect(description)

    def disconnect(self, peer: Peer) -> None:
        """Ends a connection and every ticket on it."""
        self.inner.disconnect(peer)
        self.hear_all()
        with self.lock:
            self.end_held(peer, "disconnected by the source")

    def poll(self) -> list[Event]:
        """What happened since the last call."""
        return self.mailbox.take()

    def fileno(self) -> int:
        """Readable while `poll` has something."""
        return self.mailbox.fileno()

    def counters(self) -> Counters:
        """What was turned away so far."""
        return self.inner.counters()

    def close(self) -> None:
        """Closes the inner transport and ends what was held back."""
        with self.lock:
            if not self._is_open:
                return
            self._is_open = False
        self._watcher.close()
        self._system.close()
        self.inner.close()
        self.hear_all()
        with self.lock:
            self.end_held(None, "the transport was closed")
        self.mailbox.close()

    def known_s(self, event: Done) -> float:
        """When the inner transport knew, on this wrapper's clock."""
        return event.at_s if event.at_s and self.time is self._system else self.time.now_s()

    def hear_all(self) -> None:
        """Takes what the inner transport has to say."""
        with self.lock:
            for event in self.inner.poll():
                self.hear(event)
