"""The life of an instance, at its coordinator.

An instance serves when every rank of its layout is there. It has one fate: when a rank is lost, all end,
and a new incarnation with a new epoch takes its place. Nothing is recovered in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace

ROLES = ("prefill", "decode", "both")
PACKING = ("convert", "cost")
"""When a hand-over goes through staging."""
QUARANTINE_SHARE_MAX = 0.25
"""Above this share of a rank's pages an instance stops granting, drains and ends, to be started anew."""


class InstanceState(Enum):
    """Where an instance is in its life."""

    FORMING = "forming"
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class InstanceRecord:
    """The record of an instance."""

    name: str
    epoch: int
    num_ranks: int
    state: InstanceState = InstanceState.FORMING
    ranks: frozenset[int] = frozenset()
    is_idle: bool = True
    cause: str = ""


@dataclass(frozen=True, slots=True)
class RankAttached:
    """A rank passed its handshake; `fault` says what is wrong with it, if anything is."""

    rank: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's link is gone or silent."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The owner: take no new transfers; end when those under way have."""

    text: str


@dataclass(frozen=True, slots=True)
class WorkCounted:
    """How many transfers are under way, and the largest share of pages that a rank has in quarantine."""

    num_transfers: int
    quarantined_share: float = 0.0


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The owner: end the instance now."""

    text: str


@dataclass(frozen=True, slots=True)
class RefuseRank:
    """Refuse a rank."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Every rank is there: register, and grant."""


@dataclass(frozen=True, slots=True)
class StopGranting:
    """Refuse new transfers."""

    text: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """Say goodbye to peers and ranks; unless the owner requested it, the process ends with an error."""

    text: str
    is_requested: bool = False


Step: TypeAlias = tuple[InstanceRecord, Effects]


def _attach(record: InstanceRecord, event: RankAttached, now: float) -> Step:
    fault = event.fault
    if not 0 <= event.rank < record.num_ranks:
        fault = f"rank {event.rank} is outside of a layout with {record.num_ranks} ranks"
    elif event.rank in record.ranks:
        fault = f"rank {event.rank} is attached already"
    if fault:
        return record, (RefuseRank(event.rank, fault),)
    after = replace(record, ranks=record.ranks | {event.rank})
    if len(after.ranks) < record.num_ranks:
        return after, ()
    return replace(after, state=S.SERVING), (Serve(),)


def _refuse(record: InstanceRecord, event: RankAttached, now: float) -> Step:
    text = (
        event.fault
        or f"{record.name} is {record.state.value} with all its ranks; a new rank needs a new incarnation"
    )
    return record, (RefuseRank(event.rank, text),)


def _lose(record: InstanceRecord, event: RankLost, now: float) -> Step:
    return _end(record, f"rank {event.rank} was lost: {event.text}")


def _drain(record: InstanceRecord, event: DrainRequested, now: float) -> Step:
    after = replace(record, state=S.DRAINING, cause=event.text)
    if record.is_idle:
        return _end(after, event.text)
    return after, (StopGranting(event.text),)


def _end_now(record: InstanceRecord, event: EndRequested, now: float) -> Step:
    return replace(record, state=S.ENDED, cause=event.text), (EndAll(event.text, is_requested=True),)


def _count(record: InstanceRecord, event: WorkCounted, now: float) -> Step:
    after = replace(record, is_idle=event.num_transfers == 0)
    if event.quarantined_share <= QUARANTINE_SHARE_MAX:
        return after, ()
    text = f"{event.quarantined_share:.0%} of a rank's pages are in quarantine; restart the instance"
    return _drain(after, DrainRequested(text), now)


def _count_draining(record: InstanceRecord, event: WorkCounted, now: float) -> Step:
    if event.num_transfers:
        return replace(record, is_idle=False), ()
    return _end(replace(record, is_idle=True), record.cause)


def _end(record: InstanceRecord, text: str) -> Step:
    return replace(record, state=S.ENDED, cause=text), (EndAll(text),)


S = InstanceState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.FORMING, RankAttached): cell(_attach, S.FORMING, S.SERVING),
    (S.FORMING, RankLost): cell(_lose, S.ENDED),
    (S.FORMING, DrainRequested): cell(_drain, S.ENDED),
    (S.FORMING, WorkCounted): IGNORED,
    (S.FORMING, EndRequested): cell(_end_now, S.ENDED),
    (S.SERVING, RankAttached): cell(_refuse, S.SERVING),
    (S.SERVING, RankLost): cell(_lose, S.ENDED),
    (S.SERVING, DrainRequested): cell(_drain, S.DRAINING, S.ENDED),
    (S.SERVING, WorkCounted): cell(_count, S.SERVING, S.DRAINING, S.ENDED),
    (S.SERVING, EndRequested): cell(_end_now, S.ENDED),
    (S.DRAINING, RankAttached): cell(_refuse, S.DRAINING),
    (S.DRAINING, RankLost): cell(_lose, S.ENDED),
    (S.DRAINING, DrainRequested): IGNORED,
    (S.DRAINING, WorkCounted): cell(_count_draining, S.DRAINING, S.ENDED),
    (S.DRAINING, EndRequested): cell(_end_now, S.ENDED),
    (S.ENDED, RankAttached): cell(_refuse, S.ENDED),
    (S.ENDED, RankLost): IGNORED,
    (S.ENDED, DrainRequested): IGNORED,
    (S.ENDED, WorkCounted): IGNORED,
    (S.ENDED, EndRequested): IGNORED,
}

INSTANCE: Table[InstanceRecord] = Table(
    name="instance",
    states=InstanceState,
    remote=frozenset(),
    cells=_CELLS,
)
