"""The contract that every transport keeps.

Theory. A transport moves bytes between buffers that were registered with it; it does not know what the bytes
mean. The two ends of a connection differ: the *target* owns the memory, invites a peer and grants it ranges;
the *source* connects with the description inside the invitation and submits batches of spans.

The types of the completions carry the guarantees that the rest of the system relies on:

    Done             the bytes are in the registered target buffer
    FailedQuiet      some bytes may be there, and nothing more of this batch will be written
    FailedUnknown    something of this batch may still be written after this completion was reported

A ticket ends in exactly one of these. A source reports FailedQuiet only if it knows: it did the copying
itself and has stopped, no byte left it, or the target said so after it had drained. If a connection was lost
with bytes in flight, the completion is FailedUnknown, and only the target can settle the question: `revoke`
returns RevokedQuiet if no write of that peer can land any more, else RevokedUnknown, and can be called again.

A name is valid as long as its owner lives. Every opened transport has a random incarnation, which is part of
its descriptions and of its regions; a connection is made once and never re-established implicitly. A batch
for a dead incarnation therefore fails, and cannot land in its successor, even at the same address.

Time. A ticket's clock starts when its fence is ready and restarts with every sign of progress of the ticket
(or, while it is queued, of its connection). The ticket fails when `deadline_s` pass without progress. A
fence that never becomes ready is for the caller to cancel; the peer is not blamed for it. A killed peer
shows as a failure within a second, a hung one at the deadline.

Threads. Every method may be called from any thread. Only `disconnect`, `revoke` and `close` wait for other
threads, and only for threads of this process, never for the network. `poll` never blocks; `fileno` is
readable while `poll` has something to return, so no caller has to spin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.plan.tokens import Ints

DEADLINE_S = 5.0
"""How long a ticket may go without progress, by default."""

HANDSHAKE_S = 20.0
"""How long each step of a new connection may take; its tickets keep deadlines of their own."""

Bytes: TypeAlias = NDArray[np.uint8]


class Reach(Enum):
    """How far apart the two ends may be."""

    PROCESS = "process"
    HOST = "host"
    ANYWHERE = "anywhere"


class Place(Enum):
    """Where a registered buffer may live."""

    HOST = "host"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities of a transport."""

    reach: Reach
    places: frozenset[Place]
    can_refuse_strangers: bool
    """Whether a peer without an invitation cannot write; if not, the network has to be trusted."""
    can_enforce_grants: bool
    """Whether the target refuses an invited peer's write outside of its grants."""
    can_revoke: bool
    """Whether `revoke` can stop a peer that is alive, and return RevokedQuiet."""
    needs_allocate: bool
    """Whether target buffers have to come from `allocate`."""
    needs_own_memory: bool = False
    """Whether a process can register only device memory that it allocated itself."""


class Wireable:
    """A frozen dataclass of strings and integers that travels as JSON."""

    __slots__ = ()

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        try:
            return msgspec.json.decode(raw, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as cause:
            raise TransportError(f"not a {cls.__name__} ({cause}): {raw!r}") from None


@dataclass(frozen=True, slots=True)
class Description(Wireable):
    """What a peer needs to connect. It holds a secret: send it over an authenticated channel only."""

    transport: str
    incarnation: str
    address: str
    peer: int
    secret: str


@dataclass(frozen=True, slots=True)
class RemoteRegion(Wireable):
    """A region of a target, as its peers name it."""

    incarnation: str
    number: int
    num_bytes: int
    access: str = ""
    """What else the transport needs to reach it, in the transport's own format."""


@dataclass(frozen=True, slots=True)
class Region:
    """A buffer registered with this transport."""

    remote: RemoteRegion
    place: Place

    @property
    def number(self) -> int:
        return self.remote.number

    @property
    def num_bytes(self) -> int:
        return self.remote.num_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of one connection, as this end names it."""

    number: int
    incarnation: str
    """The incarnation of the target, at both ends."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A peer that may connect to this target once, and the description that it connects with."""

    peer: Peer
    description: Description


@dataclass(frozen=True, slots=True)
class Ranges:
    """Byte ranges of one region."""

    start: Ints
    length: Ints

    @staticmethod
    def whole(region: Region) -> Ranges:
        return Ranges(np.zeros(1, dtype=np.int64), np.full(1, region.num_bytes, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans to copy from a region of the source to one of the target."""

    source: Region
    target: RemoteRegion
    spans: Spans


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submitted batch; a transport never reuses a number."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """The bytes of the batch are in the registered target buffer."""

    ticket: Ticket
    at_s: float = field(default=0.0, compare=False)
    """When the transport knew, on the monotonic clock or the wrapper's clock; 0 if not recorded."""


@dataclass(frozen=True, slots=True)
class FailedQuiet:
    """The batch failed, and nothing more of it will be written."""

    ticket: Ticket
    cause: str


@dataclass(frozen=True, slots=True)
class FailedUnknown:
    """The batch failed, and something of it may still be written."""

    ticket: Ticket
    cause: str


Completion: TypeAlias = Done | FailedQuiet | FailedUnknown


@dataclass(frozen=True, slots=True)
class RevokedQuiet:
    """No write of this peer can land any more."""


@dataclass(frozen=True, slots=True)
class RevokedUnknown:
    """A write of this peer may still land."""

    cause: str


RevokeResult: TypeAlias = RevokedQuiet | RevokedUnknown


class Fence(Protocol):
    """A condition that has to hold before a batch may read its source."""

    def is_ready(self) -> bool:
        """Whether the source may be read now; once true, it stays true."""

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back once: now if ready, else later, from any thread."""


class Transport(Protocol):
    """Moves spans between registered buffers; the docstring of this module states the guarantees."""

    @property
    def name(self) -> str:
        """The name of its module."""

    @property
    def incarnation(self) -> str:
        """A random name, unique to this opened transport."""

    @property
    def capabilities(self) -> Capabilities: ...

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed host memory that peers can write into once it is registered."""

    def adopt(self, fd: int, num_bytes: int) -> Bytes:
        """The host memory of a memfd, which another process has too, as if `allocate` had made it."""

    def register(self, buffer: object) -> Region:
        """Registers a contiguous numpy array or torch tensor for reading and writing."""

    def unregister(self, region: Region) -> None:
        """Removes a region; raises while a ticket reads it or a peer may write it."""

    def invite(self) -> Invitation:
        """At the target: admits one more peer."""

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        """At the target: allows an invited peer to write these bytes; returns a number for `ungrant`."""

    def ungrant(self, peer: Peer, grant: int) -> RevokeResult:
        """At the target: takes one grant back; quiet if no write of this peer is in progress inside it."""

    def revoke(self, peer: Peer) -> RevokeResult:
        """At the target: removes an invited peer and all its grants; can be called again."""

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """At the target: whether this peer can write a region regardless of grants, until `revoke`."""

    def connect(self, description: Description) -> Peer:
        """At the source: starts a connection; if it fails, what is submitted on it fails."""

    def disconnect(self, peer: Peer) -> None:
        """At the source: ends a connection and every ticket on it."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """At the source: queues a batch; raises on local misuse only."""

    def cancel(self, ticket: Ticket) -> None:
        """Asks the transport to give a batch up; its ticket still ends in one completion."""

    def poll(self) -> list[Completion]:
        """The completions since the last call, each once."""

    def fileno(self) -> int:
        """Readable while `poll` has something to return; valid until `close`."""

    def close(self) -> None:
        """Ends every ticket, connection and invitation; `poll` still returns how the tickets ended."""
