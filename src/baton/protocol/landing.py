"""One target rank's part of one grant.

The rank lets lanes write, unpacks or checks what landed, and takes the permissions back in the end. It is a
writer of its own pages while it unpacks: closing waits for that. If asked to prove that the source is still,
it says so only when its transport does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace
from baton.protocol.messages import AnyMessage, Closed, Landed, Unpacked
from baton.protocol.outcomes import Cause


class LandingState(Enum):
    """Where a target rank is with one grant."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Landing(msgspec.Struct, frozen=True):
    """The record of one grant at one target rank."""

    grant: bytes
    rank: int
    state: LandingState = LandingState.OPEN
    jobs: frozenset[tuple[int, int]] = frozenset()
    """Source rank and chunk of every unpack under way."""
    must_still: bool = False


@dataclass(frozen=True, slots=True)
class UnpackAsked:
    """The coordinator: a chunk is complete in staging, or is to be checked."""

    landed: Landed


@dataclass(frozen=True, slots=True)
class JobEnded:
    """An unpack is done, or failed with a cause."""

    source_rank: int
    chunk: int
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The coordinator: take the permissions back."""

    must_still: bool


@dataclass(frozen=True, slots=True)
class TakenBack:
    """The transport has taken the permissions back; whether something may still land."""

    is_still: bool
    text: str = ""
    unchecked: tuple[int, ...] = ()
    """Paths of which it turned out that the transport does not look at what is written over them."""


@dataclass(frozen=True, slots=True)
class StartUnpack:
    """Run the unpack of a chunk."""

    landed: Landed


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Take the permissions back at the transport; to be still, revoke the peer where that is needed."""

    must_still: bool


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the coordinator."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class FreeStaging:
    """The staging leases of the grant are free, and its record may be forgotten."""


Step: TypeAlias = tuple[Landing, Effects]


def _start(one: Landing, event: UnpackAsked, now: float) -> Step:
    key = (event.landed.source_rank, event.landed.chunk)
    if key in one.jobs:
        return one, ()
    return replace(one, jobs=one.jobs | {key}), (StartUnpack(event.landed),)


def _job_ended(one: Landing, event: JobEnded, now: float) -> Step:
    done = Unpacked(
        grant=one.grant,
        rank=one.rank,
        source_rank=event.source_rank,
        chunk=event.chunk,
        cause=event.cause,
    )
    return replace(one, jobs=one.jobs - {(event.source_rank, event.chunk)}), (Tell(done),)


def _last_job_ended(one: Landing, event: JobEnded, now: float) -> Step:
    after = replace(one, jobs=one.jobs - {(event.source_rank, event.chunk)})
    return after, () if after.jobs else (TakeBack(one.must_still),)


def _close(one: Landing, event: CloseAsked, now: float) -> Step:
    after = replace(one, state=LandingState.CLOSING, must_still=event.must_still)
    return after, () if one.jobs else (TakeBack(event.must_still),)


def _taken_back(one: Landing, event: TakenBack, now: float) -> Step:
    is_still = event.is_still or not one.must_still
    closed = Closed(
        grant=one.grant, rank=one.rank, is_still=is_still, text=event.text, unchecked=event.unchecked
    )
    if not is_still:
        return one, (Tell(closed),)
    return replace(one, state=LandingState.CLOSED), (Tell(closed), FreeStaging())


S = LandingState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.OPEN, UnpackAsked): cell(_start, S.OPEN),
    (S.OPEN, JobEnded): cell(_job_ended, S.OPEN),
    (S.OPEN, CloseAsked): cell(_close, S.CLOSING),
    (S.CLOSING, UnpackAsked): IGNORED,
    (S.CLOSING, JobEnded): cell(_last_job_ended, S.CLOSING),
    (S.CLOSING, CloseAsked): cell(_close, S.CLOSING),
    (S.CLOSING, TakenBack): cell(_taken_back, S.CLOSING, S.CLOSED),
    (S.CLOSED, UnpackAsked): IGNORED,
    (S.CLOSED, CloseAsked): IGNORED,
    (S.CLOSED, TakenBack): IGNORED,
}

LANDING: Table[Landing] = Table(
    name="landing",
    states=LandingState,
    events=(UnpackAsked, JobEnded, CloseAsked, TakenBack),
    remote=frozenset(),
    cells=_CELLS,
)
