"""A source instance's side of one transfer, at its coordinator.

It matches the offers of its ranks with the target's grant, in either order, and forwards their reports.
A failure of one rank stops all of them; once the last one is quiet, the target is sent one `Quiet`.
Without a grant the outcome may already be decided here; it is then kept for the target that is still to ask.
An answer that ended here counts when every rank of the group has said what it prefilled: one rank alone could
have answered another prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.protocol.machine import IGNORED, Effects, Entry, Forget, SessionLost, Table, Ticked, cell, replace
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Commit,
    Grant,
    Landed,
    Message,
    Offer,
    OutcomeQuery,
    Queued,
    Quiet,
    Settled,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Stage, Why
from baton.protocol.timings import Deadlines


class SourceCoordinatorState(Enum):
    """Where a source instance is with one transfer."""

    OPEN = "open"
    DECIDED = "decided"
    RUNNING = "running"
    COMMITTED = "committed"
    STOPPING = "stopping"
    ENDED = "ended"


class SourceCoordinator(msgspec.Struct, frozen=True):
    """The record of one transfer at its source's coordinator."""

    transfer: str
    instance: str
    groups: tuple[frozenset[int], ...]
    """The ranks of every dp group of the instance."""
    deadlines: Deadlines
    state: SourceCoordinatorState = SourceCoordinatorState.OPEN
    ranks: frozenset[int] = frozenset()
    """All that have to take part: the ranks of the dp group, once it is known."""
    joined: frozenset[int] = frozenset()
    committed: frozenset[int] = frozenset()
    quiet: frozenset[int] = frozenset()
    offer: Offer | None = None
    """What was prefilled, as the first rank offered it; sent to the target in this form."""
    grant: Grant | None = None
    aux: AuxRecord | None = None
    outcome: Outcome | None = None
    """How it ended; while committed, how it ends unless the target decides otherwise."""
    doubt: str = ""
    askers: frozenset[int] = frozenset()
    """Sessions that asked for the dp group before it was known."""
    is_target_full: bool = False
    """Whether the target has it in its queue; until it is granted."""

    @property
    def announced(self) -> Offer:
        """The offer as targets get it: with the progress deadline that holds."""
        assert self.offer is not None
        return msgspec.structs.replace(self.offer, progress_s=self.deadlines.progress_s)

    @property
    def final(self) -> AuxRecord | None:
        """The whole answer, once every rank of the group has said what it prefilled."""
        is_final = self.aux is not None and self.aux.is_final and self.joined >= self.ranks
        return self.aux if is_final else None

    def settled(self, outcome: Outcome) -> Settled:
        """The message that tells a rank how it ended."""
        return Settled(transfer=self.transfer, grant=self.grant.grant if self.grant else b"", outcome=outcome)

    def stamped(self, aux: AuxRecord) -> AuxRecord:
        """The aux record under the grant that has come since."""
        assert self.grant is not None
        return msgspec.structs.replace(aux, grant=self.grant.grant)

    def mismatch(self, offer: Offer) -> Cause | None:
        """Why the grant does not match what was prefilled; None if it does."""
        grant = self.grant
        assert grant is not None
        if (grant.num_tokens, grant.digest) != (offer.num_tokens, offer.digest):
            text = (
                f"granted for {grant.num_tokens} tokens (digest {grant.digest.hex()}), "
                f"prefilled {offer.num_tokens} ({offer.digest.hex()})"
            )
            return self.cause(Why.REFUSED_PROMPT, Stage.GRANT, text)
        if grant.source_dp != offer.source_dp:
            text = f"granted to dp group {grant.source_dp}, prefilled by group {offer.source_dp}"
            return self.cause(Why.REFUSED_PROMPT, Stage.GRANT, text)
        return None

    def cause(self, why: Why, stage: Stage, text: str, rank: int = -1) -> Cause:
        """A cause on this instance."""
        return Cause(why=why, stage=stage, instance=self.instance, rank=rank, text=text)


# Events beside messages. `Offer`, `Landed`, `Commit`, `AuxRecord`, `Quiet` and `Unquiet` are those of this
# instance's ranks; `Grant` and `Settled` are the target's.


@dataclass(frozen=True, slots=True)
class GroupRequested:
    """A target asks for the dp group."""

    session: int


@dataclass(frozen=True, slots=True)
class TargetQueued:
    """The target has no room yet, and its queue moves."""


@dataclass(frozen=True, slots=True)
class RankAborted:
    """A rank cannot go on, or its engine gave up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class TargetAborted:
    """The target failed, declined or gave up."""

    cause: Cause


# Effects.


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send to one rank of this instance."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToTarget:
    """Send to the target, over the session that the grant came over."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToSession:
    """Send over a session that has not granted anything."""

    session: int
    message: Message


@dataclass(frozen=True, slots=True)
class RetireGrant:
    """The grant is over: keep a tombstone that answers the target's queries, and never accept it again."""

    grant: bytes
    doubt: str


Step: TypeAlias = tuple[SourceCoordinator, Effects]


def refusals(record: SourceCoordinator, grant: Grant) -> Effects:
    """The answer to a second grant for a live transfer; no rank ever sees it."""
    text = f"transfer {record.transfer} is live here under another grant; take a new id for each attempt"
    cause = record.cause(Why.REFUSED_LIVE_ID, Stage.GRANT, text)
    return (
        ToTarget(Abort(transfer=record.transfer, grant=grant.grant, cause=cause)),
        ToTarget(Quiet(transfer=record.transfer, grant=grant.grant)),
        RetireGrant(grant.grant, ""),
    )


def _join(record: SourceCoordinator, offer: Offer, now: float) -> Step:
    rank, deadlines = offer.source_rank, record.deadlines.named(offer.progress_s)
    offer = msgspec.structs.replace(offer, source_rank=-1, progress_s=0.0)
    first = record.offer or offer
    joined = record.joined | {rank}
    # A rank that joins late may find the engine at work already.
    if msgspec.structs.replace(first, is_queued=offer.is_queued) != offer:
        text = f"rank {rank} prefilled {_described(offer)}, others {_described(first)}"
        cause = record.cause(Why.REFUSED_PROMPT, Stage.OFFER, text, rank)
        return _fail(replace(record, joined=joined), cause, now)
    after = replace(
        record,
        offer=first,
        ranks=record.groups[offer.source_dp],
        joined=joined,
        askers=frozenset(),
        deadlines=deadlines.queued(now) if offer.is_queued else _reached(deadlines, record.grant, now),
    )
    answers: Effects = tuple(ToSession(session, after.announced) for session in sorted(record.askers))
    if record.is_target_full:
        answers = (*answers, ToRank(rank, Queued(transfer=record.transfer)))
    if after.grant is None and (aux := after.final) is not None:
        decided, effects = _decide(after, Finished(aux.aux), now)
        return decided, (*answers, *effects)
    return after, answers


def _reached(deadlines: Deadlines, other: Grant | Offer | None, now: float) -> Deadlines:
    """The offer has come, or the grant; with the other one both sides are at work."""
    return deadlines.met(now) if other is not None else replace(deadlines, moved=now)


def _described(offer: Offer) -> str:
    return f"{offer.num_tokens} tokens (digest {offer.digest.hex()}) in dp group {offer.source_dp}"


def _join_granted(record: SourceCoordinator, offer: Offer, now: float) -> Step:
    assert record.grant is not None
    after, answers = _join(record, offer, now)
    if after.state is not S.RUNNING:
        return after, answers
    assert after.offer is not None
    if clash := after.mismatch(after.offer):
        return _fail(after, clash, now)
    if (aux := after.final) is not None:
        return _stop_ranks(after, Finished(aux.aux), (*answers, ToTarget(after.stamped(aux))))
    effects: Effects = (*answers, ToRank(offer.source_rank, record.grant))
    if record.offer is None or after.deadlines.progress_s > record.deadlines.progress_s:
        effects = (ToTarget(after.announced), *effects)
    return after, effects


def _turn_away(record: SourceCoordinator, offer: Offer, now: float) -> Step:
    """Every rank of the group has committed: this one is of another group, or of another attempt."""
    text = f"transfer {record.transfer} was sent already; take a new id for each attempt"
    cause = record.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text, offer.source_rank)
    return record, (ToRank(offer.source_rank, record.settled(Failed(cause))),)


def _join_late(record: SourceCoordinator, offer: Offer, now: float) -> Step:
    # This rank holds nothing: it gets the outcome and says quiet, which is ignored.
    assert record.outcome is not None
    return record, (ToRank(offer.source_rank, record.settled(record.outcome)),)


def _answer(record: SourceCoordinator, event: GroupRequested, now: float) -> Step:
    if record.offer is None:
        return replace(record, askers=record.askers | {event.session}), ()
    return record, (ToSession(event.session, record.announced),)


def _answer_decided(record: SourceCoordinator, event: GroupRequested, now: float) -> Step:
    # Without a grant id there is nothing to settle: the target gets the reason instead.
    if isinstance(record.outcome, Failed):
        abort = Abort(transfer=record.transfer, grant=b"", cause=record.outcome.cause)
        return record, (ToSession(event.session, abort),)
    return record, () if record.offer is None else (ToSession(event.session, record.announced),)


def _rank_queued(record: SourceCoordinator, message: Queued, now: float) -> Step:
    """The engine's queue moves; a target that has granted the transfer waits for it."""
    after = replace(record, deadlines=record.deadlines.queued(now))
    return after, () if record.grant is None else (ToTarget(Queued(transfer=record.transfer)),)


def _target_queued(record: SourceCoordinator, event: TargetQueued, now: float) -> Step:
    after = replace(record, deadlines=record.deadlines.queued(now), is_target_full=True)
    ranks = () if record.is_target_full else sorted(record.joined)
    return after, tuple(ToRank(rank, Queued(transfer=record.transfer)) for rank in ranks)


def _grant(record: SourceCoordinator, grant: Grant, now: float) -> Step:
    deadlines = record.deadlines.named(grant.progress_s)
    is_queued = record.offer is not None and record.offer.is_queued
    after = replace(
        record,
        grant=grant,
        ranks=record.groups[grant.source_dp],
        state=S.RUNNING,
        is_target_full=False,
        deadlines=deadlines.queued(now) if is_queued else _reached(deadlines, record.offer, now),
    )
    if record.offer is None:
        return after, ()
    if clash := after.mismatch(record.offer):
        return _fail(after, clash, now)
    effects: list[object] = [ToTarget(after.announced)]
    effects += [ToRank(rank, grant) for rank in sorted(record.joined)]
    if record.aux is not None and not record.aux.is_final:
        effects.append(ToTarget(after.stamped(record.aux)))
    return after, tuple(effects)


def _grant_decided(record: SourceCoordinator, grant: Grant, now: float) -> Step:
    """No rank was given this grant and none will be: it is quiet from the start."""
    assert record.outcome is not None
    after = replace(record, grant=grant, state=S.ENDED)
    # A decided transfer without an aux record failed. The answer to another prompt is of no use either.
    cause = record.outcome.cause if isinstance(record.outcome, Failed) else None
    if cause is None and record.offer is not None:
        cause = after.mismatch(record.offer)
    message: Message
    if cause is not None:
        message = Abort(transfer=record.transfer, grant=grant.grant, cause=cause)
    else:
        assert record.aux is not None
        message = after.stamped(record.aux)
    quiet = Quiet(transfer=record.transfer, grant=grant.grant)
    return after, (ToTarget(message), ToTarget(quiet), RetireGrant(grant.grant, ""), Forget())


def _grant_again(record: SourceCoordinator, grant: Grant, now: float) -> Step:
    assert record.grant is not None
    return record, () if record.grant.grant == grant.grant else refusals(record, grant)


def _landed(record: SourceCoordinator, landed: Landed, now: float) -> Step:
    return replace(record, deadlines=record.deadlines.met(now)), (ToTarget(landed),)


def _committed(record: SourceCoordinator, commit: Commit, now: float) -> Step:
    committed = record.committed | {commit.source_rank}
    state = S.COMMITTED if committed >= record.ranks else S.RUNNING
    return replace(_moved(record, now), committed=committed, state=state), (ToTarget(commit),)


def _keep_aux(record: SourceCoordinator, aux: AuxRecord, now: float) -> Step:
    after = replace(record, aux=aux)
    return (after, ()) if after.final is None else _decide(after, Finished(aux.aux), now)


def _forward_aux(record: SourceCoordinator, aux: AuxRecord, now: float) -> Step:
    after = replace(_moved(record, now), aux=aux)
    forwarded = ToTarget(after.stamped(aux))
    if not aux.is_final:
        return after, (forwarded,)
    if after.final is None:
        return after, ()
    return _stop_ranks(after, Finished(aux.aux), (forwarded,))


def _rank_aborted(record: SourceCoordinator, event: RankAborted, now: float) -> Step:
    return _fail(record, event.cause, now)


def _rank_aborted_late(record: SourceCoordinator, event: RankAborted, now: float) -> Step:
    assert record.grant is not None
    return record, (ToTarget(Abort(transfer=record.transfer, grant=record.grant.grant, cause=event.cause)),)


def _rank_quiet(record: SourceCoordinator, message: Quiet | Unquiet, now: float) -> Step:
    return _quiet_if_all(_note_quiet(record, message, now)[0], ())


def _note_quiet(record: SourceCoordinator, message: Quiet | Unquiet, now: float) -> Step:
    """Without a stop: the rank whose answer ended, while others have not said what they prefilled."""
    doubt = message.text if isinstance(message, Unquiet) else ""
    return replace(record, quiet=record.quiet | {message.source_rank}, doubt=doubt or record.doubt), ()


def _commit_late(record: SourceCoordinator, commit: Commit, now: float) -> Step:
    """The rank committed before it was told to stop: it is quiet, and sends nothing more."""
    return _quiet_if_all(replace(record, committed=record.committed | {commit.source_rank}), ())


def _target_gone(record: SourceCoordinator, event: TargetAborted | SessionLost, now: float) -> Step:
    return _stop_ranks(record, Failed(event.cause), ())


def _target_declined(record: SourceCoordinator, event: TargetAborted | SessionLost, now: float) -> Step:
    return _decide(record, Failed(event.cause), now)


def _committed_gone(record: SourceCoordinator, event: TargetAborted | SessionLost, now: float) -> Step:
    return _close(record, Failed(event.cause))


def _settle(record: SourceCoordinator, settled: Settled, now: float) -> Step:
    return _close(record, settled.outcome)


def _settle_running(record: SourceCoordinator, settled: Settled, now: float) -> Step:
    return _stop_ranks(record, settled.outcome, ())


def _close(record: SourceCoordinator, outcome: Outcome) -> Step:
    """All ranks committed, so all are quiet."""
    assert record.grant is not None
    after = replace(record, state=S.ENDED, outcome=outcome)
    effects = (
        ToTarget(Quiet(transfer=record.transfer, grant=record.grant.grant)),
        *_verdict_to_ranks(after, outcome),
        RetireGrant(record.grant.grant, ""),
        Forget(),
    )
    return after, effects


def _tick_open(record: SourceCoordinator, event: Ticked, now: float) -> Step:
    if passed := record.deadlines.passed(now):
        return _fail(record, record.cause(Why.DEADLINE, Stage.OFFER, f"no grant: {passed}"), now)
    return record, ()


def _tick_decided(record: SourceCoordinator, event: Ticked, now: float) -> Step:
    if now - record.deadlines.moved < record.deadlines.timings.linger_s:
        return record, ()
    return replace(record, state=S.ENDED), (Forget(),)


def _tick_running(record: SourceCoordinator, event: Ticked, now: float) -> Step:
    if passed := record.deadlines.passed(now):
        return _fail(record, record.cause(Why.DEADLINE, Stage.COPY, passed), now)
    return record, ()


def _tick_committed(record: SourceCoordinator, event: Ticked, now: float) -> Step:
    assert record.grant is not None
    deadlines = record.deadlines
    if record.outcome is not None and now - deadlines.moved >= deadlines.timings.silence_s:
        return _close(record, record.outcome)
    # The target may be unpacking, and watches that itself; or it has admitted everything, and its verdict is
    # on the way. So it is asked to give up, and its answer counts.
    if record.outcome is None and (passed := deadlines.passed_in_all(now)):
        cause = record.cause(Why.DEADLINE, Stage.COMMIT, f"no verdict: {passed}")
        after = replace(record, outcome=Failed(cause), deadlines=replace(deadlines, moved=now))
        return after, (ToTarget(Abort(transfer=record.transfer, grant=record.grant.grant, cause=cause)),)
    if now - max(deadlines.asked, deadlines.moved) < deadlines.timings.ask_again_s_max:
        return record, ()
    after = replace(record, deadlines=replace(deadlines, asked=now))
    return after, (ToTarget(OutcomeQuery(grant=record.grant.grant)),)


def _fail(record: SourceCoordinator, cause: Cause, now: float) -> Step:
    """A failure known here first."""
    if record.grant is None:
        return _decide(record, Failed(cause), now)
    abort = ToTarget(Abort(transfer=record.transfer, grant=record.grant.grant, cause=cause))
    return _stop_ranks(record, Failed(cause), (abort,))


def _decide(record: SourceCoordinator, outcome: Outcome, now: float) -> Step:
    after = replace(_moved(record, now), state=S.DECIDED, outcome=outcome, askers=frozenset())
    effects = _verdict_to_ranks(after, outcome)
    if isinstance(outcome, Failed):
        abort = Abort(transfer=record.transfer, grant=b"", cause=outcome.cause)
        effects = (*effects, *(ToSession(session, abort) for session in sorted(record.askers)))
    return after, effects


def _stop_ranks(record: SourceCoordinator, outcome: Outcome, effects: Effects) -> Step:
    after = replace(record, state=S.STOPPING, outcome=outcome)
    return _quiet_if_all(after, (*effects, *_verdict_to_ranks(after, outcome)))


def _quiet_if_all(record: SourceCoordinator, effects: Effects) -> Step:
    """Ranks that never joined were never given the grant, and will not be."""
    if not record.joined <= record.quiet | record.committed:
        return record, effects
    assert record.grant is not None
    grant = record.grant.grant
    message: Message = Quiet(transfer=record.transfer, grant=grant)
    if record.doubt:
        message = Unquiet(transfer=record.transfer, grant=grant, text=record.doubt)
    ended = replace(record, state=S.ENDED)
    return ended, (*effects, ToTarget(message), RetireGrant(grant, record.doubt), Forget())


def _verdict_to_ranks(record: SourceCoordinator, outcome: Outcome) -> Effects:
    return tuple(ToRank(rank, record.settled(outcome)) for rank in sorted(record.joined))


def _moved(record: SourceCoordinator, now: float) -> SourceCoordinator:
    return replace(record, deadlines=replace(record.deadlines, moved=now))


S = SourceCoordinatorState
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.OPEN, Offer): cell(_join, S.OPEN, S.DECIDED),
    (S.OPEN, GroupRequested): cell(_answer, S.OPEN),
    (S.OPEN, Grant): cell(_grant, S.RUNNING, S.STOPPING, S.ENDED),
    (S.OPEN, AuxRecord): cell(_keep_aux, S.OPEN, S.DECIDED),
    (S.OPEN, RankAborted): cell(_rank_aborted, S.DECIDED),
    (S.OPEN, Quiet): cell(_note_quiet, S.OPEN),
    (S.OPEN, Unquiet): cell(_note_quiet, S.OPEN),
    (S.OPEN, TargetAborted): cell(_target_declined, S.DECIDED),
    (S.OPEN, Queued): cell(_rank_queued, S.OPEN),
    (S.OPEN, TargetQueued): cell(_target_queued, S.OPEN),
    (S.OPEN, SessionLost): cell(_target_declined, S.DECIDED),
    (S.OPEN, Ticked): cell(_tick_open, S.OPEN, S.DECIDED),
    (S.DECIDED, Offer): cell(_join_late, S.DECIDED),
    (S.DECIDED, GroupRequested): cell(_answer_decided, S.DECIDED),
    (S.DECIDED, Grant): cell(_grant_decided, S.ENDED),
    (S.DECIDED, AuxRecord): IGNORED,
    (S.DECIDED, RankAborted): IGNORED,
    (S.DECIDED, Quiet): IGNORED,
    (S.DECIDED, Unquiet): IGNORED,
    (S.DECIDED, TargetAborted): IGNORED,
    (S.DECIDED, SessionLost): IGNORED,
    (S.DECIDED, Ticked): cell(_tick_decided, S.DECIDED, S.ENDED),
    (S.RUNNING, Offer): cell(_join_granted, S.RUNNING, S.STOPPING, S.ENDED),
    (S.RUNNING, GroupRequested): cell(_answer, S.RUNNING),
    (S.RUNNING, Grant): cell(_grant_again, S.RUNNING),
    (S.RUNNING, Queued): cell(_rank_queued, S.RUNNING),
    (S.RUNNING, Landed): cell(_landed, S.RUNNING),
    (S.RUNNING, Commit): cell(_committed, S.RUNNING, S.COMMITTED),
    (S.RUNNING, AuxRecord): cell(_forward_aux, S.RUNNING, S.STOPPING, S.ENDED),
    (S.RUNNING, RankAborted): cell(_rank_aborted, S.STOPPING, S.ENDED),
    (S.RUNNING, Quiet): cell(_note_quiet, S.RUNNING),
    (S.RUNNING, Unquiet): cell(_note_quiet, S.RUNNING),
    (S.RUNNING, TargetAborted): cell(_target_gone, S.STOPPING, S.ENDED),
    (S.RUNNING, Settled): cell(_settle_running, S.STOPPING, S.ENDED),
    (S.RUNNING, SessionLost): cell(_target_gone, S.STOPPING, S.ENDED),
    (S.RUNNING, Ticked): cell(_tick_running, S.RUNNING, S.STOPPING, S.ENDED),
    (S.COMMITTED, Offer): cell(_turn_away, S.COMMITTED),
    (S.COMMITTED, GroupRequested): cell(_answer, S.COMMITTED),
    (S.COMMITTED, Grant): cell(_grant_again, S.COMMITTED),
    (S.COMMITTED, RankAborted): cell(_rank_aborted_late, S.COMMITTED),
    (S.COMMITTED, TargetAborted): cell(_committed_gone, S.ENDED),
    (S.COMMITTED, Settled): cell(_settle, S.ENDED),
    (S.COMMITTED, SessionLost): cell(_committed_gone, S.ENDED),
    (S.COMMITTED, Ticked): cell(_tick_committed, S.COMMITTED, S.ENDED),
    (S.STOPPING, Offer): cell(_join_late, S.STOPPING),
    (S.STOPPING, GroupRequested): cell(_answer_decided, S.STOPPING),
    (S.STOPPING, Grant): cell(_grant_again, S.STOPPING),
    (S.STOPPING, Landed): IGNORED,
    (S.STOPPING, Commit): cell(_commit_late, S.STOPPING, S.ENDED),
    (S.STOPPING, AuxRecord): IGNORED,
    (S.STOPPING, RankAborted): IGNORED,
    (S.STOPPING, Quiet): cell(_rank_quiet, S.STOPPING, S.ENDED),
    (S.STOPPING, Unquiet): cell(_rank_quiet, S.STOPPING, S.ENDED),
    (S.STOPPING, TargetAborted): IGNORED,
    (S.STOPPING, Settled): IGNORED,
    (S.STOPPING, SessionLost): IGNORED,
    (S.STOPPING, Ticked): IGNORED,
}
# A queue may have been left in the meantime.
_CELLS |= {(state, Queued): IGNORED for state in (S.DECIDED, S.COMMITTED, S.STOPPING)}
_CELLS |= {(state, TargetQueued): IGNORED for state in (S.DECIDED, S.RUNNING, S.COMMITTED, S.STOPPING)}

SOURCE_COORDINATOR: Table[SourceCoordinator] = Table(
    name="source coordinator",
    states=SourceCoordinatorState,
    remote=frozenset({GroupRequested, Grant, TargetQueued, TargetAborted, Settled}),
    cells=_CELLS,
)
