"""What the target's coordinator keeps of one transfer; what happens to it, and what it then asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from baton.protocol.deadlines import Deadlines
from baton.protocol.ledger import Ledger, Pair, Rectangle
from baton.protocol.messages import AnyMessage, Commit, Grant, Landed, Lane, Settled
from baton.protocol.outcomes import Aux, Cause, Outcome


class ReceiverState(Enum):
    """Where a target instance is with one transfer."""

    PREPARING = "preparing"
    OPENING = "opening"
    GRANTED = "granted"
    READY = "ready"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class Terms(msgspec.Struct, frozen=True):
    """What a grant is held against: who has to commit, which bytes are due, which pairs need work."""

    sources: frozenset[int]
    expected: Mapping[Pair, Mapping[str, int]]
    """Bytes by pair and component."""
    worked: frozenset[Pair]
    """Pairs whose chunks the target rank unpacks or checks before they count."""
    targets: Mapping[int, tuple[int, ...]]
    """By source rank: the target ranks that it sends to."""


class Account(msgspec.Struct, frozen=True):
    """What has come in for a grant so far."""

    ledger: Ledger
    chunks: Mapping[tuple[int, int], Rectangle] = msgspec.field(default_factory=dict)
    """By source rank and chunk number."""
    at_work: frozenset[tuple[int, int, int]] = frozenset()
    """Source rank, target rank, chunk: being unpacked or checked."""
    commits: Mapping[int, Commit] = msgspec.field(default_factory=dict)
    aux: Aux | None = None


class Closing(msgspec.Struct, frozen=True):
    """How the way back of the pages stands."""

    is_quiet: bool = False
    """The source said so, or never had the grant."""
    must_still: bool = False
    """The source cannot say so: the transport has to."""
    is_asked: bool = False
    closed: frozenset[int] = frozenset()
    interval_s: float = 0.0
    ask_at: float = 0.0


class Arrival(msgspec.Struct, frozen=True):
    """The record of one transfer at its target's coordinator."""

    transfer: str
    instance: str
    ranks: frozenset[int]
    num_tokens: int
    digest: bytes
    deadlines: Deadlines
    state: ReceiverState = ReceiverState.PREPARING
    grant: Grant | None = None
    terms: Terms | None = None
    account: Account | None = None
    opened: frozenset[int] = frozenset()
    is_ahead: bool = False
    """Whether it was granted before its ranks had opened."""
    outcome: Outcome | None = None
    closing: Closing = Closing()

    def settled(self, outcome: Outcome) -> Settled:
        """The word that tells the source how it ended."""
        assert self.grant is not None
        return Settled(transfer=self.transfer, grant=self.grant.grant, outcome=outcome)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Pages, their fences, the session and its paths are all there."""

    grant: Grant
    terms: Terms
    ledger: Ledger
    is_ahead: bool = False
    """Whether the source hears of it before the ranks have opened: where that keeps nobody from writing."""


@dataclass(frozen=True, slots=True)
class RankOpened:
    """A rank lets the grant's lanes write."""

    rank: int
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank could not open, unpack or vouch for what landed."""

    rank: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class Offered:
    """The source says what it prefills."""

    num_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkLanded:
    """The source says that a chunk is in the registered buffers."""

    landed: Landed


@dataclass(frozen=True, slots=True)
class ChunkUnpacked:
    """A rank has a chunk where it belongs, and found it right if it was to look."""

    rank: int
    source_rank: int
    chunk: int


@dataclass(frozen=True, slots=True)
class SourceCommitted:
    """A source rank's manifest."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class AuxArrived:
    """The aux record, perhaps as the end of the answer."""

    aux: Aux
    is_final: bool


@dataclass(frozen=True, slots=True)
class SourceAborted:
    """The source failed, refused or gave up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class SourceQuiet:
    """Nothing of the grant moves any more."""


@dataclass(frozen=True, slots=True)
class SourceUnquiet:
    """The source cannot say whether something still moves."""

    text: str


@dataclass(frozen=True, slots=True)
class CallerAborted:
    """The engine gave the transfer up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The link to the source is gone, or was never made."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class RankClosed:
    """A rank took the permissions back; `is_still` when no write can land under them any more."""

    rank: int
    is_still: bool


@dataclass(frozen=True, slots=True)
class VerdictAsked:
    """The source has not heard how it ended."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class OpenRanks:
    """Have every rank of the target let the lanes write."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class SendGrant:
    """From here on the source may write."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class ToSource:
    """Send to the source, if there is a session."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class TellAux:
    """Tell whoever asked what the source has sampled; the transfer may still fail."""

    aux: Aux


@dataclass(frozen=True, slots=True)
class UnpackAt:
    """Have a rank unpack or check a chunk."""

    rank: int
    landed: Landed


@dataclass(frozen=True, slots=True)
class CloseRanks:
    """Have these ranks take the permissions back."""

    ranks: tuple[int, ...]
    must_still: bool


@dataclass(frozen=True, slots=True)
class Conclude:
    """Tell every rank how it ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Release:
    """The pages are the engine's again."""
