"""The source side of a coordinator: every transfer that its ranks send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from baton.errors import ConfigError
from baton.protocol.deadlines import Deadlines
from baton.protocol.departure import (
    AuxGiven,
    Bury,
    Departure,
    Forget,
    GrantArrived,
    Inquired,
    OfferState,
    Prefill,
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
from baton.protocol.messages import (
    Abort,
    AnyMessage,
    AuxRecord,
    Commit,
    Grant,
    Inquiry,
    Landed,
    Offer,
    Path,
    Paths,
    Quiet,
    QuietAsked,
    SessionPaths,
    Settled,
    Unquiet,
)
from baton.protocol.offer import OFFER
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Stage, Why
from baton.session.sessions import Session
from baton.session.stepping import Stepping

if TYPE_CHECKING:
    from baton.session.coordinator import CoordinatorDriver


@dataclass(slots=True)
class Leaving:
    """One transfer: its machine's record and the session that granted it."""

    record: Departure
    session: int = -1


@dataclass(frozen=True, slots=True)
class Grave:
    """A grant that is over: what its target is told if it asks."""

    transfer: str
    doubt: str
    expires: float


@dataclass(frozen=True, slots=True)
class Group:
    """Which dp group has a transfer, and until when that counts if the transfer never comes."""

    dp: int
    expires: float


@dataclass(frozen=True, slots=True)
class Remembered:
    """How a transfer ended, for ranks that come late."""

    outcome: Outcome
    joined: frozenset[int]
    expires: float


class Departures:
    """Transfers by id, graves by grant, and how loaded each dp group is."""

    def __init__(self, owner: CoordinatorDriver) -> None:
        self.owner = owner
        self.leaving: dict[str, Leaving] = {}
        self.graves: dict[bytes, Grave] = {}
        self.recent: dict[str, Remembered] = {}
        self.groups: dict[str, Group] = {}
        """The dp group of every live transfer, and of those that were assigned and may still come."""
        self.stepping = Stepping(self._step, self._giving_up)

    # The dp group of a transfer.

    def assign(self, transfer: str, named: int | None = None) -> int:
        """The group that prefills a transfer: the one named, else the least loaded; asked again, the same."""
        num_groups = self.owner.config.spec.layout.size("dp")
        if named is not None and not 0 <= named < num_groups:
            raise ConfigError(
                f"there is no dp group {named}: {self.owner.config.spec.layout} has {num_groups}"
            )
        known = self.groups.get(transfer)
        if known is not None and named not in (None, known.dp):
            raise ConfigError(f"transfer {transfer} was given to dp group {known.dp}, not {named}")
        if known is None:
            loads = [0] * num_groups
            for group in self.groups.values():
                loads[group.dp] += 1
            expires = self.owner.ports.now() + self.owner.config.timings.offer_s
            known = Group(loads.index(min(loads)) if named is None else named, expires)
            self.groups[transfer] = known
        return known.dp

    # Words of this instance's ranks.

    def heard(self, rank: int, message: AnyMessage) -> None:
        """A source rank said something about a transfer."""
        match message:
            case Offer():
                self._offered(rank, message)
            case Landed():
                self._feed_by(message.transfer, RankLanded(message))
            case Commit():
                self._feed_by(message.transfer, RankCommitted(message))
            case AuxRecord():
                self._feed_by(message.transfer, AuxGiven(message))
            case Abort():
                self._feed_by(message.transfer, RankFailed(rank, message.cause))
            case Quiet():
                self._feed_by(message.transfer, RankQuiet(rank))
            case Unquiet():
                self._feed_by(message.transfer, RankQuiet(rank, message.text))

    def _offered(self, rank: int, message: Offer) -> None:
        known = self.recent.get(message.transfer)
        if known is not None and message.transfer not in self.leaving:
            outcome = known.outcome
            if not isinstance(outcome, Finished) or rank in known.joined:
                outcome = Failed(self._ended(message.transfer, known))
            self.owner.to_rank(rank, Settled(transfer=message.transfer, grant=b"", outcome=outcome))
            return
        if self.owner.refusal and message.transfer not in self.leaving:
            cause = self.owner.cause(Why.ABORTED, Stage.OFFER, self.owner.refusal)
            self.owner.to_rank(rank, Settled(transfer=message.transfer, grant=b"", outcome=Failed(cause)))
            return
        prefill = Prefill(message.num_tokens, message.digest, message.source_dp)
        self.groups[message.transfer] = Group(message.source_dp, self.owner.ports.now())
        ranks = frozenset(self.owner.config.spec.layout.group(message.source_dp))
        self.stepping.feed(self._leaving(message.transfer), RankOffered(rank, prefill, ranks))

    def _ended(self, transfer: str, known: Remembered) -> Cause:
        """Why a transfer that ended a moment ago is not begun again."""
        if isinstance(known.outcome, Failed):
            return known.outcome.cause
        text = f"transfer {transfer} ended here a moment ago; take a new id for each attempt"
        return self.owner.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text)

    def _leaving(self, transfer: str) -> Leaving:
        if transfer not in self.leaving:
            now = self.owner.ports.now()
            deadlines = Deadlines(self.owner.config.timings, began=now, moved=now)
            record = Departure(transfer, self.owner.config.instance, deadlines)
            self.leaving[transfer] = Leaving(record)
        return self.leaving[transfer]

    # Words of targets.

    def received(self, session: Session, message: AnyMessage) -> None:
        """A target said something."""
        match message:
            case Inquiry():
                self._inquired(session, message.transfer)
            case Paths():
                self._pass_paths(session, message)
            case Grant():
                self._granted(session, message)
            case QuietAsked():
                for grant in message.grants:
                    self._answer_quiet(session, grant)
            case Settled():
                self._feed_granted(message.transfer, message.grant, TargetSettled(message.outcome))
            case Abort():
                self._aborted(session, message)

    def _inquired(self, session: Session, transfer: str) -> None:
        if transfer not in self.leaving and (cause := self._over(transfer, Stage.OFFER)) is not None:
            self.owner.sessions.send(session.number, Abort(transfer=transfer, grant=b"", cause=cause))
            return
        self.stepping.feed(self._leaving(transfer), Inquired(session.number))

    def _pass_paths(self, session: Session, message: Paths) -> None:
        by_rank: dict[int, list[Path]] = {}
        for path in message.paths:
            by_rank.setdefault(path.source_rank, []).append(path)
        for rank, paths in by_rank.items():
            self.owner.to_rank(rank, SessionPaths(session=session.number, paths=tuple(paths)))

    def _granted(self, session: Session, grant: Grant) -> None:
        fault = self._fault(session, grant)
        if fault is not None:
            self._refuse(session, grant, fault)
            return
        ranks = frozenset(self.owner.config.spec.layout.group(grant.source_dp))
        leaving = self._leaving(grant.transfer)
        if leaving.session not in (-1, session.number):
            effects = refusals(leaving.record, grant)
            for effect in effects:
                self._perform(Leaving(leaving.record, session.number), effect)
            return
        leaving.session = session.number
        self.stepping.feed(
            leaving, GrantArrived(msgspec.structs.replace(grant, session=session.number), ranks)
        )

    def _fault(self, session: Session, grant: Grant) -> Cause | None:
        cause = self.owner.cause
        if grant.channel != session.channel:
            return cause(Why.PEER_LOST, Stage.GRANT, "the grant is of a channel that is gone")
        if grant.grant in self.graves:
            return cause(Why.ABORTED, Stage.GRANT, "the grant is over")
        num_groups = self.owner.config.spec.layout.size("dp")
        if not 0 <= grant.source_dp < num_groups:
            return cause(Why.REFUSED_LAYOUT, Stage.GRANT, f"there is no dp group {grant.source_dp}")
        return None if grant.transfer in self.leaving else self._over(grant.transfer, Stage.GRANT)

    def _over(self, transfer: str, stage: Stage) -> Cause | None:
        """Why a target need not wait for a transfer that is not under way here."""
        if (known := self.recent.get(transfer)) is not None:
            return self._ended(transfer, known)
        # The ranks are turned away too: nobody would ever follow a grant.
        return self.owner.cause(Why.ABORTED, stage, self.owner.refusal) if self.owner.refusal else None

    def _refuse(self, session: Session, grant: Grant, cause: Cause) -> None:
        """No rank ever sees it, so it is quiet."""
        self._bury(
            grant.transfer, grant.grant, self.graves[grant.grant].doubt if grant.grant in self.graves else ""
        )
        sessions = self.owner.sessions
        sessions.send(session.number, Abort(transfer=grant.transfer, grant=grant.grant, cause=cause))
        self._answer_quiet(session, grant.grant)

    def _answer_quiet(self, session: Session, grant: bytes) -> None:
        if any(
            one.record.grant is not None and one.record.grant.grant == grant for one in self.leaving.values()
        ):
            return
        grave = self.graves.get(grant)
        if grave is None:
            # Never heard of: from now on it never will be.
            self._bury("", grant, "")
        transfer, doubt = (grave.transfer, grave.doubt) if grave else ("", "")
        if doubt:
            self.owner.sessions.send(session.number, Unquiet(transfer=transfer, grant=grant, text=doubt))
        else:
            self.owner.sessions.send(session.number, Quiet(transfer=transfer, grant=grant))

    def _aborted(self, session: Session, message: Abort) -> None:
        leaving = self.leaving.get(message.transfer)
        if leaving is not None and leaving.record.grant is not None:
            self._feed_granted(message.transfer, message.grant, TargetAborted(message.cause))
            return
        if message.grant:
            # Overtaken: its grant is still on the way, or nobody here will ever hear of it.
            self._bury(message.transfer, message.grant, "")
            self._answer_quiet(session, message.grant)
        if leaving is not None or message.transfer not in self.recent:
            self.stepping.feed(self._leaving(message.transfer), TargetAborted(message.cause))

    # Machine and effects.

    def lost(self, session: Session, cause: Cause) -> None:
        """A session is gone."""
        for leaving in list(self.leaving.values()):
            if leaving.session == session.number:
                self.stepping.feed(leaving, SessionLost(cause))

    def tick(self) -> None:
        """Looks at deadlines, and forgets what nobody will ask for any more."""
        now = self.owner.ports.now()
        for leaving in list(self.leaving.values()):
            self.stepping.feed(leaving, Ticked())
        self.recent = {name: known for name, known in self.recent.items() if known.expires > now}
        groups = self.groups.items()
        self.groups = {name: one for name, one in groups if name in self.leaving or one.expires > now}
        # A grave with a doubt is kept: unknown means quiet.
        self.graves = {grant: one for grant, one in self.graves.items() if one.doubt or one.expires > now}

    def num_active(self) -> int:
        """Transfers without an outcome, or with ranks that are not quiet; others only wait to be asked."""
        return sum(1 for one in self.leaving.values() if one.record.state is not OfferState.DECIDED)

    def _feed_by(self, transfer: str, event: object) -> None:
        if leaving := self.leaving.get(transfer):
            self.stepping.feed(leaving, event)

    def _feed_granted(self, transfer: str, grant: bytes, event: object) -> None:
        leaving = self.leaving.get(transfer)
        if leaving is None or leaving.record.grant is None or leaving.record.grant.grant != grant:
            return
        self.stepping.feed(leaving, event)

    def _giving_up(self, text: str) -> RankFailed:
        return RankFailed(-1, self.owner.cause(Why.ABORTED, Stage.COPY, text))

    def _step(self, leaving: Leaving, event: object) -> None:
        if self.leaving.get(leaving.record.transfer) is not leaving:
            return
        leaving.record, effects = OFFER.step(leaving.record, event, self.owner.ports.now())
        for effect in effects:
            self._perform(leaving, effect)

    def _perform(self, leaving: Leaving, effect: object) -> None:
        match effect:
            case ToRank(rank, Grant() as grant):
                self.owner.to_rank(rank, narrowed(grant, rank))
            case ToRank(rank, message):
                self.owner.to_rank(rank, message)
            case ToTarget(message):
                self.owner.sessions.send(leaving.session, message)
            case ToSession(session, message):
                self.owner.sessions.send(session, message)
            case Bury(grant, doubt):
                self._bury(leaving.record.transfer, grant, doubt)
            case Forget():
                self._forget(leaving)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _bury(self, transfer: str, grant: bytes, doubt: str) -> None:
        if (known := self.graves.get(grant)) is not None:
            # A doubt is not lifted by hearing of the grant again.
            transfer, doubt = known.transfer or transfer, known.doubt or doubt
        expires = self.owner.ports.now() + self.owner.config.timings.total_s
        self.graves[grant] = Grave(transfer, doubt, expires)

    def _forget(self, leaving: Leaving) -> None:
        transfer, outcome = leaving.record.transfer, leaving.record.outcome
        del self.leaving[transfer]
        self.groups.pop(transfer, None)
        if outcome is not None:
            expires = self.owner.ports.now() + self.owner.config.timings.linger_s
            self.recent[transfer] = Remembered(outcome, leaving.record.joined, expires)


def narrowed(grant: Grant, rank: int) -> Grant:
    """A grant as one source rank has to know it."""
    lanes = tuple(lane for lane in grant.lanes if lane.source_rank == rank)
    targets = {lane.target_rank for lane in lanes}
    tables = {target: table for target, table in grant.tables.items() if target in targets}
    return msgspec.structs.replace(grant, lanes=lanes, tables=tables)
