"""The life of an instance, at its coordinator.

An instance serves when every rank of its layout is there. It shares one fate: when a rank is lost, all end,
and a new incarnation with a new epoch takes its place. Nothing is recovered in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace

QUARANTINE_SHARE_MAX = 0.25
"""Above this share of a rank's pages an instance stops granting, drains and ends, to be started anew."""


class CoordinatorState(Enum):
    """Where an instance is in its life."""

    FORMING = "forming"
    SERVING = "serving"
    DRAINING = "draining"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Instance:
    """The record of an instance."""

    name: str
    epoch: int
    num_ranks: int
    state: CoordinatorState = CoordinatorState.FORMING
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
class DrainAsked:
    """Take no new transfers; end when those under way have."""

    text: str


@dataclass(frozen=True, slots=True)
class WorkCounted:
    """How many transfers are under way, and the largest share of pages that a rank has in quarantine."""

    num_transfers: int
    quarantined_share: float = 0.0


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The instance is to end now."""

    text: str


@dataclass(frozen=True, slots=True)
class RefuseRank:
    """Turn a rank away."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Every rank is there: register, and grant."""


@dataclass(frozen=True, slots=True)
class StopGranting:
    """Refuse what is new."""

    text: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """Say goodbye to peers and ranks; unless that was wished, the process ends loudly."""

    text: str
    is_wished: bool = False


Step: TypeAlias = tuple[Instance, Effects]


def _attach(one: Instance, event: RankAttached, now: float) -> Step:
    fault = event.fault
    if not 0 <= event.rank < one.num_ranks:
        fault = f"rank {event.rank} is outside of a layout with {one.num_ranks} ranks"
    elif event.rank in one.ranks:
        fault = f"rank {event.rank} is attached already"
    if fault:
        return one, (RefuseRank(event.rank, fault),)
    after = replace(one, ranks=one.ranks | {event.rank})
    if len(after.ranks) < one.num_ranks:
        return after, ()
    return replace(after, state=S.SERVING), (Serve(),)


def _refuse(one: Instance, event: RankAttached, now: float) -> Step:
    text = (
        event.fault
        or f"{one.name} is {one.state.value} with all its ranks; a new rank needs a new incarnation"
    )
    return one, (RefuseRank(event.rank, text),)


def _lose(one: Instance, event: RankLost, now: float) -> Step:
    return _end(one, f"rank {event.rank} was lost: {event.text}")


def _drain(one: Instance, event: DrainAsked, now: float) -> Step:
    after = replace(one, state=S.DRAINING, cause=event.text)
    if one.is_idle:
        return _end(after, event.text)
    return after, (StopGranting(event.text),)


def _end_now(one: Instance, event: EndAsked, now: float) -> Step:
    return replace(one, state=S.ENDED, cause=event.text), (EndAll(event.text, is_wished=True),)


def _count(one: Instance, event: WorkCounted, now: float) -> Step:
    after = replace(one, is_idle=event.num_transfers == 0)
    if event.quarantined_share <= QUARANTINE_SHARE_MAX:
        return after, ()
    text = f"{event.quarantined_share:.0%} of a rank's pages are in quarantine; start the instance anew"
    return _drain(after, DrainAsked(text), now)


def _count_draining(one: Instance, event: WorkCounted, now: float) -> Step:
    if event.num_transfers:
        return replace(one, is_idle=False), ()
    return _end(replace(one, is_idle=True), one.cause)


def _end(one: Instance, text: str) -> Step:
    return replace(one, state=S.ENDED, cause=text), (EndAll(text),)


S = CoordinatorState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.FORMING, RankAttached): cell(_attach, S.FORMING, S.SERVING),
    (S.FORMING, RankLost): cell(_lose, S.ENDED),
    (S.FORMING, DrainAsked): cell(_drain, S.ENDED),
    (S.FORMING, WorkCounted): IGNORED,
    (S.FORMING, EndAsked): cell(_end_now, S.ENDED),
    (S.SERVING, RankAttached): cell(_refuse, S.SERVING),
    (S.SERVING, RankLost): cell(_lose, S.ENDED),
    (S.SERVING, DrainAsked): cell(_drain, S.DRAINING, S.ENDED),
    (S.SERVING, WorkCounted): cell(_count, S.SERVING, S.DRAINING, S.ENDED),
    (S.SERVING, EndAsked): cell(_end_now, S.ENDED),
    (S.DRAINING, RankAttached): cell(_refuse, S.DRAINING),
    (S.DRAINING, RankLost): cell(_lose, S.ENDED),
    (S.DRAINING, DrainAsked): IGNORED,
    (S.DRAINING, WorkCounted): cell(_count_draining, S.DRAINING, S.ENDED),
    (S.DRAINING, EndAsked): cell(_end_now, S.ENDED),
    (S.ENDED, RankAttached): cell(_refuse, S.ENDED),
    (S.ENDED, RankLost): IGNORED,
    (S.ENDED, DrainAsked): IGNORED,
    (S.ENDED, WorkCounted): IGNORED,
    (S.ENDED, EndAsked): IGNORED,
}

COORDINATOR: Table[Instance] = Table(
    name="coordinator",
    states=CoordinatorState,
    events=(RankAttached, RankLost, DrainAsked, WorkCounted, EndAsked),
    remote=frozenset(),
    cells=_CELLS,
)
