"""One source rank's part of one transfer.

The engine offers chunks as it computes them and seals the transfer at the end; a grant may come before, in
between or after. Chunks that are ready and granted are copied. The rank reports each landed chunk to its
coordinator, and commits when the engine has sealed the transfer and the last copy is done. A rank is quiet
when no copy of it is under way and none will begin: a commit implies quiet, a failure has to be followed by
it.

An engine that preempts a request withdraws: what was offered and not copied is dropped, and copies under way
are cancelled. A chunk has landed in whole, or it is dropped in whole. When the last copy has ended, nothing
reads the pages any more, and the engine may offer the rest out of other pages under the same grant. A dropped
chunk was never reported, so no coordinator learns of it: to them the rank pauses. A rank that had sealed the
transfer has to seal it again, unless it has committed. Its first aux record stands, because the cache of a
prompt does not depend on the token that was sampled after it. A copy that ended as unknown could still write
over what is sent again, so it fails the transfer, withdrawn or not.

A rank that ends a transfer by itself keeps its record until the verdict comes. A grant that was already on
its way then meets this record, never that of another attempt.

The coordinators watch the deadlines of a transfer; a rank has none but those of its copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.errors import LocalProtocolError
from baton.protocol.ledger import Rectangle
from baton.protocol.machine import IGNORED, Conclude, Effects, Entry, Forget, Table, cell, replace
from baton.protocol.messages import Abort, AuxRecord, Commit, Grant, Landed, Quiet, Settled, Unquiet
from baton.protocol.outcomes import Aux, Cause

Counts: TypeAlias = Mapping[int, Mapping[str, int]]


class SourceRankState(Enum):
    """Where one source rank is with one transfer."""

    WAITING = "waiting"
    COPYING = "copying"
    WITHDRAWING = "withdrawing"
    DRAINING = "draining"
    COMMITTED = "committed"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The engine: a chunk may be read once its fence is ready; chunks are numbered in this order."""

    index: int
    box: Rectangle


class SourceRank(msgspec.Struct, frozen=True):
    """The record of one transfer at one source rank."""

    transfer: str
    rank: int
    state: SourceRankState = SourceRankState.WAITING
    grant: bytes = b""
    waiting: tuple[ChunkReady, ...] = ()
    """Ready, but not granted yet."""
    under_way: Mapping[int, ChunkReady] = msgspec.field(default_factory=dict)
    landed: tuple[Rectangle, ...] = ()
    """What was reported as landed."""
    num_chunks: int = 0
    num_bytes: Counts = msgspec.field(default_factory=dict)
    is_sealed: bool = False
    has_aux: bool = False
    """Whether this rank has given its aux record."""
    doubt: str = ""
    """Why this rank cannot vouch that it is quiet; empty if it can."""
    is_settled: bool = False
    """Whether the verdict has come."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The engine: there will be no more chunks; the rank that sampled gives the aux record."""

    aux: Aux | None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The engine: the answer is complete, nothing needs to be handed over."""

    aux: Aux


@dataclass(frozen=True, slots=True)
class Aborted:
    """The engine gave the transfer up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The engine wants the pages back: what is not copied is dropped, to be offered again."""


@dataclass(frozen=True, slots=True)
class ChunkCopied:
    """Every copy of a chunk is done."""

    index: int
    num_bytes: Counts
    staged: Mapping[int, int] = field(default_factory=dict)
    checksums: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """The copies of a chunk are over and not all done; `doubt` is set if something may still move."""

    index: int
    cause: Cause
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class ChunkDropped:
    """A withdrawn chunk was not copied in whole, and nothing of it moves any more."""

    index: int


# Effects. A message among them goes to the coordinator.


@dataclass(frozen=True, slots=True)
class StartCopies:
    """Bind a chunk and submit its copies to the transport."""

    index: int


@dataclass(frozen=True, slots=True)
class CancelCopies:
    """Ask the transport to cancel every copy under way."""

    is_withdrawal: bool = False
    """Whether the transfer goes on: chunks that are copied all the same have landed."""


@dataclass(frozen=True, slots=True)
class EndWithdrawal:
    """No copy of this rank reads a page any more; these cells need not be offered again."""

    landed: tuple[Rectangle, ...]
    is_committed: bool = False
    """Whether everything was sent: there is nothing left to offer."""


@dataclass(frozen=True, slots=True)
class ReleaseChunks:
    """This rank no longer reads the pages of these chunks."""

    indices: tuple[int, ...]


Step: TypeAlias = tuple[SourceRank, Effects]


def _check_unsealed(record: SourceRank, event: object) -> None:
    if record.is_sealed:
        raise LocalProtocolError(f"source rank: {type(event).__name__} after the transfer was sealed")


def _collect(record: SourceRank, chunk: ChunkReady, now: float) -> Step:
    _check_unsealed(record, chunk)
    return replace(record, waiting=(*record.waiting, chunk), num_chunks=record.num_chunks + 1), ()


def _copy(record: SourceRank, chunk: ChunkReady, now: float) -> Step:
    under_way = {**record.under_way, chunk.index: chunk}
    after = replace(record, under_way=under_way, num_chunks=record.num_chunks + 1)
    return after, (StartCopies(chunk.index),)


def _drop(record: SourceRank, chunk: ChunkReady, now: float) -> Step:
    return record, (ReleaseChunks((chunk.index,)),)


def _begin(record: SourceRank, grant: Grant, now: float) -> Step:
    under_way = {chunk.index: chunk for chunk in record.waiting}
    state = S.DRAINING if record.is_sealed else S.COPYING
    after = replace(record, state=state, grant=grant.grant, waiting=(), under_way=under_way)
    return _commit_if_drained(after, tuple(StartCopies(chunk.index) for chunk in record.waiting))


def _seal(record: SourceRank, event: Sealed, now: float) -> Step:
    _check_unsealed(record, event)
    effects: Effects = ()
    if event.aux is not None and not record.has_aux:
        effects = (AuxRecord(transfer=record.transfer, grant=record.grant, aux=event.aux),)
    after = replace(record, is_sealed=True, has_aux=record.has_aux or event.aux is not None)
    if record.state is S.WAITING:
        return after, effects
    return _commit_if_drained(replace(after, state=S.DRAINING), effects)


def _commit_if_drained(record: SourceRank, effects: Effects) -> Step:
    if record.state is not S.DRAINING or record.under_way:
        return record, effects
    commit = Commit(
        transfer=record.transfer,
        grant=record.grant,
        source_rank=record.rank,
        num_chunks=record.num_chunks,
        num_bytes={target: dict(counts) for target, counts in record.num_bytes.items()},
    )
    return replace(record, state=S.COMMITTED), (*effects, commit)


def _copied(record: SourceRank, event: ChunkCopied, now: float) -> Step:
    chunk = record.under_way[event.index]
    landed = Landed(
        transfer=record.transfer,
        grant=record.grant,
        source_rank=record.rank,
        chunk=chunk.index,
        layers=chunk.box.layers,
        tokens=chunk.box.tokens,
        staged=dict(event.staged),
        checksums={target: dict(sums) for target, sums in event.checksums.items()},
    )
    num_bytes = {target: dict(counts) for target, counts in record.num_bytes.items()}
    for target, counts in event.num_bytes.items():
        totals = num_bytes.setdefault(target, {})
        for component, count in counts.items():
            totals[component] = totals.get(component, 0) + count
    after = replace(
        record,
        under_way=_without(record.under_way, event.index),
        landed=(*record.landed, chunk.box),
        num_bytes=num_bytes,
    )
    effects = (ReleaseChunks((event.index,)), landed)
    if record.state is S.WITHDRAWING:
        return _end_withdrawal_if_over(after, effects)
    return _commit_if_drained(after, effects)


def _withdraw_waiting(record: SourceRank, event: Withdrawn, now: float) -> Step:
    """Nothing was granted yet, so nothing is read."""
    indices = tuple(chunk.index for chunk in record.waiting)
    after = replace(record, waiting=(), num_chunks=record.num_chunks - len(indices), is_sealed=False)
    released: Effects = (ReleaseChunks(indices),) if indices else ()
    return after, (*released, EndWithdrawal(record.landed))


def _withdraw(record: SourceRank, event: Withdrawn, now: float) -> Step:
    after = replace(record, state=S.WITHDRAWING, is_sealed=False)
    return _end_withdrawal_if_over(after, (CancelCopies(is_withdrawal=True),) if record.under_way else ())


def _withdraw_committed(record: SourceRank, event: Withdrawn, now: float) -> Step:
    return record, (EndWithdrawal(record.landed, is_committed=True),)


def _dropped(record: SourceRank, event: ChunkDropped, now: float) -> Step:
    # The manifest counts the chunks that landed: this one is not among them.
    under_way = _without(record.under_way, event.index)
    after = replace(record, under_way=under_way, num_chunks=record.num_chunks - 1)
    return _end_withdrawal_if_over(after, (ReleaseChunks((event.index,)),))


def _end_withdrawal_if_over(record: SourceRank, effects: Effects) -> Step:
    if record.under_way:
        return record, effects
    return replace(record, state=S.COPYING), (*effects, EndWithdrawal(record.landed))


def _copy_failed(record: SourceRank, event: ChunkFailed, now: float) -> Step:
    under_way = _without(record.under_way, event.index)
    after = replace(record, under_way=under_way, doubt=event.doubt or record.doubt)
    return _stopped(after, (ReleaseChunks((event.index,)), _abort(record, event.cause)))


def _answer_ended(record: SourceRank, event: AnswerEnded, now: float) -> Step:
    _check_unsealed(record, event)
    final = AuxRecord(transfer=record.transfer, grant=record.grant, aux=event.aux, is_final=True)
    return _stopped(record, (final,))


def _give_up(record: SourceRank, event: Aborted, now: float) -> Step:
    return _stopped(record, (_abort(record, event.cause),))


def _stop(record: SourceRank, settled: Settled, now: float) -> Step:
    return _stopped(replace(record, is_settled=True), (Conclude(settled.outcome),))


def _ask_to_stop(record: SourceRank, event: Aborted, now: float) -> Step:
    # Everything was sent: the target may have admitted it already, so its verdict stands.
    return record, (_abort(record, event.cause),)


def _stopped(record: SourceRank, effects: Effects) -> Step:
    """Begins nothing more. The coordinator decides how it ended, so that all its ranks hear the same."""
    if record.waiting:
        effects = (*effects, ReleaseChunks(tuple(chunk.index for chunk in record.waiting)))
    after = replace(record, waiting=(), state=S.STOPPING)
    if record.under_way:
        return after, (*effects, CancelCopies())
    return _quiet(after, effects)


def _quiet(record: SourceRank, effects: Effects) -> Step:
    message: Quiet | Unquiet = Quiet(transfer=record.transfer, grant=record.grant, source_rank=record.rank)
    if record.doubt:
        message = Unquiet(
            transfer=record.transfer, grant=record.grant, source_rank=record.rank, text=record.doubt
        )
    effects = (*effects, message)
    return replace(record, state=S.ENDED), (*effects, Forget()) if record.is_settled else effects


def _wind_down(record: SourceRank, event: ChunkCopied | ChunkDropped | ChunkFailed, now: float) -> Step:
    doubt = event.doubt if isinstance(event, ChunkFailed) else ""
    after = replace(record, under_way=_without(record.under_way, event.index), doubt=doubt or record.doubt)
    effects: Effects = (ReleaseChunks((event.index,)),)
    return (after, effects) if after.under_way else _quiet(after, effects)


def _settle(record: SourceRank, settled: Settled, now: float) -> Step:
    return replace(record, state=S.ENDED, is_settled=True), (Conclude(settled.outcome), Forget())


def _settle_stopping(record: SourceRank, settled: Settled, now: float) -> Step:
    return (
        (record, ())
        if record.is_settled
        else (replace(record, is_settled=True), (Conclude(settled.outcome),))
    )


def _settle_ended(record: SourceRank, settled: Settled, now: float) -> Step:
    if record.is_settled:
        return record, ()
    return replace(record, is_settled=True), (Conclude(settled.outcome), Forget())


def _abort(record: SourceRank, cause: Cause) -> Abort:
    return Abort(transfer=record.transfer, grant=record.grant, cause=cause, source_rank=record.rank)


def _without(chunks: Mapping[int, ChunkReady], index: int) -> Mapping[int, ChunkReady]:
    return {other: chunk for other, chunk in chunks.items() if other != index}


S = SourceRankState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.WAITING, ChunkReady): cell(_collect, S.WAITING),
    (S.WAITING, Sealed): cell(_seal, S.WAITING),
    (S.WAITING, AnswerEnded): cell(_answer_ended, S.ENDED),
    (S.WAITING, Aborted): cell(_give_up, S.ENDED),
    (S.WAITING, Withdrawn): cell(_withdraw_waiting, S.WAITING),
    (S.WAITING, Grant): cell(_begin, S.COPYING, S.DRAINING, S.COMMITTED),
    (S.WAITING, Settled): cell(_stop, S.ENDED),
    (S.COPYING, ChunkReady): cell(_copy, S.COPYING),
    (S.COPYING, Sealed): cell(_seal, S.DRAINING, S.COMMITTED),
    (S.COPYING, AnswerEnded): cell(_answer_ended, S.STOPPING, S.ENDED),
    (S.COPYING, Aborted): cell(_give_up, S.STOPPING, S.ENDED),
    (S.COPYING, Withdrawn): cell(_withdraw, S.WITHDRAWING, S.COPYING),
    (S.COPYING, Settled): cell(_stop, S.STOPPING, S.ENDED),
    (S.COPYING, ChunkCopied): cell(_copied, S.COPYING),
    (S.COPYING, ChunkFailed): cell(_copy_failed, S.STOPPING, S.ENDED),
    (S.WITHDRAWING, AnswerEnded): cell(_answer_ended, S.STOPPING),
    (S.WITHDRAWING, Aborted): cell(_give_up, S.STOPPING),
    (S.WITHDRAWING, Withdrawn): IGNORED,
    (S.WITHDRAWING, Settled): cell(_stop, S.STOPPING),
    (S.WITHDRAWING, ChunkCopied): cell(_copied, S.WITHDRAWING, S.COPYING),
    (S.WITHDRAWING, ChunkDropped): cell(_dropped, S.WITHDRAWING, S.COPYING),
    (S.WITHDRAWING, ChunkFailed): cell(_copy_failed, S.STOPPING, S.ENDED),
    (S.DRAINING, Aborted): cell(_give_up, S.STOPPING),
    (S.DRAINING, Withdrawn): cell(_withdraw, S.WITHDRAWING),
    (S.DRAINING, Settled): cell(_stop, S.STOPPING),
    (S.DRAINING, ChunkCopied): cell(_copied, S.DRAINING, S.COMMITTED),
    (S.DRAINING, ChunkFailed): cell(_copy_failed, S.STOPPING, S.ENDED),
    (S.COMMITTED, Aborted): cell(_ask_to_stop, S.COMMITTED),
    (S.COMMITTED, Withdrawn): cell(_withdraw_committed, S.COMMITTED),
    (S.COMMITTED, Settled): cell(_settle, S.ENDED),
    # The engine may not know yet that its transfer is over.
    (S.STOPPING, ChunkReady): cell(_drop, S.STOPPING),
    (S.STOPPING, Sealed): IGNORED,
    (S.STOPPING, AnswerEnded): IGNORED,
    (S.STOPPING, Aborted): IGNORED,
    (S.STOPPING, Withdrawn): IGNORED,
    (S.STOPPING, Settled): cell(_settle_stopping, S.STOPPING),
    (S.STOPPING, ChunkCopied): cell(_wind_down, S.STOPPING, S.ENDED),
    (S.STOPPING, ChunkDropped): cell(_wind_down, S.STOPPING, S.ENDED),
    (S.STOPPING, ChunkFailed): cell(_wind_down, S.STOPPING, S.ENDED),
    (S.ENDED, ChunkReady): cell(_drop, S.ENDED),
    (S.ENDED, Sealed): IGNORED,
    (S.ENDED, AnswerEnded): IGNORED,
    (S.ENDED, Aborted): IGNORED,
    (S.ENDED, Withdrawn): IGNORED,
    (S.ENDED, Grant): IGNORED,
    (S.ENDED, Settled): cell(_settle_ended, S.ENDED),
}

SOURCE_RANK: Table[SourceRank] = Table(
    name="source rank",
    states=SourceRankState,
    remote=frozenset(),
    cells=_CELLS,
)
