"""A source instance's side of one transfer, at its coordinator.

It joins what its ranks offer with the grant that the target sends, in either order, passes on what ranks say,
and turns many voices into one: a failure of one rank stops all of them, and the target hears `quiet` once,
when the last rank is. While there is no grant the outcome may already be decided here; it is then kept for
the target that is still to ask. An answer that ended here counts when every rank of the group has said what
it prefilled: one rank alone could have answered another prompt.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeAlias

from baton.protocol.departure import (
    AuxGiven,
    Bury,
    Departure,
    Forget,
    GrantArrived,
    Inquired,
    OfferState,
    RankCommitted,
    RankFailed,
    RankLanded,
    RankOffered,
    RankQuiet,
    SessionLost,
    TargetAborted,
    TargetSettled,
    Ticked,
    ToRank,
    ToSession,
    ToTarget,
    refusals,
)
from baton.protocol.machine import IGNORED, Effects, Entry, Table, cell, replace
from baton.protocol.messages import (
    Abort,
    AnyMessage,
    Quiet,
    SettledAsked,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Stage, Why

Step: TypeAlias = tuple[Departure, Effects]


def _join(one: Departure, event: RankOffered, now: float) -> Step:
    known = one.prefill or event.prefill
    if known != event.prefill:
        text = f"rank {event.rank} prefilled {event.prefill}, others {known}"
        cause = one.cause(Why.REFUSED_PROMPT, Stage.OFFER, text, event.rank)
        joined = replace(one, joined=one.joined | {event.rank})
        return _fail(joined, cause, now)
    told = tuple(ToSession(session, one.offer(known)) for session in sorted(one.askers))
    after = replace(
        one,
        prefill=known,
        ranks=event.ranks,
        joined=one.joined | {event.rank},
        askers=frozenset(),
        deadlines=replace(one.deadlines, moved=now, has_begun=one.grant is not None),
    )
    if after.grant is None and (aux := after.final) is not None:
        decided, effects = _decide(after, Finished(aux.aux), now)
        return decided, (*told, *effects)
    return after, told


def _join_granted(one: Departure, event: RankOffered, now: float) -> Step:
    assert one.grant is not None
    after, told = _join(one, event, now)
    if after.state is not OfferState.RUNNING:
        return after, told
    if clash := after.mismatch(event.prefill):
        return _fail(after, clash, now)
    if (aux := after.final) is not None:
        return _stop_ranks(after, Finished(aux.aux), (*told, ToTarget(after.stamped(aux))))
    effects: Effects = (*told, ToRank(event.rank, one.grant))
    if one.prefill is None:
        effects = (ToTarget(one.offer(event.prefill)), *effects)
    return after, effects


def _turn_away(one: Departure, event: RankOffered, now: float) -> Step:
    """Every rank of the group has committed: this one is of another, or of another attempt."""
    text = f"transfer {one.transfer} was sent already; take a new id for each attempt"
    cause = one.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text, event.rank)
    return one, (ToRank(event.rank, one.settled(Failed(cause))),)


def _join_late(one: Departure, event: RankOffered, now: float) -> Step:
    # Its sender holds nothing: it hears the outcome and says quiet, which nobody waits for.
    assert one.outcome is not None
    return one, (ToRank(event.rank, one.settled(one.outcome)),)


def _answer(one: Departure, event: Inquired, now: float) -> Step:
    if one.prefill is None:
        return replace(one, askers=one.askers | {event.session}), ()
    return one, (ToSession(event.session, one.offer(one.prefill)),)


def _answer_decided(one: Departure, event: Inquired, now: float) -> Step:
    assert one.outcome is not None
    # Without a grant id there is nothing to settle: the target is told why there is nothing to ask for.
    match one.outcome:
        case Failed(cause):
            word: AnyMessage = Abort(transfer=one.transfer, grant=b"", cause=cause)
        case _ if one.prefill is not None:
            word = one.offer(one.prefill)
        case _:
            return one, ()
    return one, (ToSession(event.session, word),)


def _grant(one: Departure, event: GrantArrived, now: float) -> Step:
    after = replace(
        one,
        grant=event.grant,
        ranks=event.ranks,
        state=OfferState.RUNNING,
        deadlines=replace(one.deadlines, moved=now, has_begun=one.prefill is not None),
    )
    if one.prefill is None:
        return after, ()
    if clash := after.mismatch(one.prefill):
        return _fail(after, clash, now)
    effects: list[object] = [ToTarget(one.offer(one.prefill))]
    effects += [ToRank(rank, event.grant) for rank in sorted(one.joined)]
    if one.aux is not None and not one.aux.is_final:
        effects.append(ToTarget(after.stamped(one.aux)))
    return after, tuple(effects)


def _grant_decided(one: Departure, event: GrantArrived, now: float) -> Step:
    """No rank was given this grant and none will be: it is quiet from the start."""
    assert one.outcome is not None
    after = replace(one, grant=event.grant, state=OfferState.ENDED)
    # A decided transfer without an aux record failed; the answer to another prompt is nobody's answer.
    cause = one.outcome.cause if isinstance(one.outcome, Failed) else None
    if cause is None and one.prefill is not None:
        cause = after.mismatch(one.prefill)
    word: AnyMessage
    if cause is not None:
        word = Abort(transfer=one.transfer, grant=event.grant.grant, cause=cause)
    else:
        assert one.aux is not None
        word = after.stamped(one.aux)
    quiet = Quiet(transfer=one.transfer, grant=event.grant.grant)
    return after, (ToTarget(word), ToTarget(quiet), Bury(event.grant.grant, ""), Forget())


def _grant_again(one: Departure, event: GrantArrived, now: float) -> Step:
    assert one.grant is not None
    if one.grant.grant == event.grant.grant:
        return one, ()
    return one, refusals(one, event.grant)


def _landed(one: Departure, event: RankLanded, now: float) -> Step:
    return _moved(one, now), (ToTarget(event.landed),)


def _committed(one: Departure, event: RankCommitted, now: float) -> Step:
    committed = one.committed | {event.commit.source_rank}
    state = OfferState.COMMITTED if committed >= one.ranks else OfferState.RUNNING
    return replace(_moved(one, now), committed=committed, state=state), (ToTarget(event.commit),)


def _keep_aux(one: Departure, event: AuxGiven, now: float) -> Step:
    after = replace(one, aux=event.record)
    return (after, ()) if after.final is None else _decide(after, Finished(event.record.aux), now)


def _pass_aux(one: Departure, event: AuxGiven, now: float) -> Step:
    after = replace(_moved(one, now), aux=event.record)
    told = ToTarget(after.stamped(event.record))
    if not event.record.is_final:
        return after, (told,)
    if after.final is None:
        return after, ()
    return _stop_ranks(after, Finished(event.record.aux), (told,))


def _rank_failed(one: Departure, event: RankFailed, now: float) -> Step:
    return _fail(one, event.cause, now)


def _rank_failed_late(one: Departure, event: RankFailed, now: float) -> Step:
    assert one.grant is not None
    return one, (ToTarget(Abort(transfer=one.transfer, grant=one.grant.grant, cause=event.cause)),)


def _rank_quiet(one: Departure, event: RankQuiet, now: float) -> Step:
    return _quiet_if_all(_noted(one, event), ())


def _note_quiet(one: Departure, event: RankQuiet, now: float) -> Step:
    """The rank whose answer ended, while others have not said what they prefilled."""
    return _noted(one, event), ()


def _noted(one: Departure, event: RankQuiet) -> Departure:
    return replace(one, quiet=one.quiet | {event.rank}, doubt=event.doubt or one.doubt)


def _commit_late(one: Departure, event: RankCommitted, now: float) -> Step:
    """The rank committed before it heard of the stop: it is quiet, and says nothing more."""
    return _quiet_if_all(replace(one, committed=one.committed | {event.commit.source_rank}), ())


def _target_gone(one: Departure, event: TargetAborted | SessionLost, now: float) -> Step:
    return _stop_ranks(one, Failed(event.cause), ())


def _target_declined(one: Departure, event: TargetAborted, now: float) -> Step:
    return _decide(one, Failed(event.cause), now)


def _committed_gone(one: Departure, event: TargetAborted | SessionLost, now: float) -> Step:
    return _close(one, Failed(event.cause))


def _settle(one: Departure, event: TargetSettled, now: float) -> Step:
    return _close(one, event.outcome)


def _settle_running(one: Departure, event: TargetSettled, now: float) -> Step:
    return _stop_ranks(one, event.outcome, ())


def _close(one: Departure, outcome: Outcome) -> Step:
    """All ranks committed, so all are quiet."""
    assert one.grant is not None
    after = replace(one, state=OfferState.ENDED, outcome=outcome)
    effects = (
        ToTarget(Quiet(transfer=one.transfer, grant=one.grant.grant)),
        *_verdict_to_ranks(after, outcome),
        Bury(one.grant.grant, ""),
        Forget(),
    )
    return after, effects


def _tick_open(one: Departure, event: Ticked, now: float) -> Step:
    if passed := one.deadlines.passed(now):
        return _fail(one, one.cause(Why.DEADLINE, Stage.OFFER, f"no grant: {passed}"), now)
    return one, ()


def _tick_decided(one: Departure, event: Ticked, now: float) -> Step:
    if now - one.deadlines.moved < one.deadlines.timings.linger_s:
        return one, ()
    return replace(one, state=OfferState.ENDED), (Forget(),)


def _tick_running(one: Departure, event: Ticked, now: float) -> Step:
    if passed := one.deadlines.passed(now):
        return _fail(one, one.cause(Why.DEADLINE, Stage.COPY, passed), now)
    return one, ()


def _tick_committed(one: Departure, event: Ticked, now: float) -> Step:
    assert one.grant is not None
    deadlines = one.deadlines
    if one.outcome is not None and now - deadlines.moved >= deadlines.timings.silence_s:
        return _close(one, one.outcome)
    # The target may be unpacking, and watches that itself; or it has admitted everything, and its word is on
    # the way. So it is asked to give up, and what it says counts.
    if one.outcome is None and (passed := deadlines.passed_in_all(now)):
        cause = one.cause(Why.DEADLINE, Stage.COMMIT, f"no verdict: {passed}")
        after = replace(one, outcome=Failed(cause), deadlines=replace(deadlines, moved=now))
        return after, (ToTarget(Abort(transfer=one.transfer, grant=one.grant.grant, cause=cause)),)
    if now - max(deadlines.asked, deadlines.moved) < deadlines.timings.ask_again_s_max:
        return one, ()
    after = replace(one, deadlines=replace(deadlines, asked=now))
    return after, (ToTarget(SettledAsked(grants=(one.grant.grant,))),)


def _fail(one: Departure, cause: Cause, now: float) -> Step:
    """A failure known here first."""
    if one.grant is None:
        return _decide(one, Failed(cause), now)
    told = ToTarget(Abort(transfer=one.transfer, grant=one.grant.grant, cause=cause))
    return _stop_ranks(one, Failed(cause), (told,))


def _decide(one: Departure, outcome: Outcome, now: float) -> Step:
    after = replace(_moved(one, now), state=OfferState.DECIDED, outcome=outcome)
    effects = list(_verdict_to_ranks(after, outcome))
    if isinstance(outcome, Failed):
        abort = Abort(transfer=one.transfer, grant=b"", cause=outcome.cause)
        effects += [ToSession(session, abort) for session in sorted(one.askers)]
    return replace(after, askers=frozenset()), tuple(effects)


def _stop_ranks(one: Departure, outcome: Outcome, effects: Effects) -> Step:
    after = replace(one, state=OfferState.STOPPING, outcome=outcome)
    return _quiet_if_all(after, (*effects, *_verdict_to_ranks(after, outcome)))


def _quiet_if_all(one: Departure, effects: Effects) -> Step:
    """Ranks that never joined were never given the grant, and will not be."""
    if not one.joined <= one.quiet | one.committed:
        return one, effects
    assert one.grant is not None
    grant = one.grant.grant
    word: AnyMessage
    if one.doubt:
        word = Unquiet(transfer=one.transfer, grant=grant, text=one.doubt)
    else:
        word = Quiet(transfer=one.transfer, grant=grant)
    return replace(one, state=OfferState.ENDED), (*effects, ToTarget(word), Bury(grant, one.doubt), Forget())


def _verdict_to_ranks(one: Departure, outcome: Outcome) -> Effects:
    return tuple(ToRank(rank, one.settled(outcome)) for rank in sorted(one.joined))


def _moved(one: Departure, now: float) -> Departure:
    return replace(one, deadlines=replace(one.deadlines, moved=now))


S = OfferState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.OPEN, RankOffered): cell(_join, S.OPEN, S.DECIDED),
    (S.OPEN, Inquired): cell(_answer, S.OPEN),
    (S.OPEN, GrantArrived): cell(_grant, S.RUNNING, S.STOPPING, S.ENDED),
    (S.OPEN, AuxGiven): cell(_keep_aux, S.OPEN, S.DECIDED),
    (S.OPEN, RankFailed): cell(_rank_failed, S.DECIDED),
    (S.OPEN, RankQuiet): cell(_note_quiet, S.OPEN),
    (S.OPEN, TargetAborted): cell(_target_declined, S.DECIDED),
    (S.OPEN, Ticked): cell(_tick_open, S.OPEN, S.DECIDED),
    (S.DECIDED, RankOffered): cell(_join_late, S.DECIDED),
    (S.DECIDED, Inquired): cell(_answer_decided, S.DECIDED),
    (S.DECIDED, GrantArrived): cell(_grant_decided, S.ENDED),
    (S.DECIDED, AuxGiven): IGNORED,
    (S.DECIDED, RankFailed): IGNORED,
    (S.DECIDED, RankQuiet): IGNORED,
    (S.DECIDED, TargetAborted): IGNORED,
    (S.DECIDED, Ticked): cell(_tick_decided, S.DECIDED, S.ENDED),
    (S.RUNNING, RankOffered): cell(_join_granted, S.RUNNING, S.STOPPING, S.ENDED),
    (S.RUNNING, Inquired): cell(_answer, S.RUNNING),
    (S.RUNNING, GrantArrived): cell(_grant_again, S.RUNNING),
    (S.RUNNING, RankLanded): cell(_landed, S.RUNNING),
    (S.RUNNING, RankCommitted): cell(_committed, S.RUNNING, S.COMMITTED),
    (S.RUNNING, AuxGiven): cell(_pass_aux, S.RUNNING, S.STOPPING, S.ENDED),
    (S.RUNNING, RankFailed): cell(_rank_failed, S.STOPPING, S.ENDED),
    (S.RUNNING, RankQuiet): cell(_note_quiet, S.RUNNING),
    (S.RUNNING, TargetAborted): cell(_target_gone, S.STOPPING, S.ENDED),
    (S.RUNNING, TargetSettled): cell(_settle_running, S.STOPPING, S.ENDED),
    (S.RUNNING, SessionLost): cell(_target_gone, S.STOPPING, S.ENDED),
    (S.RUNNING, Ticked): cell(_tick_running, S.RUNNING, S.STOPPING, S.ENDED),
    (S.COMMITTED, RankOffered): cell(_turn_away, S.COMMITTED),
    (S.COMMITTED, Inquired): cell(_answer, S.COMMITTED),
    (S.COMMITTED, GrantArrived): cell(_grant_again, S.COMMITTED),
    (S.COMMITTED, RankFailed): cell(_rank_failed_late, S.COMMITTED),
    (S.COMMITTED, TargetAborted): cell(_committed_gone, S.ENDED),
    (S.COMMITTED, TargetSettled): cell(_settle, S.ENDED),
    (S.COMMITTED, SessionLost): cell(_committed_gone, S.ENDED),
    (S.COMMITTED, Ticked): cell(_tick_committed, S.COMMITTED, S.ENDED),
    (S.STOPPING, RankOffered): cell(_join_late, S.STOPPING),
    (S.STOPPING, Inquired): cell(_answer_decided, S.STOPPING),
    (S.STOPPING, GrantArrived): cell(_grant_again, S.STOPPING),
    (S.STOPPING, RankLanded): IGNORED,
    (S.STOPPING, RankCommitted): cell(_commit_late, S.STOPPING, S.ENDED),
    (S.STOPPING, AuxGiven): IGNORED,
    (S.STOPPING, RankFailed): IGNORED,
    (S.STOPPING, RankQuiet): cell(_rank_quiet, S.STOPPING, S.ENDED),
    (S.STOPPING, TargetAborted): IGNORED,
    (S.STOPPING, TargetSettled): IGNORED,
    (S.STOPPING, SessionLost): IGNORED,
    (S.STOPPING, Ticked): IGNORED,
}

OFFER: Table[Departure] = Table(
    name="offer",
    states=OfferState,
    events=(
        RankOffered,
        Inquired,
        GrantArrived,
        RankLanded,
        RankCommitted,
        AuxGiven,
        RankFailed,
        RankQuiet,
        TargetAborted,
        TargetSettled,
        SessionLost,
        Ticked,
    ),
    remote=frozenset({Inquired, GrantArrived, TargetAborted, TargetSettled}),
    cells=_CELLS,
)
