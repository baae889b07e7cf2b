"""Who was invited to write at a target rank, and what a grant has given to whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.errors import BatonError
from baton.plan.binding import TransferTerms
from baton.protocol.landing import Landing
from baton.session.staging import Lease
from baton.transport import Invitation, Quiet, RevokeResult


class PathGoneError(BatonError):
    """The way that a grant names is no longer there."""


class StagingFullError(BatonError):
    """There is no room to unpack in."""


@dataclass(slots=True)
class Guest:
    """A source rank that was invited."""

    session: int
    source_rank: int
    number: int
    invitation: Invitation
    grants: set[bytes] = field(default_factory=set)
    is_retired: bool = False
    """Replaced by a newer path, or its session ended: it goes when its last grant does."""
    is_revoked: bool = False
    is_gone: bool = False
    """Revoked, and quiet."""
    is_unchecked: bool = False
    """Reaches every pool by itself: permissions would change nothing, and only turning it out stops it."""


@dataclass(slots=True)
class Bay:
    """One lane of a grant: who may write, under which permissions of the transport, into which staging."""

    guest: Guest
    permissions: list[int] = field(default_factory=list)
    lease: Lease | None = None
    stillness: RevokeResult = field(default_factory=Quiet)
    """What the transport said when the permissions were taken back."""


@dataclass(slots=True)
class Incoming:
    """One grant at this rank: its machine's record and what the driver keeps beside it."""

    record: Landing
    bays: dict[int, Bay]
    """By source rank."""
    terms: TransferTerms | None = None
    """Set when it is opened."""
