"""The source side of a coordinator: every transfer that its ranks send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton.errors import ConfigError, LocalProtocolError
from baton.protocol.machine import Forget, SessionLost, Ticked
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Commit,
    Grant,
    GroupQuery,
    Landed,
    Message,
    Offer,
    Path,
    Paths,
    Queued,
    Quiet,
    QuietQuery,
    SessionPaths,
    Settled,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Finished, Outcome, Stage, Why
from baton.protocol.source_coordinator import (
    SOURCE_COORDINATOR,
    GroupRequested,
    RankAborted,
    RetireGrant,
    SourceCoordinator,
    SourceCoordinatorState,
    TargetAborted,
    TargetQueued,
    ToRank,
    ToSession,
    ToTarget,
    refusals,
)
from baton.protocol.timings import Deadlines
from baton.session.config import DriverConfig
from baton.session.dispatcher import Dispatcher
from baton.session.ports import Ports
from baton.session.sessions import Session, Sessions


@dataclass(slots=True)
class OutboundTransfer:
    """One transfer: its machine's record and the session that granted it."""

    record: SourceCoordinator
    session: int = -1
    is_forgotten: bool = False


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A grant that is over: the answer to a query of its target."""

    transfer: str
    doubt: str
    expires: float


@dataclass(frozen=True, slots=True)
class AssignedGroup:
    """Which dp group has a transfer, and until when that counts if the transfer never comes."""

    dp: int
    expires: float


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """How a transfer ended, for ranks and targets that come late."""

    outcome: Outcome
    joined: frozenset[int]
    expires: float


class OutboundTransfers:
    """Transfers by id, tombstones by grant, and how loaded each dp group is."""

    def __init__(
        self,
        config: DriverConfig,
        ports: Ports,
        sessions: Sessions,
        to_rank: Callable[[int, Message], None],
    ) -> None:
        self.config = config
        self.ports = ports
        self.sessions = sessions
        self.to_rank = to_rank
        self.refusal = ""
        """Why nothing new is taken; empty while it is."""
        layout = config.spec.layout
        self._ranks_by_dp = tuple(frozenset(layout.group(dp)) for dp in range(layout.size("dp")))
        self.transfers: dict[str, OutboundTransfer] = {}
        self.tombstones: dict[bytes, Tombstone] = {}
        self.ended: dict[str, EndedTransfer] = {}
        self.groups: dict[str, AssignedGroup] = {}
        """The dp group of every live transfer, and of those that were assigned and may still come."""
        self._dispatcher: Dispatcher[OutboundTransfer] = Dispatcher(
            SOURCE_COORDINATOR,
            ports.now,
            self._perform,
            lambda text: RankAborted(config.cause(Why.ABORTED, Stage.COPY, text)),
        )

    def assign(self, transfer: str, named: int | None = None) -> int:
        """The dp group of a transfer: the one named, else the least loaded; asked again, the same."""
        num_groups = len(self._ranks_by_dp)
        if named is not None and not 0 <= named < num_groups:
            raise ConfigError(f"there is no dp group {named}: {self.config.spec.layout} has {num_groups}")
        assigned = self.groups.get(transfer)
        if assigned is not None and named not in (None, assigned.dp):
            raise ConfigError(f"transfer {transfer} was given to dp group {assigned.dp}, not {named}")
        if assigned is None:
            loads = [0] * num_groups
            for group in self.groups.values():
                loads[group.dp] += 1
            expires = self.ports.now() + self.config.timings.offer_s
            assigned = AssignedGroup(loads.index(min(loads)) if named is None else named, expires)
            self.groups[transfer] = assigned
        return assigned.dp

    # Messages of this instance's ranks.

    def on_rank_message(self, rank: int, message: Message) -> None:
        """A source rank reports something about a transfer; if that is not known, only an offer counts."""
        event: object = message
        match message:
            case Offer() | Landed() | Commit() | Quiet() | Unquiet() if message.source_rank != rank:
                raise LocalProtocolError(f"rank {rank} sent a message as rank {message.source_rank}")
            case Offer():
                self._offered(rank, message)
                return
            case Abort(transfer=transfer_id):
                event = RankAborted(message.cause)
            case Landed() | Commit() | Quiet() | Unquiet() | AuxRecord() | Queued():
                transfer_id = message.transfer
            case _:
                raise LocalProtocolError(f"a source rank does not send {type(message).__name__}")
        if transfer := self.transfers.get(transfer_id):
            self._dispatcher.feed(transfer, event)

    def _offered(self, rank: int, offer: Offer) -> None:
        outcome: Outcome | None = None
        if offer.transfer not in self.transfers:
            ended = self.ended.get(offer.transfer)
            if ended is not None and isinstance(ended.outcome, Finished) and rank not in ended.joined:
                outcome = ended.outcome
            elif (cause := self._over(offer.transfer, Stage.OFFER)) is not None:
                outcome = Failed(cause)
        if outcome is not None:
            self.to_rank(rank, Settled(transfer=offer.transfer, grant=b"", outcome=outcome))
            return
        self.groups[offer.transfer] = AssignedGroup(offer.source_dp, self.ports.now())
        self._dispatcher.feed(self._transfer(offer.transfer), offer)

    def _over(self, transfer: str, stage: Stage) -> Cause | None:
        """Why a transfer that is not under way here will not begin; None if it may."""
        ended = self.ended.get(transfer)
        if ended is None:
            return self.config.cause(Why.ABORTED, stage, self.refusal) if self.refusal else None
        if isinstance(ended.outcome, Failed):
            return ended.outcome.cause
        text = f"transfer {transfer} ended here a moment ago; take a new id for each attempt"
        return self.config.cause(Why.REFUSED_LIVE_ID, Stage.OFFER, text)

    def _transfer(self, transfer: str) -> OutboundTransfer:
        if transfer not in self.transfers:
            now = self.ports.now()
            deadlines = Deadlines(self.config.timings, began=now, moved=now)
            record = SourceCoordinator(transfer, self.config.instance, self._ranks_by_dp, deadlines)
            self.transfers[transfer] = OutboundTransfer(record)
        return self.transfers[transfer]

    # Messages of targets.

    def on_message(self, session: Session, message: Message) -> None:
        """A target sent something."""
        match message:
            case GroupQuery(transfer=transfer):
                if (
                    transfer not in self.transfers
                    and (cause := self._over(transfer, Stage.OFFER)) is not None
                ):
                    self.sessions.send(session.number, Abort(transfer=transfer, grant=b"", cause=cause))
                else:
                    self._dispatcher.feed(self._transfer(transfer), GroupRequested(session.number))
            case Paths():
                by_rank: dict[int, list[Path]] = {}
                for path in message.paths:
                    by_rank.setdefault(path.source_rank, []).append(path)
                for rank, paths in by_rank.items():
                    self.to_rank(rank, SessionPaths(session=session.number, paths=tuple(paths)))
            case Queued(transfer=transfer):
                if transfer in self.transfers or self._over(transfer, Stage.OFFER) is None:
                    queued = self._transfer(transfer)
                    if queued.session == -1:
                        # If the target is lost, nothing else ends what waits for it.
                        queued.session = session.number
                    self._dispatcher.feed(queued, TargetQueued())
            case Grant():
                self._granted(session, message)
            case QuietQuery():
                self._answer_quiet(session, message.grant)
            case Settled():
                self._feed_granted(message.transfer, message.grant, message)
            case Abort():
                self._aborted(session, message)

    def _granted(self, session: Session, grant: Grant) -> None:
        if (cause := self._fault(session, grant)) is not None:
            # No rank ever sees it, so it is quiet.
            self._retire(grant.transfer, grant.grant, "")
            abort = Abort(transfer=grant.transfer, grant=grant.grant, cause=cause)
            self.sessions.send(session.number, abort)
            self._answer_quiet(session, grant.grant)
            return
        transfer = self._transfer(grant.transfer)
        if transfer.session not in (-1, session.number):
            for effect in refusals(transfer.record, grant):
                self._perform(OutboundTransfer(transfer.record, session.number), effect)
            return
        transfer.session = session.number
        self._dispatcher.feed(transfer, msgspec.structs.replace(grant, session=session.number))

    def _fault(self, session: Session, grant: Grant) -> Cause | None:
        cause = self.config.cause
        if grant.channel != session.channel:
            return cause(Why.PEER_LOST, Stage.GRANT, "the grant is of a channel that is gone")
        if grant.grant in self.tombstones:
            return cause(Why.ABORTED, Stage.GRANT, "the grant is over")
        if not 0 <= grant.source_dp < len(self._ranks_by_dp):
            return cause(Why.REFUSED_LAYOUT, Stage.GRANT, f"there is no dp group {grant.source_dp}")
        return None if grant.transfer in self.transfers else self._over(grant.transfer, Stage.GRANT)

    def _answer_quiet(self, session: Session, grant: bytes) -> None:
        live = (other.record.grant for other in self.transfers.values())
        if any(other is not None and other.grant == grant for other in live):
            return
        tombstone = self.tombstones.get(grant)
        if tombstone is None:
            # Not known: from now on it is never accepted.
            self._retire("", grant, "")
        transfer, doubt = (tombstone.transfer, tombstone.doubt) if tombstone else ("", "")
        message: Message = Quiet(transfer=transfer, grant=grant)
        if doubt:
            message = Unquiet(transfer=transfer, grant=grant, text=doubt)
        self.sessions.send(session.number, message)

    def _aborted(self, session: Session, message: Abort) -> None:
        transfer = self.transfers.get(message.transfer)
        if transfer is not None and transfer.record.grant is not None:
            self._feed_granted(message.transfer, message.grant, TargetAborted(message.cause))
            return
        if message.grant:
            # It overtook its grant, which is refused if it still comes.
            self._retire(message.transfer, message.grant, "")
            self._answer_quiet(session, message.grant)
        if transfer is not None or message.transfer not in self.ended:
            self._dispatcher.feed(self._transfer(message.transfer), TargetAborted(message.cause))

    # Lost sessions, time, and the machine.

    def session_lost(self, session: Session, cause: Cause) -> None:
        """A session is gone."""
        for transfer in list(self.transfers.values()):
            if transfer.session == session.number:
                self._dispatcher.feed(transfer, SessionLost(cause))

    def tick(self) -> None:
        """Checks deadlines, and drops what expired."""
        now = self.ports.now()
        for transfer in list(self.transfers.values()):
            self._dispatcher.feed(transfer, Ticked())
        self.ended = {name: ended for name, ended in self.ended.items() if ended.expires > now}
        self.groups = {
            name: group
            for name, group in self.groups.items()
            if name in self.transfers or group.expires > now
        }
        # A tombstone with a doubt is kept: a missing one means quiet.
        self.tombstones = {
            grant: tombstone
            for grant, tombstone in self.tombstones.items()
            if tombstone.doubt or tombstone.expires > now
        }

    def num_active(self) -> int:
        """Transfers without an outcome, or with ranks that are not quiet; others only wait for a query."""
        records = [transfer.record for transfer in list(self.transfers.values())]
        return sum(1 for record in records if record.state is not SourceCoordinatorState.DECIDED)

    def _feed_granted(self, transfer_id: str, grant: bytes, event: object) -> None:
        transfer = self.transfers.get(transfer_id)
        if (
            transfer is not None
            and transfer.record.grant is not None
            and transfer.record.grant.grant == grant
        ):
            self._dispatcher.feed(transfer, event)

    def _perform(self, transfer: OutboundTransfer, effect: object) -> None:
        match effect:
            case ToRank(rank, Grant() as grant):
                self.to_rank(rank, _narrowed(grant, rank))
            case ToRank(rank, message):
                self.to_rank(rank, message)
            case ToTarget(message):
                self.sessions.send(transfer.session, message)
            case ToSession(session, message):
                self.sessions.send(session, message)
            case RetireGrant(grant_id, doubt):
                self._retire(transfer.record.transfer, grant_id, doubt)
            case Forget():
                transfer.is_forgotten = True
                record = transfer.record
                del self.transfers[record.transfer]
                self.groups.pop(record.transfer, None)
                if record.outcome is not None:
                    expires = self.ports.now() + self.config.timings.linger_s
                    self.ended[record.transfer] = EndedTransfer(record.outcome, record.joined, expires)
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _retire(self, transfer: str, grant: bytes, doubt: str) -> None:
        """Leaves a tombstone; the doubt of an older one stays."""
        if (older := self.tombstones.get(grant)) is not None:
            transfer, doubt = older.transfer or transfer, older.doubt or doubt
        expires = self.ports.now() + self.config.timings.total_s
        self.tombstones[grant] = Tombstone(transfer, doubt, expires)


def _narrowed(grant: Grant, rank: int) -> Grant:
    """The part of a grant that one source rank needs."""
    lanes = tuple(lane for lane in grant.lanes if lane.source_rank == rank)
    targets = {lane.target_rank for lane in lanes}
    tables = {target: table for target, table in grant.tables.items() if target in targets}
    return msgspec.structs.replace(grant, lanes=lanes, tables=tables)
