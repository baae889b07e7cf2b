"""Transports that break one promise each, which a check has to catch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport import (
    NOW,
    Batch,
    Completion,
    Description,
    Done,
    FailedQuiet,
    FailedUnknown,
    Fence,
    Invitation,
    Peer,
    Ranges,
    Region,
    RevokedQuiet,
    RevokeResult,
    Ticket,
    Transport,
)


class BrokenTransport:
    """Passes everything through; each subclass breaks one promise."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        return self.inner.submit(peer, batch, fence, deadline_s)

    def poll(self) -> list[Completion]:
        return self.inner.poll()


def part(spans: Spans, start: int | None, stop: int | None) -> Spans:
    return Spans(spans.source[start:stop], spans.target[start:stop], spans.length[start:stop])


def send_later(transport: Transport, peer: Peer, batch: Batch) -> None:
    def send() -> None:
        with suppress(TransportError):  # the test may be over
            transport.submit(peer, batch, NOW)

    timer = threading.Timer(0.2, send)
    timer.daemon = True
    timer.start()


class DropsLast(BrokenTransport):
    """Leaves out the last span of a batch."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        return self.inner.submit(peer, replace(batch, spans=part(batch.spans, None, -1)), fence, deadline_s)


class WritesBeside(BrokenTransport):
    """Lets one byte land beside the last span, as a copy in whole words would."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        length = batch.spans.length.copy()
        room = batch.target.num_bytes - (batch.spans.target + length)
        room = (room > 0) & (batch.spans.source + length < batch.source.num_bytes)
        length[room.nonzero()[0][-1:]] += 1
        spans = Spans(batch.spans.source, batch.spans.target, length)
        return self.inner.submit(peer, replace(batch, spans=spans), fence, deadline_s)


class ReportsEarly(BrokenTransport):
    """Reports a batch when half of it is there."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        half = len(batch.spans) // 2
        ticket = self.inner.submit(
            peer, replace(batch, spans=part(batch.spans, None, half)), fence, deadline_s
        )
        late = replace(batch, spans=part(batch.spans, half, None))
        if ticket.number % 100 == 0:
            send_later(self.inner, peer, late)
        return ticket


class MixesThreads(BrokenTransport):
    """Keeps the batch at hand where every thread can overwrite it."""

    current: Batch

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        self.current = batch
        time.sleep(0.001)
        return self.inner.submit(peer, self.current, fence, deadline_s)


class KnowsOnePeer(BrokenTransport):
    """Sends everything over the connection that was made first."""

    first: Peer | None = None

    def connect(self, description: Description) -> Peer:
        peer = self.inner.connect(description)
        self.first = self.first or peer
        return peer

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        assert self.first
        target = replace(batch.target, incarnation=self.first.incarnation)
        return self.inner.submit(self.first, replace(batch, target=target), fence, deadline_s)


class ForgetsInUse(BrokenTransport):
    """Lets a region go that a ticket is reading."""

    def unregister(self, region: Region) -> None:
        try:
            self.inner.unregister(region)
        except TransportError:
            return


class WritesAfterCancel(BrokenTransport):
    """Says that a cancelled batch is quiet, and sends it later."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.batches: dict[Ticket, tuple[Peer, Batch]] = {}

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        ticket = self.inner.submit(peer, batch, fence, deadline_s)
        self.batches[ticket] = (peer, batch)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        self.inner.cancel(ticket)
        peer, batch = self.batches[ticket]
        send_later(self.inner, peer, batch)


class HidesFailures(BrokenTransport):
    """Never reports a batch that failed."""

    def poll(self) -> list[Completion]:
        return [event for event in self.inner.poll() if not isinstance(event, FailedQuiet | FailedUnknown)]


class SaysDone(BrokenTransport):
    """Calls a failed batch done."""

    def poll(self) -> list[Completion]:
        return [
            Done(event.ticket) if isinstance(event, FailedQuiet | FailedUnknown) else event
            for event in self.inner.poll()
        ]


class CallsUnknownQuiet(BrokenTransport):
    """Says that nothing will move any more, though it cannot know."""

    def poll(self) -> list[Completion]:
        return [
            FailedQuiet(event.ticket, event.cause) if isinstance(event, FailedUnknown) else event
            for event in self.inner.poll()
        ]


class Antedates(BrokenTransport):
    """Says that bytes were there sooner than they were."""

    def poll(self) -> list[Completion]:
        return [
            Done(event.ticket, event.at_s - 0.04) if isinstance(event, Done) else event
            for event in self.inner.poll()
        ]


class Postdates(BrokenTransport):
    """Says that bytes will have been there."""

    def poll(self) -> list[Completion]:
        return [
            Done(event.ticket, event.at_s + 0.5) if isinstance(event, Done) else event
            for event in self.inner.poll()
        ]


class SaysTwice(BrokenTransport):
    """Reports a completion a second time."""

    def poll(self) -> list[Completion]:
        return [event for event in self.inner.poll() for _ in range(2)]


class GrantsEverything(BrokenTransport):
    """At the target: lets a peer write all of a region of which it was granted a part."""

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        return self.inner.grant(peer, region, Ranges.whole(region))


class SendsToSuccessor(BrokenTransport):
    """Sends what failed once more, to whoever is connected next."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.batches: list[Batch] = []

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        self.batches.append(batch)
        return self.inner.submit(peer, batch, fence, deadline_s)

    def connect(self, description: Description) -> Peer:
        peer = self.inner.connect(description)
        for batch in self.batches:
            target = replace(batch.target, incarnation=description.incarnation)
            self.inner.submit(peer, replace(batch, target=target), NOW)
        return peer


class LeaksOnConnect(BrokenTransport):
    """Leaves a file descriptor behind for every connection."""

    def connect(self, description: Description) -> Peer:
        os.dup(0)
        return self.inner.connect(description)


class BlocksInSubmit(BrokenTransport):
    """Makes the caller wait until the batch is over."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.events: list[Completion] = []

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        ticket = self.inner.submit(peer, batch, fence, deadline_s)
        limit = time.monotonic() + deadline_s
        while time.monotonic() < limit and not fence.is_ready():
            time.sleep(0.01)
        for _ in range(len(batch.spans)):
            self.events += self.inner.poll()
        return ticket

    def poll(self) -> list[Completion]:
        events, self.events = self.events, []
        return events + self.inner.poll()


class Spins(BrokenTransport):
    """Keeps a thread running while there is nothing to do."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.is_closed = False
        threading.Thread(target=self.spin, daemon=True).start()

    def spin(self) -> None:
        while not self.is_closed:
            self.inner.fileno()

    def close(self) -> None:
        self.is_closed = True
        self.inner.close()


class IgnoresFence(BrokenTransport):
    """Reads the source before it is ready."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = 5.0) -> Ticket:
        return self.inner.submit(peer, batch, NOW, deadline_s)


class SaysQuiet(BrokenTransport):
    """At the target: calls a peer quiet and lets it write on."""

    def revoke(self, peer: Peer) -> RevokeResult:
        return RevokedQuiet()


class SaysUnchecked(BrokenTransport):
    """At the target: says that grants do not matter, and has them matter."""

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        return True


class LetsStrangersIn(BrokenTransport):
    """At the target: has a secret that everybody knows."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        open_writer = inner.open_writer
        inner.open_writer = lambda peer, secret: open_writer(peer, "00" * 16)

    def invite(self) -> Invitation:
        invitation = self.inner.invite()
        return replace(invitation, description=replace(invitation.description, secret="00" * 16))


class ForgetsOnClose(BrokenTransport):
    """Closes without a word about the tickets."""

    def close(self) -> None:
        self.inner.close()
        self.inner.poll()


BROKEN: dict[str, Callable[[Transport], Any]] = {
    kind.__name__: kind for kind in BrokenTransport.__subclasses__()
}
