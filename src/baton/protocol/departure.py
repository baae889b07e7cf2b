"""What the source's coordinator keeps of one transfer; what happens to it, and what it then asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from baton.protocol.deadlines import Deadlines
from baton.protocol.machine import Effects
from baton.protocol.messages import (
    Abort,
    AnyMessage,
    AuxRecord,
    Commit,
    Grant,
    Landed,
    Offer,
    Quiet,
    Settled,
)
from baton.protocol.outcomes import Cause, Outcome, Stage, Why


class OfferState(Enum):
    """Where a source instance is with one transfer."""

    OPEN = "open"
    DECIDED = "decided"
    RUNNING = "running"
    COMMITTED = "committed"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Prefill:
    """What was prefilled, as its ranks say: length, digest and dp group."""

    num_tokens: int
    digest: bytes
    source_dp: int


class Departure(msgspec.Struct, frozen=True):
    """The record of one transfer at its source's coordinator."""

    transfer: str
    instance: str
    deadlines: Deadlines
    state: OfferState = OfferState.OPEN
    ranks: frozenset[int] = frozenset()
    """All that have to take part: the ranks of the dp group, once it is known."""
    joined: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()
    quiet: frozenset[int] = frozenset()
    prefill: Prefill | None = None
    grant: Grant | None = None
    aux: AuxRecord | None = None
    outcome: Outcome | None = None
    """How it ended; while committed, how it ends unless the target says otherwise."""
    doubt: str = ""
    askers: frozenset[int] = frozenset()
    """Sessions that asked for the dp group before it was known."""

    @property
    def final(self) -> AuxRecord | None:
        """The whole answer, once every rank of the group has said what it prefilled."""
        is_final = self.aux is not None and self.aux.is_final and self.joined >= self.ranks
        return self.aux if is_final else None

    def settled(self, outcome: Outcome) -> Settled:
        """The word that tells a rank how it ended."""
        grant = self.grant.grant if self.grant else b""
        return Settled(transfer=self.transfer, grant=grant, outcome=outcome)

    def stamped(self, record: AuxRecord) -> AuxRecord:
        """The aux record under the grant that has come since."""
        assert self.grant is not None
        return msgspec.structs.replace(record, grant=self.grant.grant)

    def offer(self, prefill: Prefill) -> Offer:
        """The word that tells a target what is prefilled here."""
        return Offer(
            transfer=self.transfer,
            num_tokens=prefill.num_tokens,
            digest=prefill.digest,
            source_dp=prefill.source_dp,
        )

    def mismatch(self, prefill: Prefill) -> Cause | None:
        """Why the grant is not for what was prefilled; None if it is."""
        grant = self.grant
        assert grant is not None
        if (grant.num_tokens, grant.digest) != (prefill.num_tokens, prefill.digest):
            text = (
                f"granted for {grant.num_tokens} tokens (digest {grant.digest.hex()}), "
                f"prefilled {prefill.num_tokens} ({prefill.digest.hex()})"
            )
            return self.cause(Why.REFUSED_PROMPT, Stage.GRANT, text)
        if grant.source_dp != prefill.source_dp:
            text = f"granted to dp group {grant.source_dp}, prefilled by group {prefill.source_dp}"
            return self.cause(Why.REFUSED_PROMPT, Stage.GRANT, text)
        return None

    def cause(self, why: Why, stage: Stage, text: str, rank: int = -1) -> Cause:
        """A cause on this instance."""
        return Cause(why=why, stage=stage, instance=self.instance, rank=rank, text=text)


@dataclass(frozen=True, slots=True)
class RankOffered:
    """A rank began to prefill; `ranks` are those of its dp group."""

    rank: int
    prefill: Prefill
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class Inquired:
    """A target asks for the dp group."""

    session: int


@dataclass(frozen=True, slots=True)
class GrantArrived:
    """A target gives permission to write; `ranks` are those of the dp group that it names."""

    grant: Grant
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class RankLanded:
    """A rank's chunk is in the target's buffers."""

    landed: Landed


@dataclass(frozen=True, slots=True)
class RankCommitted:
    """A rank sent everything and is quiet."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class AuxGiven:
    """The rank that sampled gave the aux record, perhaps as the end of the answer."""

    record: AuxRecord


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A rank cannot go on, or its engine gave up."""

    rank: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class RankQuiet:
    """A rank moves nothing of this transfer any more; `doubt` if it cannot vouch for that."""

    rank: int
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class TargetAborted:
    """The target failed, declined or gave up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class TargetSettled:
    """The target's verdict."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The link that the grant came by is gone."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send to one rank of this instance."""

    rank: int
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send to the target, by the session that the grant came by."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class ToSession:
    """Send by a session that has not granted anything."""

    session: int
    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Bury:
    """The grant is over: remember what to answer if the target asks, and never accept it again."""

    grant: bytes
    doubt: str


@dataclass(frozen=True, slots=True)
class Forget:
    """The transfer's id is free."""


def refusals(one: Departure, grant: Grant) -> Effects:
    """What a second grant for a live transfer is told; no rank ever sees it."""
    text = f"transfer {one.transfer} is live here under another grant; take a new id for each attempt"
    cause = one.cause(Why.REFUSED_LIVE_ID, Stage.GRANT, text)
    return (
        ToTarget(Abort(transfer=one.transfer, grant=grant.grant, cause=cause)),
        ToTarget(Quiet(transfer=one.transfer, grant=grant.grant)),
        Bury(grant.grant, ""),
    )
