"""A target instance's side of one transfer, at its coordinator.

Before the grant is sent no source may write and everything can be dropped at once. From the moment it is sent
the pages belong to the writers, whatever becomes of the transfer: a failure is concluded at once, but pages
come back only when the source says quiet, or when each rank's transport says that nothing can land any more.

A transfer is ready when every needed cell of every pair landed once (and was unpacked), every source rank's
manifest agrees with what the plan expects, the aux record is there, and every rank has opened, in whatever
order they came. Ranks open before the grant is sent; where opening does not keep a source from writing, they
open while it is on its way.

Messages may come in any order, so a gap counts only when all of a rank's chunks are there. A message that
cannot be true fails the transfer as corrupted: a chunk outside of the prompt or over another, a rank that has
no part, a manifest that is not the plan's, or a rank that committed and left a gap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import msgspec

from baton.errors import RemoteProtocolError
from baton.protocol.ledger import Ledger, Pair, Rectangle
from baton.protocol.machine import (
    IGNORED,
    Conclude,
    Effects,
    Entry,
    SessionLost,
    Table,
    Ticked,
    cell,
    replace,
)
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Closed,
    Commit,
    Grant,
    Landed,
    Lane,
    Message,
    Offer,
    Opened,
    OutcomeQuery,
    Queued,
    Quiet,
    QuietQuery,
    Receive,
    Settled,
    Unpacked,
    Unquiet,
)
from baton.protocol.outcomes import Aux, Cause, Failed, Finished, Outcome, Ready, Stage, Why
from baton.protocol.timings import Deadlines


class TargetCoordinatorState(Enum):
    """Where a target instance is with one transfer."""

    PREPARING = "preparing"
    OPENING = "opening"
    GRANTED = "granted"
    READY = "ready"
    QUARANTINED = "quarantined"
    RELEASED = "released"


class GrantTerms(msgspec.Struct, frozen=True):
    """What a grant is checked against: ranks that commit, bytes expected, pairs that need unpacking."""

    sources: frozenset[int]
    expected: Mapping[Pair, Mapping[str, int]]
    """Bytes by pair and component."""
    unpacked: frozenset[Pair]
    """Pairs whose chunks the target rank unpacks or checks before they count."""
    targets: Mapping[int, tuple[int, ...]]
    """By source rank: the target ranks that it sends to."""


class Account(msgspec.Struct, frozen=True):
    """What the ranks have reported for a grant so far."""

    ledger: Ledger
    chunks: Mapping[tuple[int, int], Rectangle] = msgspec.field(default_factory=dict)
    """By source rank and chunk number."""
    unpacking: frozenset[tuple[int, int, int]] = frozenset()
    """Source rank, target rank, chunk: being unpacked or checked."""
    commits: Mapping[int, Commit] = msgspec.field(default_factory=dict)
    aux: Aux | None = None


class Closing(msgspec.Struct, frozen=True):
    """Progress of taking the pages back."""

    is_quiet: bool = False
    """The source said so, or never had the grant."""
    must_prove_quiet: bool = False
    """The source cannot say so: the transport has to."""
    is_asked: bool = False
    closed: frozenset[int] = frozenset()
    interval_s: float = 0.0
    ask_at: float = 0.0


class TargetCoordinator(msgspec.Struct, frozen=True):
    """The record of one transfer at its target's coordinator."""

    request: Receive
    """What the first rank asked for; the others have to ask for the same."""
    instance: str
    ranks: frozenset[int]
    deadlines: Deadlines
    state: TargetCoordinatorState = TargetCoordinatorState.PREPARING
    grant: Grant | None = None
    terms: GrantTerms | None = None
    account: Account | None = None
    opened: frozenset[int] = frozenset()
    is_ahead: bool = False
    """Whether it was granted before its ranks had opened."""
    outcome: Outcome | None = None
    closing: Closing = Closing()

    @property
    def transfer(self) -> str:
        """Its id."""
        return self.request.transfer

    def settled(self, outcome: Outcome) -> Settled:
        """The message that tells the source how it ended."""
        assert self.grant is not None
        return Settled(transfer=self.transfer, grant=self.grant.grant, outcome=outcome)


# Events beside messages. `Receive`, `Opened`, `Unpacked` and `Closed` are those of this instance's ranks;
# `Offer`, `Landed`, `Commit`, `AuxRecord`, `Quiet`, `Unquiet` and `OutcomeQuery` are the source's.


@dataclass(frozen=True, slots=True)
class Prepared:
    """Pages, their fences, the session and its paths are all there."""

    grant: Grant
    terms: GrantTerms
    ledger: Ledger
    is_ahead: bool = False
    """Whether the source gets it before the ranks have opened: where opening does not stop a writer."""


@dataclass(frozen=True, slots=True)
class SourceAborted:
    """The source failed, refused or gave up."""

    cause: Cause


@dataclass(frozen=True, slots=True)
class CallerAborted:
    """The engine gave the transfer up."""

    cause: Cause


# Effects.


@dataclass(frozen=True, slots=True)
class OpenRanks:
    """Have every rank of the target let the lanes write."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class ToSource:
    """Send to the source, if there is a session. From a `Grant` on the source may write."""

    message: Message


@dataclass(frozen=True, slots=True)
class ToCallers:
    """Forward the aux record to the ranks that asked; the transfer may still fail."""

    aux: AuxRecord


@dataclass(frozen=True, slots=True)
class UnpackAt:
    """Have a rank unpack or check a chunk."""

    rank: int
    landed: Landed


@dataclass(frozen=True, slots=True)
class CloseRanks:
    """Have these ranks take the permissions back."""

    ranks: tuple[int, ...]
    must_prove_quiet: bool


@dataclass(frozen=True, slots=True)
class Release:
    """The pages are the engine's again."""


# What has come in: each function enters one message of the source into the account and returns the new
# account, or the same object if the message came before. What cannot be true raises RemoteProtocolError.


def enter_landed(account: Account, terms: GrantTerms, landed: Landed) -> tuple[Account, tuple[UnpackAt, ...]]:
    """The account with one more chunk, and what has to be unpacked or checked before it counts."""
    source, key = landed.source_rank, (landed.source_rank, landed.chunk)
    box = Rectangle(landed.layers, landed.tokens)
    if key in account.chunks:
        if account.chunks[key] != box:
            raise RemoteProtocolError(f"chunk {landed.chunk} of rank {source} came twice, and differs")
        return account, ()
    _check_part(terms, source)
    ledger, unpacking, unpacks = account.ledger, account.unpacking, []
    for target in terms.targets.get(source, ()):
        entered = ledger.entered((source, target), box)
        # The target rank itself finds out whether a chunk that matters to a pair holds something for it, and
        # so whether the source's claim about it can be true.
        if (source, target) in terms.unpacked and entered is not ledger:
            unpacking |= {(source, target, landed.chunk)}
            unpacks.append(UnpackAt(target, landed))
        else:
            ledger = entered
    after = replace(account, chunks={**account.chunks, key: box}, ledger=ledger, unpacking=unpacking)
    _check_gaps(after)
    return after, tuple(unpacks)


def enter_unpacked(account: Account, pair: Pair, chunk: int) -> Account:
    """The account with a chunk where it belongs."""
    key = (*pair, chunk)
    if key not in account.unpacking:
        return account
    ledger = account.ledger.entered(pair, account.chunks[pair[0], chunk])
    after = replace(account, ledger=ledger, unpacking=account.unpacking - {key})
    _check_gaps(after)
    return after


def enter_commit(account: Account, terms: GrantTerms, commit: Commit) -> Account:
    """The account with a source rank's manifest."""
    source = commit.source_rank
    if source in account.commits:
        if account.commits[source] != commit:
            raise RemoteProtocolError(f"rank {source} committed twice, and differs")
        return account
    _check_part(terms, source)
    claimed = _nonzero(commit.num_bytes)
    due = _nonzero({target: counts for (rank, target), counts in terms.expected.items() if rank == source})
    if claimed != due:
        raise RemoteProtocolError(f"rank {source} says it sent {claimed}, the plan expects {due}")
    after = replace(account, commits={**account.commits, source: commit})
    _check_gaps(after)
    return after


def is_complete(account: Account, terms: GrantTerms) -> bool:
    """Whether everything is there, each cell once, and where it belongs."""
    return (
        account.aux is not None
        and account.ledger.is_full
        and not account.unpacking
        and account.commits.keys() >= terms.sources
        and all(_num_chunks(account, rank) == commit.num_chunks for rank, commit in account.commits.items())
    )


def _check_part(terms: GrantTerms, source: int) -> None:
    if source not in terms.sources:
        raise RemoteProtocolError(f"rank {source} has no part in this transfer")


def _check_gaps(account: Account) -> None:
    for source, commit in account.commits.items():
        num_chunks = _num_chunks(account, source)
        if num_chunks > commit.num_chunks:
            raise RemoteProtocolError(
                f"rank {source} committed {commit.num_chunks} chunks, {num_chunks} came"
            )
        is_unpacking = any(rank == source for rank, _, _ in account.unpacking)
        if num_chunks == commit.num_chunks and not is_unpacking and (lacks := account.ledger.lacks(source)):
            raise RemoteProtocolError(f"rank {source} committed, but pairs {lacks} lack something")


def _num_chunks(account: Account, source: int) -> int:
    return sum(1 for rank, _ in account.chunks if rank == source)


def _nonzero(num_bytes: Mapping[int, Mapping[str, int]]) -> dict[int, dict[str, int]]:
    """Without zeros, so that an absent count and a zero are equal."""
    counts_by_target = {
        target: {name: count for name, count in counts.items() if count}
        for target, counts in num_bytes.items()
    }
    return {target: counts for target, counts in counts_by_target.items() if counts}


# The machine.

Step: TypeAlias = tuple[TargetCoordinator, Effects]


def _join(record: TargetCoordinator, receive: Receive, now: float) -> Step:
    rank = min(receive.tables)
    if strangers := receive.tables.keys() - record.ranks:
        text = (
            f"pages of ranks {sorted(strangers)}, but ranks {sorted(record.ranks)} receive this transfer; "
            "ask on the ranks of one dp group"
        )
        return _fail(record, _cause(record, Why.REFUSED_LAYOUT, Stage.GRANT, text, rank), now)
    if asked := _differences(receive, record.request):
        text = f"rank {rank} asks for {asked}; give every rank of the group the same request"
        return _fail(record, _cause(record, Why.REFUSED_PROMPT, Stage.GRANT, text, rank), now)
    return replace(record, deadlines=record.deadlines.named(receive.progress_s)), ()


def _differences(receive: Receive, first: Receive) -> str:
    """How a rank's request differs from the first one's; empty if it does not."""
    pairs = {
        "source": (receive.source, first.source),
        "tokens": (receive.num_tokens, first.num_tokens),
        "digest": (receive.digest.hex(), first.digest.hex()),
        "held": (receive.held, first.held),
    }
    return ", ".join(
        f"{name} {mine} (others: {other})" for name, (mine, other) in pairs.items() if mine != other
    )


def _prepare(record: TargetCoordinator, event: Prepared, now: float) -> Step:
    after = replace(
        record,
        state=S.GRANTED if event.is_ahead else S.OPENING,
        is_ahead=event.is_ahead,
        grant=event.grant,
        terms=event.terms,
        account=Account(event.ledger),
        deadlines=replace(record.deadlines, moved=now),
    )
    opened = OpenRanks(event.grant)
    return after, (ToSource(event.grant), opened) if event.is_ahead else (opened,)


def _opened(record: TargetCoordinator, opened: Opened, now: float) -> Step:
    if opened.cause is not None:
        return _fail(record, opened.cause, now)
    assert record.grant is not None
    grant = _with_lanes(record.grant, opened.lanes)
    after = replace(record, opened=record.opened | {opened.rank}, grant=grant)
    if not after.opened >= record.ranks:
        return after, ()
    granted = replace(after, state=S.GRANTED, deadlines=replace(record.deadlines, moved=now))
    return granted, (ToSource(grant),)


def _opened_late(record: TargetCoordinator, opened: Opened, now: float) -> Step:
    """The grant was sent ahead: what came in meanwhile may have waited for this rank alone."""
    if opened.cause is not None:
        return _fail(record, opened.cause, now)
    assert record.account is not None
    after = replace(record, opened=record.opened | {opened.rank})
    return _admit(after, record.account) if _can_admit(after, record.account) else (after, ())


def _with_lanes(grant: Grant, leased: tuple[Lane, ...]) -> Grant:
    """The grant with the staging that a rank leased for its lanes."""
    by_pair = {(lane.source_rank, lane.target_rank): lane for lane in leased}
    lanes = tuple(by_pair.get((lane.source_rank, lane.target_rank), lane) for lane in grant.lanes)
    return msgspec.structs.replace(grant, lanes=lanes)


def _offered(record: TargetCoordinator, offer: Offer, now: float) -> Step:
    request = record.request
    if (offer.num_tokens, offer.digest) == (request.num_tokens, request.digest):
        deadlines = record.deadlines.named(offer.progress_s)
        return replace(record, deadlines=_mentioned(deadlines, offer, now)), ()
    text = (
        f"granted for {request.num_tokens} tokens (digest {request.digest.hex()}), "
        f"offered {offer.num_tokens} ({offer.digest.hex()})"
    )
    return _fail(record, _cause(record, Why.REFUSED_PROMPT, Stage.OFFER, text), now)


def _mentioned(deadlines: Deadlines, offer: Offer, now: float) -> Deadlines:
    return deadlines.queued(now) if offer.is_queued else deadlines.met(now)


def _queued(record: TargetCoordinator, message: Queued, now: float) -> Step:
    return replace(record, deadlines=record.deadlines.queued(now)), ()


def _unpacked(record: TargetCoordinator, unpacked: Unpacked, now: float) -> Step:
    return _enter(record, unpacked, now) if unpacked.cause is None else _fail(record, unpacked.cause, now)


def _enter(record: TargetCoordinator, message: Landed | Unpacked | Commit, now: float) -> Step:
    account, terms = record.account, record.terms
    assert account is not None
    assert terms is not None
    unpacks: Effects = ()
    try:
        match message:
            case Landed():
                account, unpacks = enter_landed(account, terms, message)
            case Unpacked():
                account = enter_unpacked(account, (message.source_rank, message.rank), message.chunk)
            case Commit():
                account = enter_commit(account, terms, message)
    except RemoteProtocolError as error:
        return _fail(record, _cause(record, Why.CORRUPTED, Stage.COMMIT, str(error)), now)
    return _admit_if_complete(record, account, now, unpacks)


def _admit_if_complete(
    record: TargetCoordinator, account: Account, now: float, effects: Effects = ()
) -> Step:
    if account is record.account:
        return record, ()
    after = replace(record, account=account, deadlines=record.deadlines.met(now))
    return _admit(after, account) if _can_admit(after, account) else (after, effects)


def _can_admit(record: TargetCoordinator, account: Account) -> bool:
    # A rank that has not opened may yet find that its pages are not what the plan needs.
    assert record.terms is not None
    return is_complete(account, record.terms) and record.opened >= record.ranks


def _admit(record: TargetCoordinator, account: Account) -> Step:
    assert account.aux is not None
    outcome = Ready(account.aux)
    after = replace(record, state=S.READY, outcome=outcome, closing=Closing(is_quiet=True, is_asked=True))
    close = CloseRanks(tuple(sorted(record.ranks)), must_prove_quiet=False)
    return after, (Conclude(outcome), Release(), ToSource(record.settled(outcome)), close)


def _aux(record: TargetCoordinator, aux: AuxRecord, now: float) -> Step:
    assert record.account is not None
    if not aux.is_final:
        forwarded = () if record.account.aux else (ToCallers(aux),)
        return _admit_if_complete(record, replace(record.account, aux=aux.aux), now, forwarded)
    outcome = Finished(aux.aux)
    return _quarantine(record, outcome, now, (ToSource(record.settled(outcome)),))


def _drop(record: TargetCoordinator, event: SourceAborted | SessionLost, now: float) -> Step:
    return _dropped(record, event.cause, ())


def _drop_and_abort(record: TargetCoordinator, event: CallerAborted, now: float) -> Step:
    abort = ToSource(Abort(transfer=record.transfer, grant=b"", cause=event.cause))
    return _dropped(record, event.cause, (abort,))


def _dropped(record: TargetCoordinator, cause: Cause, effects: Effects) -> Step:
    """No rank was granted anything: the pages are free at once."""
    outcome = Failed(cause)
    return replace(record, state=S.RELEASED, outcome=outcome), (*effects, Conclude(outcome), Release())


def _caller_aborted(record: TargetCoordinator, event: CallerAborted, now: float) -> Step:
    return _fail(record, event.cause, now)


def _source_failed(record: TargetCoordinator, event: SourceAborted, now: float) -> Step:
    # A source whose ranks have all committed waits for the verdict; one that has stopped ignores it.
    outcome = Failed(event.cause)
    verdict = (ToSource(record.settled(outcome)),) if record.state is S.GRANTED else ()
    return _quarantine(record, outcome, now, verdict)


def _session_lost(record: TargetCoordinator, event: SessionLost, now: float) -> Step:
    after = replace(record, closing=replace(record.closing, must_prove_quiet=True))
    return _quarantine(after, Failed(event.cause), now, ())


def _fail(record: TargetCoordinator, cause: Cause, now: float) -> Step:
    """A failure known here first: the source has to be told."""
    is_granted = record.grant is not None and record.state is S.GRANTED
    grant = record.grant.grant if record.grant is not None and is_granted else b""
    abort = ToSource(Abort(transfer=record.transfer, grant=grant, cause=cause))
    if record.state is S.PREPARING:
        return _dropped(record, cause, (abort,))
    return _quarantine(record, Failed(cause), now, (abort,))


def _quarantine(record: TargetCoordinator, outcome: Outcome, now: float, effects: Effects) -> Step:
    # Before the grant went out there is no writer: ranks only have to undo what they opened.
    is_quiet = record.closing.is_quiet or record.state is S.OPENING
    interval = record.deadlines.timings.ask_again_s
    closing = replace(record.closing, is_quiet=is_quiet, interval_s=interval, ask_at=now + interval)
    after = replace(record, state=S.QUARANTINED, outcome=outcome, closing=closing)
    return _close_if_possible(after, (*effects, Conclude(outcome)))


def _close_if_possible(record: TargetCoordinator, effects: Effects) -> Step:
    closing = record.closing
    if closing.is_asked or not (closing.is_quiet or closing.must_prove_quiet):
        return record, effects
    after = replace(record, closing=replace(closing, is_asked=True))
    open_ranks = tuple(sorted(record.ranks - closing.closed))
    return after, (*effects, CloseRanks(open_ranks, must_prove_quiet=not closing.is_quiet))


def _note_quiet(record: TargetCoordinator, message: Quiet, now: float) -> Step:
    # It may have overtaken the message that says why; until that comes, or a deadline, nothing is decided.
    return replace(record, closing=replace(record.closing, is_quiet=True)), ()


def _quiet(record: TargetCoordinator, message: Quiet, now: float) -> Step:
    if record.closing.is_quiet:
        return record, ()
    closing = replace(record.closing, is_quiet=True, is_asked=False)
    return _close_if_possible(replace(record, closing=closing), ())


def _note_unquiet(record: TargetCoordinator, message: Unquiet, now: float) -> Step:
    return replace(record, closing=replace(record.closing, must_prove_quiet=True)), ()


def _unquiet(record: TargetCoordinator, event: Unquiet | SessionLost, now: float) -> Step:
    if record.closing.is_quiet or record.closing.must_prove_quiet:
        return record, ()
    closing = replace(record.closing, must_prove_quiet=True)
    return _close_if_possible(replace(record, closing=closing), ())


def _closed(record: TargetCoordinator, message: Closed, now: float) -> Step:
    if not message.is_quiet:
        return record, ()
    closed = record.closing.closed | {message.rank}
    after = replace(record, closing=replace(record.closing, closed=closed))
    if not closed >= record.ranks:
        return after, ()
    return replace(after, state=S.RELEASED), (Release(),)


def _closed_ready(record: TargetCoordinator, message: Closed, now: float) -> Step:
    closed = record.closing.closed | {message.rank}
    state = S.RELEASED if closed >= record.ranks else S.READY
    return replace(record, state=state, closing=replace(record.closing, closed=closed)), ()


def _repeat(record: TargetCoordinator, query: OutcomeQuery, now: float) -> Step:
    assert record.outcome is not None
    return record, () if record.grant is None else (ToSource(record.settled(record.outcome)),)


def _tick(record: TargetCoordinator, event: Ticked, now: float) -> Step:
    if passed := record.deadlines.passed(now):
        stage = Stage.COPY if record.state is S.GRANTED else Stage.GRANT
        return _fail(record, _cause(record, Why.DEADLINE, stage, passed), now)
    return record, ()


def _ask_again(record: TargetCoordinator, event: Ticked, now: float) -> Step:
    closing = record.closing
    if now < closing.ask_at or record.grant is None:
        return record, ()
    interval = min(closing.interval_s * 2, record.deadlines.timings.ask_again_s_max)
    after = replace(record, closing=replace(closing, interval_s=interval, ask_at=now + interval))
    effects: list[object] = []
    if not closing.is_quiet:
        effects.append(ToSource(QuietQuery(grant=record.grant.grant)))
    if closing.is_asked:
        open_ranks = tuple(sorted(record.ranks - closing.closed))
        effects.append(CloseRanks(open_ranks, must_prove_quiet=not closing.is_quiet))
    return after, tuple(effects)


def _cause(record: TargetCoordinator, why: Why, stage: Stage, text: str, rank: int = -1) -> Cause:
    return Cause(why=why, stage=stage, instance=record.instance, rank=rank, text=text)


S = TargetCoordinatorState
_JUDGED = (S.GRANTED, S.READY, S.QUARANTINED)
_CELLS: dict[tuple[Enum, type], Entry] = {
    (S.PREPARING, Receive): cell(_join, S.PREPARING, S.RELEASED),
    (S.PREPARING, Prepared): cell(_prepare, S.OPENING, S.GRANTED),
    (S.PREPARING, Offer): cell(_offered, S.PREPARING, S.RELEASED),
    (S.PREPARING, Queued): cell(_queued, S.PREPARING),
    (S.PREPARING, SourceAborted): cell(_drop, S.RELEASED),
    (S.PREPARING, CallerAborted): cell(_drop_and_abort, S.RELEASED),
    (S.PREPARING, SessionLost): cell(_drop, S.RELEASED),
    (S.PREPARING, Ticked): cell(_tick, S.PREPARING, S.RELEASED),
    (S.OPENING, Opened): cell(_opened, S.OPENING, S.GRANTED, S.QUARANTINED),
    (S.OPENING, Offer): cell(_offered, S.OPENING, S.QUARANTINED),
    (S.OPENING, Queued): cell(_queued, S.OPENING),
    (S.OPENING, SourceAborted): cell(_source_failed, S.QUARANTINED),
    (S.OPENING, CallerAborted): cell(_caller_aborted, S.QUARANTINED),
    (S.OPENING, SessionLost): cell(_session_lost, S.QUARANTINED),
    (S.OPENING, Ticked): cell(_tick, S.OPENING, S.QUARANTINED),
    (S.GRANTED, Opened): cell(_opened_late, *_JUDGED),
    (S.GRANTED, Offer): cell(_offered, S.GRANTED, S.QUARANTINED),
    (S.GRANTED, Queued): cell(_queued, S.GRANTED),
    (S.GRANTED, Landed): cell(_enter, *_JUDGED),
    (S.GRANTED, Unpacked): cell(_unpacked, *_JUDGED),
    (S.GRANTED, Commit): cell(_enter, *_JUDGED),
    (S.GRANTED, AuxRecord): cell(_aux, *_JUDGED),
    (S.GRANTED, SourceAborted): cell(_source_failed, S.QUARANTINED),
    (S.GRANTED, CallerAborted): cell(_caller_aborted, S.QUARANTINED),
    (S.GRANTED, SessionLost): cell(_session_lost, S.QUARANTINED),
    (S.GRANTED, Quiet): cell(_note_quiet, S.GRANTED),
    (S.GRANTED, Unquiet): cell(_note_unquiet, S.GRANTED),
    (S.GRANTED, OutcomeQuery): IGNORED,
    (S.GRANTED, Ticked): cell(_tick, S.GRANTED, S.QUARANTINED),
    (S.READY, Closed): cell(_closed_ready, S.READY, S.RELEASED),
    (S.READY, OutcomeQuery): cell(_repeat, S.READY),
    (S.QUARANTINED, Closed): cell(_closed, S.QUARANTINED, S.RELEASED),
    (S.QUARANTINED, Quiet): cell(_quiet, S.QUARANTINED),
    (S.QUARANTINED, Unquiet): cell(_unquiet, S.QUARANTINED),
    (S.QUARANTINED, SessionLost): cell(_unquiet, S.QUARANTINED),
    (S.QUARANTINED, OutcomeQuery): cell(_repeat, S.QUARANTINED),
    (S.QUARANTINED, Ticked): cell(_ask_again, S.QUARANTINED),
    (S.RELEASED, OutcomeQuery): cell(_repeat, S.RELEASED),
}
# Once there is a verdict, messages that were on their way change nothing; before there is one, they do.
_LATE = (Opened, Offer, Queued, Landed, Unpacked, Commit, AuxRecord, SourceAborted, CallerAborted)
_CELLS |= {(state, event): IGNORED for state in (S.READY, S.QUARANTINED, S.RELEASED) for event in _LATE}
_CELLS |= {(S.READY, event): IGNORED for event in (Quiet, Unquiet, SessionLost, Ticked)}
_CELLS |= {(S.RELEASED, event): IGNORED for event in (Prepared, Closed, Quiet, Unquiet, SessionLost, Ticked)}

TARGET_COORDINATOR: Table[TargetCoordinator] = Table(
    name="target coordinator",
    states=TargetCoordinatorState,
    remote=frozenset({Offer, Queued, Landed, Commit, AuxRecord, SourceAborted, Quiet, Unquiet, OutcomeQuery}),
    cells=_CELLS,
)
