"""Machines that are wrong on purpose, one way each; a paired run has to find every one of them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.protocol.paired_setup import Faults, Machines

from baton.protocol import arrival as at_target
from baton.protocol import departure as at_source
from baton.protocol import landing as at_target_rank
from baton.protocol import sender as at_source_rank
from baton.protocol.arrival import Arrival, ReceiverState
from baton.protocol.departure import Departure, OfferState
from baton.protocol.landing import LANDING, Landing, LandingState, TakeBack, TakenBack
from baton.protocol.ledger import Ledger
from baton.protocol.machine import IGNORED, Cell, Entry, Table, replace
from baton.protocol.messages import Commit, Quiet
from baton.protocol.offer import OFFER
from baton.protocol.outcomes import Cause, Failed, Ready, Stage, Why
from baton.protocol.receiver import RECEIVER
from baton.protocol.sender import (
    SENDER,
    ChunkFailed,
    Conclude,
    LetGo,
    Retire,
    Sender,
    SenderState,
    Submit,
    Tell,
)

Step = tuple[Any, tuple[object, ...]]
Around = Callable[[Callable[..., Step], Any, Any, float], Step]


def around(table: Table[Any], wrong: Around, *keys: tuple[Any, type]) -> Table[Any]:
    """The table with something else done in these cells; it may look at what is right."""
    cells: dict[Any, Entry] = dict(table.cells)
    for key in keys:
        entry = table.cells.get(key)
        right = entry.act if isinstance(entry, Cell) else lambda one, event, now: (one, ())
        cells[key] = Cell(_bound(wrong, right), tuple(table.states))
    return replace(table, cells=cells)


def _bound(wrong: Around, right: Callable[..., Step]) -> Callable[..., Step]:
    return lambda one, event, now: wrong(right, one, event, now)


def release_on_error() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        return after, (*effects, at_target.Release())

    keys = [(ReceiverState.GRANTED, one) for one in (at_target.SourceAborted, at_target.CallerAborted)]
    return Machines(receiver=around(RECEIVER, wrong, *keys))


def admit_without_commits() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        account = after.account
        if after.state is not ReceiverState.GRANTED or account.aux is None or not account.ledger.is_full:
            return after, effects
        outcome = Ready(account.aux)
        return replace(after, state=ReceiverState.READY, outcome=outcome), (at_target.Conclude(outcome),)

    return Machines(receiver=around(RECEIVER, wrong, (ReceiverState.GRANTED, at_target.ChunkLanded)))


def admit_before_the_unpack() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        after, effects = right(replace(one, terms=replace(one.terms, worked=frozenset())), event, now)
        return replace(after, terms=one.terms), effects

    return Machines(receiver=around(RECEIVER, wrong, (ReceiverState.GRANTED, at_target.ChunkLanded)))


def admit_before_ranks_have_opened() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        return right(replace(one, opened=one.ranks), event, now)

    words = (at_target.ChunkLanded, at_target.SourceCommitted, at_target.AuxArrived)
    return Machines(receiver=around(RECEIVER, wrong, *((ReceiverState.GRANTED, word) for word in words)))


def take_a_grant_sent_ahead_for_unsent() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        return right(one if one.opened else replace(one, state=ReceiverState.OPENING), event, now)

    words = (at_target.RankFailed, at_target.CallerAborted)
    return Machines(receiver=around(RECEIVER, wrong, *((ReceiverState.GRANTED, word) for word in words)))


def admit_by_count() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        ledger: Ledger = one.account.ledger
        landed = {pair: boxes for pair, boxes in ledger.landed.items() if pair not in ledger.missing}
        account = replace(one.account, ledger=replace(ledger, landed=landed))
        return right(replace(one, account=account), event, now)

    return Machines(receiver=around(RECEIVER, wrong, (ReceiverState.GRANTED, at_target.ChunkLanded)))


def take_a_lost_session_for_quiet() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        return right(replace(one, closing=replace(one.closing, is_quiet=True)), event, now)

    return Machines(receiver=around(RECEIVER, wrong, (ReceiverState.GRANTED, at_target.SessionLost)))


def tell_a_committed_source_nothing() -> Machines:
    def wrong(right: Callable[..., Step], one: Arrival, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        return after, tuple(effect for effect in effects if not isinstance(effect, at_target.ToSource))

    return Machines(receiver=around(RECEIVER, wrong, (ReceiverState.GRANTED, at_target.SourceAborted)))


def be_quiet_while_copying() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        word = Quiet(transfer=one.transfer, grant=one.grant, source_rank=one.rank)
        return replace(after, state=SenderState.ENDED), (*effects, Tell(word))

    return Machines(sender=around(SENDER, wrong, (SenderState.COPYING, at_source_rank.VerdictHeard)))


def commit_while_copying() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        if after.state is SenderState.COMMITTED:
            return after, effects
        word = Commit(
            transfer=one.transfer,
            grant=one.grant,
            source_rank=one.rank,
            num_chunks=one.num_chunks,
            num_bytes={},
        )
        return replace(after, state=SenderState.COMMITTED), (*effects, Tell(word))

    return Machines(sender=around(SENDER, wrong, (SenderState.COPYING, at_source_rank.Sealed)))


def copy_after_the_end() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: object, now: float) -> Step:
        return SENDER.step(replace(one, state=SenderState.WAITING), event, now)

    return Machines(sender=around(SENDER, wrong, (SenderState.ENDED, at_source_rank.Granted)))


def retire_before_the_verdict() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        return replace(after, is_heard=True), (*effects, Retire())

    return Machines(sender=around(SENDER, wrong, (SenderState.WAITING, at_source_rank.Aborted)))


def let_go_when_a_copy_begins() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: object, now: float) -> Step:
        after, effects = right(one, event, now)
        begun = tuple(effect.chunk.index for effect in effects if isinstance(effect, Submit))
        return after, (*effects, LetGo(begun))

    return Machines(sender=around(SENDER, wrong, (SenderState.COPYING, at_source_rank.ChunkReady)))


def conclude_twice() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: Any, now: float) -> Step:
        after, effects = right(one, event, now)
        return after, (*effects, Conclude(event.outcome))

    return Machines(sender=around(SENDER, wrong, (SenderState.ENDED, at_source_rank.VerdictHeard)))


def forget_the_doubt() -> Machines:
    def wrong(right: Callable[..., Step], one: Sender, event: ChunkFailed, now: float) -> Step:
        return right(one, replace(event, doubt=""), now)

    keys = [(state, ChunkFailed) for state in (SenderState.COPYING, SenderState.DRAINING)]
    return Machines(sender=around(SENDER, wrong, *keys))


def be_quiet_when_the_first_rank_is() -> Machines:
    def wrong(right: Callable[..., Step], one: Departure, event: Any, now: float) -> Step:
        return right(replace(one, joined=frozenset({event.rank})), event, now)

    return Machines(offer=around(OFFER, wrong, (OfferState.STOPPING, at_source.RankQuiet)))


def grant_a_rank_that_is_late() -> Machines:
    def wrong(right: Callable[..., Step], one: Departure, event: Any, now: float) -> Step:
        after, effects = right(one, event, now)
        return after, (at_source.ToRank(event.rank, one.grant), *effects)

    return Machines(offer=around(OFFER, wrong, (OfferState.STOPPING, at_source.RankOffered)))


def forget_a_late_commit() -> Machines:
    key = (OfferState.STOPPING, at_source.RankCommitted)
    return Machines(offer=replace(OFFER, cells={**OFFER.cells, key: IGNORED}))


def ignore_the_target() -> Machines:
    key = (OfferState.RUNNING, at_source.TargetAborted)
    return Machines(offer=replace(OFFER, cells={**OFFER.cells, key: IGNORED}))


def leave_an_asker_waiting() -> Machines:
    key = (OfferState.STOPPING, at_source.Inquired)
    return Machines(offer=replace(OFFER, cells={**OFFER.cells, key: IGNORED}))


def answer_any_prompt() -> Machines:
    def wrong(right: Callable[..., Step], one: Departure, event: Any, now: float) -> Step:
        return right(replace(one, prefill=None), event, now)

    return Machines(offer=around(OFFER, wrong, (OfferState.DECIDED, at_source.GrantArrived)))


def believe_one_rank() -> Machines:
    """An answer counts as soon as one rank has it, whatever the others prefilled."""

    def wrong(right: Callable[..., Step], one: Departure, event: Any, now: float) -> Step:
        return right(replace(one, ranks=one.joined), event, now)

    return Machines(offer=around(OFFER, wrong, (OfferState.OPEN, at_source.AuxGiven)))


def give_up_without_asking() -> Machines:
    """A committed source that waits no longer, and does not let the target decide."""

    def wrong(right: Callable[..., Step], one: Departure, event: Any, now: float) -> Step:
        if not one.deadlines.passed(now):
            return right(one, event, now)
        cause = Cause(Why.DEADLINE, Stage.COMMIT, one.instance)
        return OFFER.step(one, at_source.TargetSettled(Failed(cause)), now)

    return Machines(offer=around(OFFER, wrong, (OfferState.COMMITTED, at_source.Ticked)))


def close_while_unpacking() -> Machines:
    def wrong(right: Callable[..., Step], one: Landing, event: Any, now: float) -> Step:
        after, _ = right(one, event, now)
        return after, (TakeBack(event.must_still),)

    return Machines(landing=around(LANDING, wrong, (LandingState.OPEN, at_target_rank.CloseAsked)))


def claim_to_be_still() -> Machines:
    def wrong(right: Callable[..., Step], one: Landing, event: TakenBack, now: float) -> Step:
        return right(one, TakenBack(is_still=True), now)

    return Machines(landing=around(LANDING, wrong, (LandingState.CLOSING, TakenBack)))


VARIANTS: tuple[tuple[Callable[[], Machines], Faults, str], ...] = (
    (release_on_error, Faults(target_aborts=True), "the pages were released while source rank"),
    (admit_without_commits, Faults(), "has not committed"),
    (admit_before_the_unpack, Faults(), "ready, but pair"),
    (admit_before_ranks_have_opened, Faults(), "has not opened"),
    (take_a_grant_sent_ahead_for_unsent, Faults(target_aborts=True), "while source rank"),
    (admit_by_count, Faults(leaves_gap=True, overlaps=True), "ready, but pair"),
    (take_a_lost_session_for_quiet, Faults(loses_session=True), "while source rank"),
    (tell_a_committed_source_nothing, Faults(rank_aborts=True), "waits to be told"),
    (be_quiet_while_copying, Faults(target_aborts=True), "said Quiet with copies under way"),
    (commit_while_copying, Faults(), "said Commit with copies under way"),
    (copy_after_the_end, Faults(rank_aborts=True), "began a copy after it said Quiet"),
    (retire_before_the_verdict, Faults(retries=True), "the source said Quiet while rank"),
    (let_go_when_a_copy_begins, Faults(), "while a copy reads it"),
    (conclude_twice, Faults(rank_aborts=True), "2 conclusions"),
    (forget_the_doubt, Faults(copies_doubt=True), "vouched for bytes"),
    (be_quiet_when_the_first_rank_is, Faults(copies_fail=True), "the source said Quiet while rank"),
    (grant_a_rank_that_is_late, Faults(target_aborts=True), "the source said Quiet while rank"),
    (forget_a_late_commit, Faults(copies_fail=True), "stuck"),
    (ignore_the_target, Faults(target_aborts=True), "waits to be told"),
    (leave_an_asker_waiting, Faults(has_rival=True, target_aborts=True), "waits to be told"),
    (answer_any_prompt, Faults(prompts_differ=True, finishes=True), "the answer to another prompt"),
    (
        believe_one_rank,
        Faults(prompts_differ=True, ranks_differ=True, finishes=True),
        "the answer to another prompt",
    ),
    (give_up_without_asking, Faults(unpacks_slow=True), "the target is ready, the source was told"),
    (close_while_unpacking, Faults(target_aborts=True), "takes permissions back while it unpacks"),
    (claim_to_be_still, Faults(loses_session=True), "while source rank"),
)
"""Each with what has to go wrong for it to show, and with what it is found out."""
