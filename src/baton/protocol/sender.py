"""One source rank's part of one transfer.

The engine offers chunks as it computes them and seals the transfer at the end; a grant may come before, in
between or after. Chunks that are ready and granted are copied; the coordinator hears of each that landed, and
of the whole when the engine sealed it and the last copy is done. A rank is quiet when no copy of it is under
way and none will be begun: a commit implies it, a failure has to be followed by it.

A rank that ends a transfer by itself keeps its record until the verdict comes: what the coordinator said
before that, a grant perhaps, is then still answered by this record and never by another attempt's.

Deadlines are the coordinators' business: a rank has none but those of its copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.errors import LocalProtocolError
from baton.protocol.ledger import Rectangle
from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace
from baton.protocol.messages import Abort, AnyMessage, AuxRecord, Commit, Grant, Landed, Quiet, Unquiet
from baton.protocol.outcomes import Aux, Cause, Outcome

Counts: TypeAlias = Mapping[int, Mapping[str, int]]


class SenderState(Enum):
    """Where one source rank is with one transfer."""

    WAITING = "waiting"
    COPYING = "copying"
    DRAINING = "draining"
    COMMITTED = "committed"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What the engine said is ready, numbered in the order it said so."""

    index: int
    box: Rectangle


class Sender(msgspec.Struct, frozen=True):
    """The record of one transfer at one source rank."""

    transfer: str
    rank: int
    state: SenderState = SenderState.WAITING
    grant: bytes = b""
    waiting: tuple[Chunk, ...] = ()
    """Ready, but not granted yet."""
    under_way: Mapping[int, Chunk] = msgspec.field(default_factory=dict)
    num_chunks: int = 0
    num_bytes: Counts = msgspec.field(default_factory=dict)
    is_sealed: bool = False
    doubt: str = ""
    """Why this rank cannot vouch for its own quiet; empty if it can."""
    is_heard: bool = False
    """Whether the verdict has come."""


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """The engine: a chunk may be read once its fence is."""

    chunk: Chunk


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
class Granted:
    """The coordinator: this rank may write."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class VerdictHeard:
    """The coordinator: how the transfer ended; a rank that has not committed stops."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class ChunkCopied:
    """Every copy of a chunk is done."""

    index: int
    num_bytes: Counts
    staged: Mapping[int, int] = field(default_factory=dict)
    checksums: Mapping[int, Mapping[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkFailed:
    """The copies of a chunk are terminal and not all done; `doubt` is set if something may still move."""

    index: int
    cause: Cause
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Bind a chunk and hand its copies to the transport."""

    chunk: Chunk


@dataclass(frozen=True, slots=True)
class CancelCopies:
    """Ask the transport to give up every copy under way."""


@dataclass(frozen=True, slots=True)
class LetGo:
    """Nothing of this rank reads the pages of these chunks any more."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to the coordinator."""

    message: AnyMessage


@dataclass(frozen=True, slots=True)
class Conclude:
    """Tell the engine how the transfer ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Retire:
    """The engine's pages are all its own again; the record may be forgotten."""


Step: TypeAlias = tuple[Sender, Effects]


def _check_unsealed(one: Sender, event: object) -> None:
    if one.is_sealed:
        raise LocalProtocolError(f"sender: {type(event).__name__} after the transfer was sealed")


def _collect(one: Sender, event: ChunkReady, now: float) -> Step:
    _check_unsealed(one, event)
    return replace(one, waiting=(*one.waiting, event.chunk), num_chunks=one.num_chunks + 1), ()


def _submit(one: Sender, event: ChunkReady, now: float) -> Step:
    chunk = event.chunk
    under_way = {**one.under_way, chunk.index: chunk}
    return replace(one, under_way=under_way, num_chunks=one.num_chunks + 1), (Submit(chunk),)


def _drop(one: Sender, event: ChunkReady, now: float) -> Step:
    return one, (LetGo((event.chunk.index,)),)


def _begin(one: Sender, event: Granted, now: float) -> Step:
    under_way = {chunk.index: chunk for chunk in one.waiting}
    state = SenderState.DRAINING if one.is_sealed else SenderState.COPYING
    after = replace(one, state=state, grant=event.grant.grant, waiting=(), under_way=under_way)
    return _committed_if_drained(after, tuple(Submit(chunk) for chunk in one.waiting))


def _seal(one: Sender, event: Sealed, now: float) -> Step:
    _check_unsealed(one, event)
    told: Effects = ()
    if event.aux is not None:
        told = (Tell(AuxRecord(transfer=one.transfer, grant=one.grant, aux=event.aux)),)
    after = replace(one, is_sealed=True)
    if one.state is SenderState.WAITING:
        return after, told
    return _committed_if_drained(replace(after, state=SenderState.DRAINING), told)


def _committed_if_drained(one: Sender, effects: Effects) -> Step:
    if one.state is not SenderState.DRAINING or one.under_way:
        return one, effects
    commit = Commit(
        transfer=one.transfer,
        grant=one.grant,
        source_rank=one.rank,
        num_chunks=one.num_chunks,
        num_bytes={target: dict(counts) for target, counts in one.num_bytes.items()},
    )
    return replace(one, state=SenderState.COMMITTED), (*effects, Tell(commit))


def _copied(one: Sender, event: ChunkCopied, now: float) -> Step:
    chunk = one.under_way[event.index]
    landed = Landed(
        transfer=one.transfer,
        grant=one.grant,
        source_rank=one.rank,
        chunk=chunk.index,
        layers=chunk.box.layers,
        tokens=chunk.box.tokens,
        staged=dict(event.staged),
        checksums={target: dict(sums) for target, sums in event.checksums.items()},
    )
    after = replace(
        one, under_way=_without(one.under_way, event.index), num_bytes=_sum(one.num_bytes, event.num_bytes)
    )
    return _committed_if_drained(after, (LetGo((event.index,)), Tell(landed)))


def _copy_failed(one: Sender, event: ChunkFailed, now: float) -> Step:
    told = Tell(_abort(one, event.cause))
    after = replace(one, under_way=_without(one.under_way, event.index), doubt=event.doubt or one.doubt)
    return _stopped(after, (LetGo((event.index,)), told))


def _answer_ended(one: Sender, event: AnswerEnded, now: float) -> Step:
    _check_unsealed(one, event)
    record = AuxRecord(transfer=one.transfer, grant=one.grant, aux=event.aux, is_final=True)
    return _stopped(one, (Tell(record),))


def _give_up(one: Sender, event: Aborted, now: float) -> Step:
    return _stopped(one, (Tell(_abort(one, event.cause)),))


def _stop(one: Sender, event: VerdictHeard, now: float) -> Step:
    return _stopped(replace(one, is_heard=True), (Conclude(event.outcome),))


def _ask_to_stop(one: Sender, event: Aborted, now: float) -> Step:
    # Everything was sent: the target may have admitted it already, so its verdict stands.
    return one, (Tell(_abort(one, event.cause)),)


def _stopped(one: Sender, effects: Effects) -> Step:
    """Begins nothing more. How it ended is the coordinator's to say: all its ranks hear the same."""
    dropped = tuple(chunk.index for chunk in one.waiting)
    told = (*effects, *((LetGo(dropped),) if dropped else ()))
    after = replace(one, waiting=(), state=SenderState.STOPPING)
    if one.under_way:
        return after, (*told, CancelCopies())
    return _quiet(after, told)


def _quiet(one: Sender, effects: Effects) -> Step:
    word: AnyMessage
    if one.doubt:
        word = Unquiet(transfer=one.transfer, grant=one.grant, source_rank=one.rank, text=one.doubt)
    else:
        word = Quiet(transfer=one.transfer, grant=one.grant, source_rank=one.rank)
    told = (*effects, Tell(word))
    return replace(one, state=SenderState.ENDED), (*told, Retire()) if one.is_heard else told


def _wind_down(one: Sender, event: ChunkCopied | ChunkFailed, now: float) -> Step:
    doubt = event.doubt if isinstance(event, ChunkFailed) else ""
    after = replace(one, under_way=_without(one.under_way, event.index), doubt=doubt or one.doubt)
    effects: Effects = (LetGo((event.index,)),)
    return (after, effects) if after.under_way else _quiet(after, effects)


def _settle(one: Sender, event: VerdictHeard, now: float) -> Step:
    return replace(one, state=SenderState.ENDED, is_heard=True), (Conclude(event.outcome), Retire())


def _hear(one: Sender, event: VerdictHeard, now: float) -> Step:
    return (one, ()) if one.is_heard else (replace(one, is_heard=True), (Conclude(event.outcome),))


def _retire(one: Sender, event: VerdictHeard, now: float) -> Step:
    if one.is_heard:
        return one, ()
    return replace(one, is_heard=True), (Conclude(event.outcome), Retire())


def _abort(one: Sender, cause: Cause) -> Abort:
    return Abort(transfer=one.transfer, grant=one.grant, cause=cause, source_rank=one.rank)


def _without(chunks: Mapping[int, Chunk], index: int) -> Mapping[int, Chunk]:
    return {other: chunk for other, chunk in chunks.items() if other != index}


def _sum(one: Counts, other: Counts) -> Counts:
    total = {target: dict(counts) for target, counts in one.items()}
    for target, counts in other.items():
        into = total.setdefault(target, {})
        for component, num_bytes in counts.items():
            into[component] = into.get(component, 0) + num_bytes
    return total


S = SenderState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.WAITING, ChunkReady): cell(_collect, S.WAITING),
    (S.WAITING, Sealed): cell(_seal, S.WAITING),
    (S.WAITING, AnswerEnded): cell(_answer_ended, S.ENDED),
    (S.WAITING, Aborted): cell(_give_up, S.ENDED),
    (S.WAITING, Granted): cell(_begin, S.COPYING, S.DRAINING, S.COMMITTED),
    (S.WAITING, VerdictHeard): cell(_stop, S.ENDED),
    (S.COPYING, ChunkReady): cell(_submit, S.COPYING),
    (S.COPYING, Sealed): cell(_seal, S.DRAINING, S.COMMITTED),
    (S.COPYING, AnswerEnded): cell(_answer_ended, S.STOPPING, S.ENDED),
    (S.COPYING, Aborted): cell(_give_up, S.STOPPING, S.ENDED),
    (S.COPYING, VerdictHeard): cell(_stop, S.STOPPING, S.ENDED),
    (S.COPYING, ChunkCopied): cell(_copied, S.COPYING),
    (S.COPYING, ChunkFailed): cell(_copy_failed, S.STOPPING, S.ENDED),
    (S.DRAINING, Aborted): cell(_give_up, S.STOPPING),
    (S.DRAINING, VerdictHeard): cell(_stop, S.STOPPING),
    (S.DRAINING, ChunkCopied): cell(_copied, S.DRAINING, S.COMMITTED),
    (S.DRAINING, ChunkFailed): cell(_copy_failed, S.STOPPING, S.ENDED),
    (S.COMMITTED, Aborted): cell(_ask_to_stop, S.COMMITTED),
    (S.COMMITTED, VerdictHeard): cell(_settle, S.ENDED),
    # The engine may not have heard yet that its transfer is over.
    (S.STOPPING, ChunkReady): cell(_drop, S.STOPPING),
    (S.STOPPING, Sealed): IGNORED,
    (S.STOPPING, AnswerEnded): IGNORED,
    (S.STOPPING, Aborted): IGNORED,
    (S.STOPPING, VerdictHeard): cell(_hear, S.STOPPING),
    (S.STOPPING, ChunkCopied): cell(_wind_down, S.STOPPING, S.ENDED),
    (S.STOPPING, ChunkFailed): cell(_wind_down, S.STOPPING, S.ENDED),
    (S.ENDED, ChunkReady): cell(_drop, S.ENDED),
    (S.ENDED, Sealed): IGNORED,
    (S.ENDED, AnswerEnded): IGNORED,
    (S.ENDED, Aborted): IGNORED,
    (S.ENDED, Granted): IGNORED,
    (S.ENDED, VerdictHeard): cell(_retire, S.ENDED),
}

SENDER: Table[Sender] = Table(
    name="sender",
    states=SenderState,
    events=(
        ChunkReady,
        Sealed,
        AnswerEnded,
        Aborted,
        Granted,
        VerdictHeard,
        ChunkCopied,
        ChunkFailed,
    ),
    remote=frozenset(),
    cells=_CELLS,
)
