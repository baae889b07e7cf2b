"""What every transport promises.

Theory. A transport moves bytes between buffers that were registered with it, and knows nothing of what they
mean. The two ends of a connection are not alike: the *target* owns the memory, invites a peer and grants it
ranges; the *source* connects with the description that the invitation holds, and submits batches of spans.

Three things are said by types, because the rest of the system rests on the difference:

    Done             the bytes are in the registered target buffer
    FailedQuiet      they may be there in part, and nothing of this batch will move any more
    FailedUnknown    something of this batch may still arrive, after this completion was reported

A ticket ends in exactly one of these. A source says FailedQuiet only of what it can vouch for: that it did
the copying itself and has stopped, that no byte left it, or that the target said so after it had drained.
Where a connection was lost with bytes under way it is FailedUnknown, and the word falls to the target:
`revoke` answers Quiet when no write of that peer can land any more, else Unknown, and may be asked again.

Names do not survive their owner. Every opened transport has a random incarnation, part of its descriptions
and of the names of its regions; connections are made once and never re-made behind the caller's back. A batch
for a dead incarnation therefore fails, and cannot land in its successor, whatever address that one has.

Time. A ticket's clock starts when its fence is ready, restarts with every sign of progress on it (or, while
it waits its turn, on its connection), and fails the ticket when `deadline_s` pass without one. A fence that
never comes is for the caller to cancel: the peer is not to blame for it. A killed peer shows as a failure
within a second, a hung one at the deadline.

Threads. Every method may be called from any thread; none but `disconnect`, `revoke` and `close` waits for
another one, and those wait for threads of this process alone, never for the network. `poll` never blocks;
`fileno` is a file descriptor that is readable while `poll` has something to say, so that nobody needs to
spin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.plan.tokens import Ints

DEADLINE_S = 5.0
"""How long a ticket may go without progress unless its caller says otherwise."""

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
    """What a transport can do and, as plainly, what it cannot."""

    reach: Reach
    places: frozenset[Place]
    batch_spans_max: int
    """Spans that the backend takes at once; larger batches are split inside."""
    can_refuse_strangers: bool
    """Whether someone without an invitation is kept from writing; if not, the network has to be trusted."""
    can_enforce_grants: bool
    """Whether the target itself refuses an invited peer's write outside of what it was granted."""
    can_revoke: bool
    """Whether `revoke` can stop a peer that is alive, and so be Quiet."""
    can_announce: bool
    """Whether the target's `poll` reports Landed."""
    needs_allocate: bool
    """Whether target buffers have to come from `allocate`."""


class Wireable:
    """A frozen dataclass of strings and integers that travels as JSON."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    def to_bytes(self) -> bytes:
        """The fields as JSON text."""
        return json.dumps(self.to_json()).encode()

    @classmethod
    def from_json(cls, found: object) -> Self:
        """The opposite of `to_json`; raises on anything that does not have this form."""
        wanted = {field.name: field.type for field in fields(cls)}  # type: ignore[arg-type]
        if not isinstance(found, dict) or set(found) != set(wanted):
            raise TransportError(f"{cls.__name__} needs the fields {', '.join(wanted)}; got {found!r}")
        for name, kind in wanted.items():
            if type(found[name]).__name__ != kind:
                raise TransportError(f"{cls.__name__}.{name} has to be {kind}; got {found[name]!r}")
        return cls(**found)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The opposite of `to_bytes`."""
        try:
            found = json.loads(raw)
        except ValueError as cause:
            raise TransportError(f"{cls.__name__}: not JSON ({cause})") from None
        return cls.from_json(found)


@dataclass(frozen=True, slots=True)
class Description(Wireable):
    """What one peer needs to connect; it holds a secret, so only an authenticated channel may carry it."""

    transport: str
    incarnation: str
    address: str
    peer: int
    secret: str


@dataclass(frozen=True, slots=True)
class RemoteRegion(Wireable):
    """A region as its peers name it."""

    incarnation: str
    number: int
    num_bytes: int
    access: str = ""
    """What else the transport needs to reach it, in its own notation."""


@dataclass(frozen=True, slots=True)
class Region:
    """A buffer registered with this transport."""

    remote: RemoteRegion
    place: Place

    @property
    def number(self) -> int:
        """Which region of its transport this is."""
        return self.remote.number

    @property
    def num_bytes(self) -> int:
        """The size of the buffer."""
        return self.remote.num_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of one connection, as this end names it."""

    number: int
    incarnation: str
    """The target's, at either end."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """A peer that may connect to this target, once, and the description with which it does."""

    peer: Peer
    description: Description


@dataclass(frozen=True, slots=True)
class Ranges:
    """Byte ranges of one region: where they start and how long they are."""

    start: Ints
    length: Ints

    @staticmethod
    def whole(region: Region) -> Ranges:
        """All of a region."""
        return Ranges(np.zeros(1, dtype=np.int64), np.full(1, region.num_bytes, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Batch:
    """Spans from a region of the source to one of the target, and the tag they are announced under."""

    source: Region
    target: RemoteRegion
    spans: Spans
    tag: int = 0
    is_announced: bool = True
    """Whether the target's `poll` is to tell of it; if not, a transport may spare both ends the news."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One submitted batch; numbers are not used twice by a transport."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """The bytes of the batch are in the registered target buffer."""

    ticket: Ticket
    at_s: float = field(default=0.0, compare=False)
    """When the transport knew, on the monotonic clock or that of its wrapper; 0: it does not say."""


@dataclass(frozen=True, slots=True)
class FailedQuiet:
    """The batch failed and nothing of it will move any more."""

    ticket: Ticket
    cause: str


@dataclass(frozen=True, slots=True)
class FailedUnknown:
    """The batch failed and something of it may still arrive."""

    ticket: Ticket
    cause: str


@dataclass(frozen=True, slots=True)
class Landed:
    """At the target: the batch that a peer tagged so is in the buffer."""

    peer: Peer
    tag: int
    num_bytes: int


Completion: TypeAlias = Done | FailedQuiet | FailedUnknown
Event: TypeAlias = Completion | Landed


@dataclass(frozen=True, slots=True)
class Quiet:
    """No write of this peer can land any more."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """A write of this peer may still land."""

    cause: str


Stillness: TypeAlias = Quiet | Unknown


@dataclass(frozen=True, slots=True)
class Counters:
    """What a target turned away since it was opened."""

    num_strangers: int = 0
    num_writes_refused: int = 0


class Fence(Protocol):
    """What a copy waits for before it reads its source."""

    def is_ready(self) -> bool:
        """Whether the source may be read now; once true it stays so."""

    def call_when_ready(self, callback: Callable[[], None]) -> None:
        """Calls back once: now if ready, else later and from any thread."""


class Transport(Protocol):
    """Moves spans between registered buffers; see the head of this file for what it owes its caller."""

    @property
    def name(self) -> str:
        """The module it was found by."""

    @property
    def incarnation(self) -> str:
        """Unlike that of any transport opened before or elsewhere."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    def allocate(self, num_bytes: int) -> Bytes:
        """Zeroed host memory that peers can write into once it is registered."""

    def register(self, buffer: object) -> Region:
        """Makes a contiguous numpy array or torch tensor known, to read from and to write into."""

    def unregister(self, region: Region) -> None:
        """Forgets a region; raises while a ticket reads it or a peer may write it."""

    def invite(self) -> Invitation:
        """At the target: admits one more peer."""

    def grant(self, peer: Peer, region: Region, ranges: Ranges) -> int:
        """At the target: lets an invited peer write these bytes too; the answer is for `ungrant`."""

    def ungrant(self, peer: Peer, grant: int) -> Stillness:
        """At the target: takes one grant back; Quiet when no write of this peer is under way inside it."""

    def revoke(self, peer: Peer) -> Stillness:
        """At the target: ends an invited peer with all its grants; may be asked again."""

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """At the target: whether this peer reaches a region by itself: `revoke` ends that, and no grant."""

    def connect(self, description: Description) -> Peer:
        """At the source: begins a connection; if that fails, what is submitted on it fails."""

    def disconnect(self, peer: Peer) -> None:
        """At the source: ends a connection and every ticket on it."""

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """At the source: queues a batch; raises on local misuse alone."""

    def cancel(self, ticket: Ticket) -> None:
        """Asks that a batch be given up; its ticket ends in one completion all the same."""

    def poll(self) -> list[Event]:
        """What happened since the last call, each event once."""

    def fileno(self) -> int:
        """Readable while `poll` has something; valid until `close`."""

    def counters(self) -> Counters:
        """What was turned away so far."""

    def close(self) -> None:
        """Ends every ticket, connection and invitation; `poll` still tells how the tickets ended."""
