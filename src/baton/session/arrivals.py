"""The target side of a coordinator: every transfer that its ranks receive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from baton.errors import BatonError
from baton.protocol.arrival import (
    Arrival,
    AuxArrived,
    CallerAborted,
    ChunkLanded,
    ChunkUnpacked,
    CloseRanks,
    Conclude,
    Offered,
    OpenRanks,
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
    UnpackAt,
    VerdictAsked,
)
from baton.protocol.deadlines import Deadlines
from baton.protocol.messages import (
    Abort,
    AnyMessage,
    AuxRecord,
    Close,
    Closed,
    Commit,
    Decline,
    Invited,
    Landed,
    Offer,
    Open,
    Opened,
    Paths,
    Quiet,
    Receive,
    Released,
    Settled,
    SettledAsked,
    Unpack,
    Unpacked,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.receiver import RECEIVER
from baton.session.granting import Coming, Granting, for_target, is_same
from baton.session.sessions import Session
from baton.session.stepping import Stepping

if TYPE_CHECKING:
    from baton.session.coordinator import CoordinatorDriver


class Arrivals:
    """Transfers by id and by grant."""

    def __init__(self, owner: CoordinatorDriver) -> None:
        self.owner = owner
        self.coming: dict[str, Coming] = {}
        self.grants: dict[bytes, Coming] = {}
        self.declined: dict[str, list[Decline]] = {}
        """By source, until there is a session to say it by."""
        self.given_up: dict[str, tuple[Cause, float]] = {}
        """Transfers that an engine aborted on a rank before any rank had asked, until they are forgotten."""
        self.unclosed: list[Coming] = []
        """Ready, and nothing of the transport's to take back: they are closed with the next tick."""
        self.granting = Granting(owner)
        self.stepping = Stepping(self._step, self._giving_up)
        owner.sessions.on_failed = self._unreachable

    # Words of this instance's ranks.

    def heard(self, rank: int, message: AnyMessage) -> None:
        """A target rank, or the engine beside it, said something."""
        match message:
            case Receive():
                self._asked(rank, message)
            case Decline():
                self._decline(message)
            case Abort():
                self._given_up(message)
            case Invited():
                self._invited(message)
            case Opened(cause=None):
                self._feed_grant(message.grant, RankOpened(message.rank, message.lanes))
            case Opened(cause=Cause() as cause):
                if coming := self.grants.get(message.grant):
                    self.granting.mistrust_paths(coming, -1)
                self._feed_grant(message.grant, RankFailed(message.rank, cause))
            case Unpacked(cause=None):
                self._feed_grant(
                    message.grant, ChunkUnpacked(message.rank, message.source_rank, message.chunk)
                )
            case Unpacked(cause=Cause() as cause):
                self._feed_grant(message.grant, RankFailed(message.rank, cause))
            case Closed():
                self._note_unchecked(message)
                self._feed_grant(message.grant, RankClosed(message.rank, message.is_still))

    def _note_unchecked(self, message: Closed) -> None:
        coming = self.grants.get(message.grant) if message.unchecked else None
        session = self.owner.sessions.standing.get(coming.session) if coming else None
        if session is not None:
            session.unchecked |= {(message.rank, path) for path in message.unchecked}

    def _given_up(self, message: Abort) -> None:
        """The engine aborted; its rank does not know how far the transfer had come."""
        coming, cause = self.coming.get(message.transfer), message.cause
        if coming is None:
            # The other ranks have not asked yet: when they do, they are told.
            expires = self.owner.ports.now() + self.owner.config.timings.linger_s
            self.given_up[message.transfer] = (cause, expires)
        if coming is not None and coming.record.state is ReceiverState.GRANTED:
            cause = msgspec.structs.replace(cause, stage=Stage.COPY)
        self._feed_by(message.transfer, CallerAborted(cause))

    def _asked(self, rank: int, message: Receive) -> None:
        coming = self.coming.get(message.transfer)
        if coming is not None and self._is_too_late(coming, rank, message):
            assert isinstance(coming.record.outcome, Failed)
            coming.callers.add(rank)
            self._turn_down(rank, message, coming.record.outcome.cause)
            return
        if coming is None and message.transfer in self.given_up:
            self._turn_down(rank, message, self.given_up[message.transfer][0])
            return
        if coming is None or not coming.is_live:
            if text := self.owner.refusal:
                self._turn_down(rank, message, self.owner.cause(Why.OUT_OF_PAGES, Stage.GRANT, text))
                return
            coming = self._begin(rank, message)
        elif self._contradicts(coming, message):
            text = f"transfer {message.transfer} is live here; take a new id for each attempt"
            self._turn_down(rank, message, self.owner.cause(Why.REFUSED_LIVE_ID, Stage.GRANT, text))
            return
        coming.tables |= message.tables
        coming.callers.add(rank)
        self._confined(coming)

    def _begin(self, rank: int, message: Receive) -> Coming:
        layout = self.owner.config.spec.layout
        dp = layout.coordinates(min(message.tables, default=rank))["dp"]
        now = self.owner.ports.now()
        record = Arrival(
            transfer=message.transfer,
            instance=self.owner.config.instance,
            ranks=frozenset(layout.group(dp)),
            num_tokens=message.num_tokens,
            digest=message.digest,
            deadlines=Deadlines(self.owner.config.timings, began=now, moved=now),
        )
        coming = Coming(record, message, dp, source_dp=message.source_dp)
        self.coming[message.transfer] = coming
        return coming

    @staticmethod
    def _is_too_late(coming: Coming, rank: int, message: Receive) -> bool:
        """Whether a rank asks for what failed while it had not asked yet."""
        has_failed = not coming.is_live and isinstance(coming.record.outcome, Failed)
        return has_failed and rank not in coming.callers and is_same(coming.request, message)

    @staticmethod
    def _contradicts(coming: Coming, message: Receive) -> bool:
        return bool(
            coming.tables.keys() & message.tables.keys()
            or not is_same(coming.request, message)
            or coming.record.state is not ReceiverState.PREPARING
        )

    def _turn_down(self, rank: int, message: Receive, cause: Cause) -> None:
        settled = Settled(transfer=message.transfer, grant=b"", outcome=Failed(cause))
        self.owner.to_rank(rank, settled)
        self.owner.to_rank(rank, Released(transfer=message.transfer))
        if cause.why is not Why.REFUSED_LIVE_ID:
            self._decline(Decline(transfer=message.transfer, source=message.source, cause=cause))

    def _decline(self, message: Decline) -> None:
        session = self.owner.sessions.to(message.source)
        if session is None:
            self.declined.setdefault(message.source, []).append(message)
            return
        abort = Abort(transfer=message.transfer, grant=b"", cause=message.cause)
        self.owner.sessions.send(session.number, abort)

    def _invited(self, message: Invited) -> None:
        session = self.owner.sessions.standing.get(message.session)
        if session is None:
            return
        for path in message.paths:
            pair = (path.source_rank, path.target_rank)
            session.paths[pair] = path
            session.asked.discard(pair)
        self.owner.sessions.send(session.number, Paths(paths=message.paths))
        self._advance_all(session)

    # From a request to a grant.

    def session_up(self, session: Session) -> None:
        """A source is there: what waited for it goes on."""
        for name, dialling in self.owner.sessions.diallings.items():
            if dialling.number != session.number:
                continue
            for declined in self.declined.pop(name, []):
                self._decline(declined)
            for coming in list(self.coming.values()):
                if coming.request.source == name:
                    self._confined(coming)

    def _advance_all(self, session: Session) -> None:
        for coming in list(self.coming.values()):
            if coming.session == session.number:
                self._confined(coming)

    def _confined(self, coming: Coming) -> None:
        try:
            prepared = self.granting.advance(coming)
            if prepared is not None:
                self.grants[prepared.grant.grant] = coming
                self.stepping.feed(coming, prepared)
        except BatonError as error:
            self.stepping.feed(
                coming, CallerAborted(self.owner.cause(Why.REFUSED_LAYOUT, Stage.GRANT, str(error)))
            )

    # Words of sources.

    def received(self, session: Session, message: AnyMessage) -> None:
        """A source said something."""
        match message:
            case Offer():
                self._offered(session, message)
            case Landed():
                self._feed_grant(message.grant, ChunkLanded(message), session)
            case Commit():
                self._feed_grant(message.grant, SourceCommitted(message), session)
            case AuxRecord():
                self._feed_grant(message.grant, AuxArrived(message.aux, message.is_final), session)
            case Quiet():
                self._feed_grant(message.grant, SourceQuiet(), session)
            case Unquiet():
                self._feed_grant(message.grant, SourceUnquiet(message.text), session)
            case SettledAsked():
                for grant in message.grants:
                    self._feed_grant(grant, VerdictAsked(), session)
            case Abort():
                self._aborted(session, message)

    def _offered(self, session: Session, message: Offer) -> None:
        coming = self.coming.get(message.transfer)
        if coming is None or coming.session != session.number:
            return
        if coming.source_dp < 0:
            coming.source_dp = message.source_dp
        self.stepping.feed(coming, Offered(message.num_tokens, message.digest))
        self._confined(coming)

    def _aborted(self, session: Session, message: Abort) -> None:
        coming = self.grants.get(message.grant) if message.grant else self.coming.get(message.transfer)
        if coming is None or coming.session != session.number:
            return
        if not message.grant and coming.record.state not in (ReceiverState.PREPARING, ReceiverState.OPENING):
            return
        if message.cause.why is Why.COPY_FAILED and message.grant:
            self.granting.mistrust_paths(coming, message.cause.rank)
        self.stepping.feed(coming, SourceAborted(message.cause))

    # Machine and effects.

    def lost(self, session: Session, cause: Cause) -> None:
        """A session is gone."""
        for coming in list(self.coming.values()):
            if coming.session == session.number:
                self.stepping.feed(coming, SessionLost(cause))

    def _unreachable(self, name: str, cause: Cause) -> None:
        self.declined.pop(name, None)
        for coming in list(self.coming.values()):
            is_waiting = coming.record.state is ReceiverState.PREPARING
            if is_waiting and coming.request.source == name:
                self.stepping.feed(coming, SessionLost(cause))

    def tick(self) -> None:
        """Looks at deadlines, puts questions again, and forgets what was released long ago."""
        now = self.owner.ports.now()
        for coming in self.unclosed:
            self._close(coming, sorted(coming.record.ranks), must_still=False)
        self.unclosed.clear()
        self.given_up = {name: found for name, found in self.given_up.items() if found[1] > now}
        for coming in list(self.coming.values()):
            if coming.is_live:
                self.stepping.feed(coming, Ticked())
            if coming.forget_at is not None and coming.forget_at <= now:
                self._forget(coming)

    def _forget(self, coming: Coming) -> None:
        if self.coming.get(coming.record.transfer) is coming:
            del self.coming[coming.record.transfer]
        if coming.record.grant is not None:
            self.grants.pop(coming.record.grant.grant, None)

    def _feed_by(self, transfer: str, event: object) -> None:
        if coming := self.coming.get(transfer):
            self.stepping.feed(coming, event)

    def _feed_grant(self, grant: bytes, event: object, session: Session | None = None) -> None:
        """A word under a grant; from a session other than the grant's it is nobody's."""
        coming = self.grants.get(grant)
        if coming is None or (session is not None and not self._may_speak(coming, session)):
            return
        self.stepping.feed(coming, event)

    @staticmethod
    def _may_speak(coming: Coming, session: Session) -> bool:
        """The grant's session; after its loss also a later one of the same incarnation, to say quiet."""
        is_quarantined = coming.record.state is ReceiverState.QUARANTINED
        return coming.session == session.number or (is_quarantined and coming.epoch == session.epoch)

    def _giving_up(self, text: str) -> CallerAborted:
        return CallerAborted(self.owner.cause(Why.ABORTED, Stage.COPY, text))

    def _step(self, coming: Coming, event: object) -> None:
        coming.record, effects = RECEIVER.step(coming.record, event, self.owner.ports.now())
        for effect in effects:
            self._perform(coming, effect)

    def _perform(self, coming: Coming, effect: object) -> None:
        to_rank, transfer = self.owner.to_rank, coming.record.transfer
        match effect:
            case OpenRanks(grant):
                for rank in sorted(coming.record.ranks):
                    to_rank(rank, Open(grant=for_target(grant, rank)))
            case SendGrant(grant):
                self.owner.sessions.send(coming.session, msgspec.structs.replace(grant, session=-1))
            case ToSource(message):
                self._to_source(coming, message)
            case TellAux(aux):
                assert coming.record.grant is not None
                record = AuxRecord(transfer=transfer, grant=coming.record.grant.grant, aux=aux)
                for rank in sorted(coming.callers):
                    to_rank(rank, record)
            case UnpackAt(rank, landed):
                to_rank(rank, Unpack(grant=landed.grant, landed=landed))
            case CloseRanks() if coming.record.is_ahead and coming.record.state is ReceiverState.READY:
                self.unclosed.append(coming)
            case CloseRanks(ranks, must_still):
                self._close(coming, ranks, must_still)
            case Conclude(outcome):
                coming.concluded = self.owner.ports.now()
                grant_id = coming.record.grant.grant if coming.record.grant else b""
                for rank in coming.concerned:
                    to_rank(rank, Settled(transfer=transfer, grant=grant_id, outcome=outcome))
            case Release():
                coming.forget_at = self.owner.ports.now() + self.owner.config.timings.linger_s
                for rank in coming.concerned:
                    to_rank(rank, Released(transfer=transfer))
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _close(self, coming: Coming, ranks: Iterable[int], must_still: bool) -> None:
        assert coming.record.grant is not None
        if must_still:
            # To be sure, ranks turn the writers out: the next transfer needs new paths.
            self.granting.mistrust_paths(coming, -1)
        for rank in ranks:
            self.owner.to_rank(rank, Close(grant=coming.record.grant.grant, must_still=must_still))

    def _to_source(self, coming: Coming, message: AnyMessage) -> None:
        """By the transfer's session, or by a newer one with the same incarnation if that is gone."""
        sessions = self.owner.sessions
        if coming.session in sessions.standing:
            sessions.send(coming.session, message)
        elif coming.epoch >= 0:
            session = sessions.to(coming.request.source)
            if session is not None and session.epoch == coming.epoch:
                sessions.send(session.number, message)
        elif isinstance(message, Abort):
            # There was no session yet: the source is told as soon as there is one.
            request = coming.request
            self._decline(Decline(transfer=request.transfer, source=request.source, cause=message.cause))
