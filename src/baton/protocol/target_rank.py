"""One target rank's part of one grant.

The rank lets lanes write, unpacks or checks what landed, and revokes the permissions in the end. It writes
its own pages while it unpacks: closing waits for that. If it has to prove that the source is quiet, it says
so only when its transport does.

Every event is a message: `UnpackChunk` and `Close` from the coordinator, `Unpacked` and `Closed` as this
rank's driver reports the end of the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.protocol.machine import IGNORED, Effects, Entry, Forget, Table, cell, replace
from baton.protocol.messages import Close, Closed, Landed, UnpackChunk, Unpacked


class TargetRankState(Enum):
    """Where a target rank is with one grant."""

    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class TargetRank(msgspec.Struct, frozen=True):
    """The record of one grant at one target rank."""

    grant: bytes
    rank: int
    state: TargetRankState = TargetRankState.OPEN
    unpacking: frozenset[tuple[int, int]] = frozenset()
    """Source rank and chunk of every unpack under way."""
    must_prove_quiet: bool = False


# Effects. A message among them goes to the coordinator.


@dataclass(frozen=True, slots=True)
class StartUnpack:
    """UnpackChunk or check a chunk."""

    landed: Landed


@dataclass(frozen=True, slots=True)
class RevokePermissions:
    """Take the permissions back at the transport; to prove quiet, revoke the peer where that is needed."""

    must_prove_quiet: bool


Step: TypeAlias = tuple[TargetRank, Effects]


def _start(record: TargetRank, unpack: UnpackChunk, now: float) -> Step:
    key = (unpack.landed.source_rank, unpack.landed.chunk)
    if key in record.unpacking:
        return record, ()
    return replace(record, unpacking=record.unpacking | {key}), (StartUnpack(unpack.landed),)


def _unpacked(record: TargetRank, unpacked: Unpacked, now: float) -> Step:
    key = (unpacked.source_rank, unpacked.chunk)
    return replace(record, unpacking=record.unpacking - {key}), (unpacked,)


def _unpacked_closing(record: TargetRank, unpacked: Unpacked, now: float) -> Step:
    after = replace(record, unpacking=record.unpacking - {(unpacked.source_rank, unpacked.chunk)})
    return after, () if after.unpacking else (RevokePermissions(record.must_prove_quiet),)


def _close(record: TargetRank, close: Close, now: float) -> Step:
    after = replace(record, state=S.CLOSING, must_prove_quiet=close.must_prove_quiet)
    return after, () if record.unpacking else (RevokePermissions(close.must_prove_quiet),)


def _closed(record: TargetRank, closed: Closed, now: float) -> Step:
    is_quiet = closed.is_quiet or not record.must_prove_quiet
    answer = msgspec.structs.replace(closed, is_quiet=is_quiet)
    if not is_quiet:
        return record, (answer,)
    return replace(record, state=S.CLOSED), (answer, Forget())


S = TargetRankState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.OPEN, UnpackChunk): cell(_start, S.OPEN),
    (S.OPEN, Unpacked): cell(_unpacked, S.OPEN),
    (S.OPEN, Close): cell(_close, S.CLOSING),
    (S.CLOSING, UnpackChunk): IGNORED,
    (S.CLOSING, Unpacked): cell(_unpacked_closing, S.CLOSING),
    (S.CLOSING, Close): cell(_close, S.CLOSING),
    (S.CLOSING, Closed): cell(_closed, S.CLOSING, S.CLOSED),
    (S.CLOSED, UnpackChunk): IGNORED,
    (S.CLOSED, Close): IGNORED,
    (S.CLOSED, Closed): IGNORED,
}

TARGET_RANK: Table[TargetRank] = Table(
    name="target rank",
    states=TargetRankState,
    remote=frozenset(),
    cells=_CELLS,
)
