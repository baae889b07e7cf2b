"""A target instance's side of one transfer, at its coordinator.

Before the grant is sent nobody may write and everything can be dropped at once. From the moment it is sent
the pages belong to the writers, whatever becomes of the transfer: a failure is concluded at once, but pages
come back only when the source says quiet, or when each rank's transport says that nothing can land any more.

A transfer is ready when every needed cell of every pair landed once (and was unpacked), every source rank's
manifest agrees with what the plan expects, the aux record is there, and every rank has opened, in whatever
order they came. Ranks open before the grant is sent; where no opening keeps a source from writing, beside it.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

import msgspec

from baton.errors import RemoteProtocolError
from baton.protocol.arrival import (
    Account,
    Arrival,
    AuxArrived,
    CallerAborted,
    ChunkLanded,
    ChunkUnpacked,
    CloseRanks,
    Closing,
    Conclude,
    Offered,
    OpenRanks,
    Prepared,
    RankClosed,
    RankFailed,
    RankOpened,
    ReceiverState,
    Release,
    SendGrant,
    SessionLost,
    SourceAborted,
    SourceCommitted,
    SourceQuiet,
    SourceUnquiet,
    TellAux,
    Ticked,
    ToSource,
    VerdictAsked,
)
from baton.protocol.judgement import enter_commit, enter_landed, enter_unpacked, is_complete
from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace
from baton.protocol.messages import Abort, Grant, Lane, QuietAsked
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Ready, Stage, Why

Step: TypeAlias = tuple[Arrival, Effects]


def _prepare(one: Arrival, event: Prepared, now: float) -> Step:
    after = replace(
        one,
        state=S.GRANTED if event.is_ahead else S.OPENING,
        is_ahead=event.is_ahead,
        grant=event.grant,
        terms=event.terms,
        account=Account(event.ledger),
        deadlines=replace(one.deadlines, moved=now),
    )
    opened = OpenRanks(event.grant)
    return after, (SendGrant(event.grant), opened) if event.is_ahead else (opened,)


def _opened(one: Arrival, event: RankOpened, now: float) -> Step:
    assert one.grant is not None
    after = replace(one, opened=one.opened | {event.rank}, grant=_with_lanes(one.grant, event.lanes))
    if not after.opened >= one.ranks:
        return after, ()
    assert after.grant is not None
    granted = replace(after, state=S.GRANTED, deadlines=replace(one.deadlines, moved=now))
    return granted, (SendGrant(after.grant),)


def _opened_late(one: Arrival, event: RankOpened, now: float) -> Step:
    """The grant went ahead of it: what came in meanwhile may have waited for this rank alone."""
    assert one.account is not None
    after = replace(one, opened=one.opened | {event.rank})
    return _admit(after, one.account) if _can_admit(after, one.account) else (after, ())


def _with_lanes(grant: Grant, leased: tuple[Lane, ...]) -> Grant:
    """The grant with the staging that a rank leased for its lanes."""
    known = {(lane.source_rank, lane.target_rank): lane for lane in leased}
    lanes = tuple(known.get((lane.source_rank, lane.target_rank), lane) for lane in grant.lanes)
    return msgspec.structs.replace(grant, lanes=lanes)


def _offered(one: Arrival, event: Offered, now: float) -> Step:
    if (event.num_tokens, event.digest) == (one.num_tokens, one.digest):
        return replace(one, deadlines=replace(one.deadlines, moved=now, has_begun=True)), ()
    text = (
        f"granted for {one.num_tokens} tokens (digest {one.digest.hex()}), "
        f"offered {event.num_tokens} ({event.digest.hex()})"
    )
    return _fail(one, _cause(one, Why.REFUSED_PROMPT, Stage.OFFER, text), now)


def _landed(one: Arrival, event: ChunkLanded, now: float) -> Step:
    assert one.account is not None
    assert one.terms is not None
    try:
        account, work = enter_landed(one.account, one.terms, event.landed)
    except RemoteProtocolError as error:
        return _corrupt(one, str(error), now)
    return _admit_if_complete(one, account, now, work)


def _unpacked(one: Arrival, event: ChunkUnpacked, now: float) -> Step:
    assert one.account is not None
    try:
        account = enter_unpacked(one.account, (event.source_rank, event.rank), event.chunk)
    except RemoteProtocolError as error:
        return _corrupt(one, str(error), now)
    return _admit_if_complete(one, account, now)


def _committed(one: Arrival, event: SourceCommitted, now: float) -> Step:
    assert one.account is not None
    assert one.terms is not None
    try:
        account = enter_commit(one.account, one.terms, event.commit)
    except RemoteProtocolError as error:
        return _corrupt(one, str(error), now)
    return _admit_if_complete(one, account, now)


def _admit_if_complete(one: Arrival, account: Account, now: float, work: Effects = ()) -> Step:
    if account is one.account:
        return one, ()
    after = replace(_moved(one, now), account=account)
    return _admit(after, account) if _can_admit(after, account) else (after, work)


def _can_admit(one: Arrival, account: Account) -> bool:
    # A rank that has not opened may yet find that its pages are not what the plan needs.
    assert one.terms is not None
    return is_complete(account, one.terms) and one.opened >= one.ranks


def _admit(one: Arrival, account: Account) -> Step:
    assert account.aux is not None
    outcome = Ready(account.aux)
    after = replace(one, state=S.READY, outcome=outcome, closing=Closing(is_quiet=True, is_asked=True))
    closed = CloseRanks(tuple(sorted(one.ranks)), must_still=False)
    return after, (Conclude(outcome), Release(), ToSource(one.settled(outcome)), closed)


def _aux(one: Arrival, event: AuxArrived, now: float) -> Step:
    assert one.account is not None
    if not event.is_final:
        told = () if one.account.aux else (TellAux(event.aux),)
        return _admit_if_complete(one, replace(one.account, aux=event.aux), now, told)
    outcome = Finished(event.aux)
    return _quarantine(one, outcome, now, (ToSource(one.settled(outcome)),))


def _drop(one: Arrival, event: SourceAborted | SessionLost, now: float) -> Step:
    """Nobody was ever let in."""
    return _dropped(one, event.cause, ())


def _drop_and_tell(one: Arrival, event: CallerAborted, now: float) -> Step:
    told = ToSource(Abort(transfer=one.transfer, grant=b"", cause=event.cause))
    return _dropped(one, event.cause, (told,))


def _dropped(one: Arrival, cause: Cause, effects: Effects) -> Step:
    outcome = Failed(cause)
    return replace(one, state=S.RELEASED, outcome=outcome), (*effects, Conclude(outcome), Release())


def _failed(one: Arrival, event: RankFailed | CallerAborted, now: float) -> Step:
    return _fail(one, event.cause, now)


def _source_failed(one: Arrival, event: SourceAborted, now: float) -> Step:
    # A source whose ranks have all committed waits for the verdict; one that has stopped does not care.
    outcome = Failed(event.cause)
    told = (ToSource(one.settled(outcome)),) if one.state is S.GRANTED else ()
    return _quarantine(one, outcome, now, told)


def _session_lost(one: Arrival, event: SessionLost, now: float) -> Step:
    after = replace(one, closing=replace(one.closing, must_still=True))
    return _quarantine(after, Failed(event.cause), now, ())


def _fail(one: Arrival, cause: Cause, now: float) -> Step:
    """A failure known here first: the source has to hear of it."""
    if one.state is S.PREPARING:
        told = ToSource(Abort(transfer=one.transfer, grant=b"", cause=cause))
        return _dropped(one, cause, (told,))
    assert one.grant is not None
    grant = one.grant.grant if one.state is S.GRANTED else b""
    told = ToSource(Abort(transfer=one.transfer, grant=grant, cause=cause))
    return _quarantine(one, Failed(cause), now, (told,))


def _corrupt(one: Arrival, text: str, now: float) -> Step:
    return _fail(one, _cause(one, Why.CORRUPTED, Stage.COMMIT, text), now)


def _quarantine(one: Arrival, outcome: Outcome, now: float, effects: Effects) -> Step:
    # Before the grant went out there is no writer: ranks only have to undo what they opened.
    is_quiet = one.closing.is_quiet or one.state is S.OPENING
    interval = one.deadlines.timings.ask_again_s
    closing = replace(one.closing, is_quiet=is_quiet, interval_s=interval, ask_at=now + interval)
    after = replace(one, state=S.QUARANTINED, outcome=outcome, closing=closing)
    return _close_if_possible(after, (*effects, Conclude(outcome)))


def _close_if_possible(one: Arrival, effects: Effects) -> Step:
    closing = one.closing
    if closing.is_asked or not (closing.is_quiet or closing.must_still):
        return one, effects
    after = replace(one, closing=replace(closing, is_asked=True))
    open_ranks = tuple(sorted(one.ranks - closing.closed))
    return after, (*effects, CloseRanks(open_ranks, must_still=not closing.is_quiet))


def _note_quiet(one: Arrival, event: SourceQuiet, now: float) -> Step:
    # It may have overtaken the word that says why; until that comes, or a deadline, nothing is decided.
    return replace(one, closing=replace(one.closing, is_quiet=True)), ()


def _quiet(one: Arrival, event: SourceQuiet, now: float) -> Step:
    if one.closing.is_quiet:
        return one, ()
    closing = replace(one.closing, is_quiet=True, is_asked=False)
    return _close_if_possible(replace(one, closing=closing), ())


def _note_unquiet(one: Arrival, event: SourceUnquiet, now: float) -> Step:
    return replace(one, closing=replace(one.closing, must_still=True)), ()


def _unquiet(one: Arrival, event: SourceUnquiet | SessionLost, now: float) -> Step:
    if one.closing.is_quiet or one.closing.must_still:
        return one, ()
    return _close_if_possible(replace(one, closing=replace(one.closing, must_still=True)), ())


def _closed(one: Arrival, event: RankClosed, now: float) -> Step:
    if not event.is_still:
        return one, ()
    closed = one.closing.closed | {event.rank}
    after = replace(one, closing=replace(one.closing, closed=closed))
    if not closed >= one.ranks:
        return after, ()
    return replace(after, state=S.RELEASED), (Release(),)


def _closed_ready(one: Arrival, event: RankClosed, now: float) -> Step:
    closed = one.closing.closed | {event.rank}
    state = S.RELEASED if closed >= one.ranks else S.READY
    return replace(one, state=state, closing=replace(one.closing, closed=closed)), ()


def _repeat(one: Arrival, event: VerdictAsked, now: float) -> Step:
    assert one.outcome is not None
    if one.grant is None:
        return one, ()
    return one, (ToSource(one.settled(one.outcome)),)


def _tick(one: Arrival, event: Ticked, now: float) -> Step:
    if passed := one.deadlines.passed(now):
        stage = Stage.COPY if one.state is S.GRANTED else Stage.GRANT
        return _fail(one, _cause(one, Why.DEADLINE, stage, passed), now)
    return one, ()


def _ask_again(one: Arrival, event: Ticked, now: float) -> Step:
    closing = one.closing
    if now < closing.ask_at or one.grant is None:
        return one, ()
    interval = min(closing.interval_s * 2, one.deadlines.timings.ask_again_s_max)
    after = replace(one, closing=replace(closing, interval_s=interval, ask_at=now + interval))
    effects: list[object] = []
    if not closing.is_quiet:
        effects.append(ToSource(QuietAsked(grants=(one.grant.grant,))))
    if closing.is_asked:
        open_ranks = tuple(sorted(one.ranks - closing.closed))
        effects.append(CloseRanks(open_ranks, must_still=not closing.is_quiet))
    return after, tuple(effects)


def _moved(one: Arrival, now: float) -> Arrival:
    return replace(one, deadlines=replace(one.deadlines, moved=now, has_begun=True))


def _cause(one: Arrival, why: Why, stage: Stage, text: str) -> Cause:
    return Cause(why=why, stage=stage, instance=one.instance, text=text)


S = ReceiverState
_JUDGED = (S.GRANTED, S.READY, S.QUARANTINED)
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.PREPARING, Prepared): cell(_prepare, S.OPENING, S.GRANTED),
    (S.PREPARING, Offered): cell(_offered, S.PREPARING, S.RELEASED),
    (S.PREPARING, SourceAborted): cell(_drop, S.RELEASED),
    (S.PREPARING, CallerAborted): cell(_drop_and_tell, S.RELEASED),
    (S.PREPARING, SessionLost): cell(_drop, S.RELEASED),
    (S.PREPARING, Ticked): cell(_tick, S.PREPARING, S.RELEASED),
    (S.OPENING, RankOpened): cell(_opened, S.OPENING, S.GRANTED),
    (S.OPENING, RankFailed): cell(_failed, S.QUARANTINED),
    (S.OPENING, Offered): cell(_offered, S.OPENING, S.QUARANTINED),
    (S.OPENING, SourceAborted): cell(_source_failed, S.QUARANTINED),
    (S.OPENING, CallerAborted): cell(_failed, S.QUARANTINED),
    (S.OPENING, SessionLost): cell(_session_lost, S.QUARANTINED),
    (S.OPENING, Ticked): cell(_tick, S.OPENING, S.QUARANTINED),
    (S.GRANTED, RankOpened): cell(_opened_late, S.GRANTED, S.READY),
    (S.GRANTED, Offered): cell(_offered, S.GRANTED, S.QUARANTINED),
    (S.GRANTED, ChunkLanded): cell(_landed, *_JUDGED),
    (S.GRANTED, ChunkUnpacked): cell(_unpacked, *_JUDGED),
    (S.GRANTED, SourceCommitted): cell(_committed, *_JUDGED),
    (S.GRANTED, AuxArrived): cell(_aux, *_JUDGED),
    (S.GRANTED, RankFailed): cell(_failed, S.QUARANTINED),
    (S.GRANTED, SourceAborted): cell(_source_failed, S.QUARANTINED),
    (S.GRANTED, CallerAborted): cell(_failed, S.QUARANTINED),
    (S.GRANTED, SessionLost): cell(_session_lost, S.QUARANTINED),
    (S.GRANTED, SourceQuiet): cell(_note_quiet, S.GRANTED),
    (S.GRANTED, SourceUnquiet): cell(_note_unquiet, S.GRANTED),
    (S.GRANTED, VerdictAsked): IGNORED,
    (S.GRANTED, Ticked): cell(_tick, S.GRANTED, S.QUARANTINED),
    (S.READY, RankClosed): cell(_closed_ready, S.READY, S.RELEASED),
    (S.READY, VerdictAsked): cell(_repeat, S.READY),
    (S.QUARANTINED, RankClosed): cell(_closed, S.QUARANTINED, S.RELEASED),
    (S.QUARANTINED, SourceQuiet): cell(_quiet, S.QUARANTINED),
    (S.QUARANTINED, SourceUnquiet): cell(_unquiet, S.QUARANTINED),
    (S.QUARANTINED, SessionLost): cell(_unquiet, S.QUARANTINED),
    (S.QUARANTINED, VerdictAsked): cell(_repeat, S.QUARANTINED),
    (S.QUARANTINED, Ticked): cell(_ask_again, S.QUARANTINED),
    (S.RELEASED, VerdictAsked): cell(_repeat, S.RELEASED),
}
# Once there is a verdict, words that were on their way change nothing; before there is one, they do.
_LATE = (
    RankOpened,
    RankFailed,
    Offered,
    ChunkLanded,
    ChunkUnpacked,
    SourceCommitted,
    AuxArrived,
    SourceAborted,
    CallerAborted,
)
_CELLS |= {(state, event): IGNORED for state in (S.READY, S.QUARANTINED, S.RELEASED) for event in _LATE}
_CELLS |= {(S.READY, event): IGNORED for event in (SourceQuiet, SourceUnquiet, SessionLost, Ticked)}
_CELLS |= {
    (S.RELEASED, event): IGNORED
    for event in (Prepared, RankClosed, SourceQuiet, SourceUnquiet, SessionLost, Ticked)
}

RECEIVER: Table[Arrival] = Table(
    name="receiver",
    states=ReceiverState,
    events=(
        Prepared,
        RankOpened,
        RankFailed,
        Offered,
        ChunkLanded,
        ChunkUnpacked,
        SourceCommitted,
        AuxArrived,
        SourceAborted,
        SourceQuiet,
        SourceUnquiet,
        CallerAborted,
        SessionLost,
        RankClosed,
        VerdictAsked,
        Ticked,
    ),
    remote=frozenset(
        {
            Offered,
            ChunkLanded,
            SourceCommitted,
            AuxArrived,
            SourceAborted,
            SourceQuiet,
            SourceUnquiet,
            VerdictAsked,
        }
    ),
    cells=_CELLS,
)
