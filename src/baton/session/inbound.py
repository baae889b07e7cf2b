"""The target side of a coordinator: every transfer that its ranks receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec
import numpy as np

from baton.errors import BatonError
from baton.plan import PackCost, Plan, Prompt, plan
from baton.plan.binding import Mode, expected_bytes, modes, needs
from baton.plan.chunks import Pair, PlanKey
from baton.plan.ownership import page_spaces, space_sizes
from baton.plan.steps import DIRECT
from baton.protocol.ledger import Ledger, Need
from baton.protocol.machine import Conclude, SessionLost, Ticked
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Close,
    Closed,
    Commit,
    Decline,
    Grant,
    GroupQuery,
    Invite,
    Invited,
    Landed,
    Lane,
    Message,
    Offer,
    Open,
    Opened,
    OutcomeQuery,
    PageTable,
    Paths,
    Queued,
    Quiet,
    Receive,
    Released,
    Settled,
    UnpackChunk,
    Unpacked,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.target_coordinator import (
    TARGET_COORDINATOR,
    CallerAborted,
    CloseRanks,
    GrantTerms,
    OpenRanks,
    Prepared,
    Release,
    SourceAborted,
    TargetCoordinator,
    TargetCoordinatorState,
    ToCallers,
    ToSource,
    UnpackAt,
)
from baton.protocol.timings import Deadlines
from baton.session.config import DriverConfig
from baton.session.dispatcher import Dispatcher
from baton.session.ports import Ports
from baton.session.sessions import Session, Sessions

GRANT_BYTES = 16
NUM_OFFSETS = 16
"""Few, so that what is cached of a plan under a prompt is found again."""
EXPECTATIONS_MAX = 256
PAGE_ID = np.dtype("<i4")


@dataclass(slots=True)
class InboundTransfer:
    """One transfer: its machine's record and the driver's own state."""

    record: TargetCoordinator
    target_dp: int
    is_forgotten: bool = False
    tables: dict[int, PageTable] = field(default_factory=dict)
    callers: set[int] = field(default_factory=set)
    """The ranks that asked for it."""
    source_dp: int = -1
    session: int = -1
    epoch: int = -1
    """Of the source, when the session was taken."""
    offset: int | None = None
    """Where dealing over mirrors begins."""
    is_group_asked: bool = False
    concluded: float | None = None
    forget_at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether its pages are not all the engine's again."""
        return self.record.state is not TargetCoordinatorState.RELEASED

    @property
    def num_pages(self) -> dict[tuple[int, str], int]:
        """By rank and group."""
        return {
            (rank, group): len(raw) // PAGE_ID.itemsize
            for rank, table in self.tables.items()
            for group, raw in table.items()
        }

    @property
    def concerned(self) -> list[int]:
        """The ranks that get the outcome: of a ready transfer, those that asked."""
        # A rank may be about to ask for what fails. What is ready had all its tables from those that asked.
        is_ready = self.record.state is TargetCoordinatorState.READY
        return sorted(self.callers if is_ready else self.record.ranks | self.callers)


class InboundTransfers:
    """Transfers by id and by grant."""

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
        self.cost = config.cost
        self.refusal = ""
        """Why nothing new is granted; empty while it is."""
        self.transfers: dict[str, InboundTransfer] = {}
        self.grants: dict[bytes, InboundTransfer] = {}
        self.unsent: dict[str, list[Message]] = {}
        """By source: messages about transfers that are not asked for, until there is a session."""
        self.given_up: dict[str, tuple[Cause, float]] = {}
        """Transfers that an engine aborted on a rank before any rank had asked, until they expire."""
        self.unclosed: list[InboundTransfer] = []
        """Ready, and without permissions to take back: they are closed with the next tick."""
        self._dispatcher: Dispatcher[InboundTransfer] = Dispatcher(
            TARGET_COORDINATOR,
            ports.now,
            self._perform,
            lambda text: CallerAborted(config.cause(Why.ABORTED, Stage.COPY, text)),
        )

    # Messages of this instance's ranks.

    def on_rank_message(self, rank: int, message: Message) -> None:
        """A target rank, or its engine, sent something."""
        match message:
            case Receive():
                self._asked(rank, message)
            case Decline():
                self._decline(message)
            case Queued():
                self._to_named(message.source, Queued(transfer=message.transfer))
            case Abort():
                self._given_up(message)
            case Invited():
                self._invited(message)
            case Opened() | Unpacked() | Closed():
                transfer = self.grants.get(message.grant)
                if transfer is None:
                    return
                session = self.sessions.standing.get(transfer.session)
                if isinstance(message, Closed) and session is not None:
                    session.unchecked |= {(message.rank, path) for path in message.unchecked}
                if isinstance(message, Opened) and message.cause is not None:
                    self._distrust_paths(transfer, -1)
                self._dispatcher.feed(transfer, message)

    def _given_up(self, message: Abort) -> None:
        """The engine aborted; its rank does not know how far the transfer had come."""
        transfer, cause = self.transfers.get(message.transfer), message.cause
        if transfer is None:
            # The other ranks have not asked yet: when they do, they are refused.
            expires = self.ports.now() + self.config.timings.linger_s
            self.given_up[message.transfer] = (cause, expires)
            return
        if transfer.record.state is TargetCoordinatorState.GRANTED:
            cause = msgspec.structs.replace(cause, stage=Stage.COPY)
        self._dispatcher.feed(transfer, CallerAborted(cause))

    def _asked(self, rank: int, message: Receive) -> None:
        transfer, cause = self.transfers.get(message.transfer), self.config.cause
        if transfer is None and message.transfer in self.given_up:
            self._refuse(rank, message, self.given_up[message.transfer][0])
            return
        if (
            transfer is not None
            and not transfer.is_live
            and isinstance(transfer.record.outcome, Failed)
            and rank not in transfer.callers
        ):
            # It failed before this rank asked.
            transfer.callers.add(rank)
            self._refuse(rank, message, transfer.record.outcome.cause)
            return
        if transfer is None or not transfer.is_live:
            if self.refusal:
                self._refuse(rank, message, cause(Why.OUT_OF_PAGES, Stage.GRANT, self.refusal))
                return
            transfer = self._begin(message)
        elif (
            transfer.tables.keys() & message.tables.keys()
            or transfer.record.state is not TargetCoordinatorState.PREPARING
        ):
            text = f"transfer {message.transfer} is live here; take a new id for each attempt"
            self._refuse(rank, message, cause(Why.REFUSED_LIVE_ID, Stage.GRANT, text))
            return
        transfer.tables |= message.tables
        transfer.callers.add(rank)
        self._dispatcher.feed(transfer, message)
        outcome = transfer.record.outcome
        if isinstance(outcome, Failed) and message.source != transfer.record.request.source:
            # The source that the other ranks named is told by the machine.
            self._decline(Decline(transfer=message.transfer, source=message.source, cause=outcome.cause))
        self._advance(transfer)

    def _begin(self, message: Receive) -> InboundTransfer:
        layout, now = self.config.spec.layout, self.ports.now()
        dp = layout.coordinates(min(message.tables))["dp"]
        record = TargetCoordinator(
            request=message,
            instance=self.config.instance,
            ranks=frozenset(layout.group(dp)),
            deadlines=Deadlines(self.config.timings, began=now, moved=now),
        )
        transfer = InboundTransfer(record, dp, source_dp=message.source_dp)
        self.transfers[message.transfer] = transfer
        return transfer

    def _refuse(self, rank: int, message: Receive, cause: Cause) -> None:
        self.to_rank(rank, Settled(transfer=message.transfer, grant=b"", outcome=Failed(cause)))
        self.to_rank(rank, Released(transfer=message.transfer))
        if cause.why is not Why.REFUSED_LIVE_ID:
            self._decline(Decline(transfer=message.transfer, source=message.source, cause=cause))

    def _decline(self, message: Decline) -> None:
        self._to_named(message.source, Abort(transfer=message.transfer, grant=b"", cause=message.cause))

    def _to_named(self, source: str, message: Message) -> None:
        """Sends to a source, now or when there is a session with it."""
        session = self.sessions.to(source)
        if session is None:
            self.unsent.setdefault(source, []).append(message)
        else:
            self.sessions.send(session.number, message)

    def _invited(self, message: Invited) -> None:
        session = self.sessions.standing.get(message.session)
        if session is None:
            return
        for path in message.paths:
            pair = (path.source_rank, path.target_rank)
            session.paths[pair] = path
            session.asked.discard(pair)
        self.sessions.send(session.number, Paths(paths=message.paths))
        for transfer in list(self.transfers.values()):
            if transfer.session == session.number:
                self._advance(transfer)

    # From a request to a grant.

    def session_up(self, session: Session) -> None:
        """A source is there: transfers that waited for it go on."""
        for name in self.sessions.names_of(session):
            for message in self.unsent.pop(name, []):
                self.sessions.send(session.number, message)
            for transfer in list(self.transfers.values()):
                if transfer.record.request.source == name:
                    self._advance(transfer)

    def _advance(self, transfer: InboundTransfer) -> None:
        """Takes one step towards the grant, and grants if nothing is missing any more."""
        try:
            prepared = self._prepare(transfer)
            if prepared is not None:
                self.grants[prepared.grant.grant] = transfer
                self._dispatcher.feed(transfer, prepared)
        except BatonError as error:
            cause = self.config.cause(Why.REFUSED_LAYOUT, Stage.GRANT, str(error))
            self._dispatcher.feed(transfer, CallerAborted(cause))

    def _prepare(self, transfer: InboundTransfer) -> Prepared | None:
        record, request = transfer.record, transfer.record.request
        if record.state is not TargetCoordinatorState.PREPARING or not record.ranks <= transfer.tables.keys():
            return None
        session = self.sessions.to(request.source)
        if session is None:
            return None
        transfer.session, transfer.epoch = session.number, session.epoch
        if transfer.source_dp < 0 and session.spec.layout.size("dp") == 1:
            transfer.source_dp = 0
        if transfer.source_dp < 0:
            if not transfer.is_group_asked:
                transfer.is_group_asked = True
                self.sessions.send(session.number, GroupQuery(transfer=record.transfer))
            return None
        bound = plan(session.spec, self.config.spec, transfer.source_dp, transfer.target_dp)
        if transfer.offset is None:
            transfer.offset = self.ports.token(1)[0] % NUM_OFFSETS if _is_dealt(PlanKey(bound)) else 0
        prompt = Prompt(request.num_tokens, dict(request.held), transfer.offset)
        expected = expect(bound, prompt, self.cost)
        if not self._has_paths(session, expected.modes):
            return None
        grant = Grant(
            transfer=request.transfer,
            grant=self.ports.token(GRANT_BYTES),
            channel=session.channel,
            num_tokens=request.num_tokens,
            digest=request.digest,
            source_dp=transfer.source_dp,
            target_dp=transfer.target_dp,
            held=request.held,
            offset=prompt.offset,
            tables=transfer.tables,
            lanes=tuple(
                Lane(source, target, session.paths[source, target].number, mode.mode, 0, mode.staging_bytes)
                for (source, target), mode in expected.modes.items()
            ),
            is_verified=request.is_verified,
            progress_s=record.deadlines.progress_s,
            session=session.number,
        )
        unpacked = frozenset(
            pair for pair, mode in expected.modes.items() if request.is_verified or mode.mode != DIRECT
        )
        terms = GrantTerms(
            sources=frozenset(session.spec.layout.group(transfer.source_dp)),
            expected=expected.num_bytes,
            unpacked=unpacked,
            targets=expected.targets,
        )
        # The grant may go ahead where nothing that ranks do in opening changes what the source can do, or has
        # to know.
        paths = {(lane.target_rank, lane.path) for lane in grant.lanes}
        is_ahead = bool(paths) and not unpacked and paths <= session.unchecked
        return Prepared(grant, terms, expected.ledger, is_ahead=is_ahead)

    def _has_paths(self, session: Session, pairs: Iterable[Pair]) -> bool:
        """Whether every pair can connect; asks for what is missing."""
        missing = [pair for pair in pairs if pair not in session.paths]
        by_target: dict[int, list[int]] = {}
        for source, target in missing:
            if (source, target) not in session.asked:
                session.asked.add((source, target))
                by_target.setdefault(target, []).append(source)
        for target, sources in by_target.items():
            self.to_rank(target, Invite(session=session.number, source_ranks=tuple(sources)))
        return not missing

    def _distrust_paths(self, transfer: InboundTransfer, source_rank: int) -> None:
        """A copy failed: the next transfer gets new paths from that rank (-1: from all)."""
        session = self.sessions.standing.get(transfer.session)
        if session is None or transfer.record.grant is None:
            return
        for lane in transfer.record.grant.lanes:
            pair = (lane.source_rank, lane.target_rank)
            is_suspect = source_rank in (-1, lane.source_rank)
            if is_suspect and pair in session.paths and session.paths[pair].number == lane.path:
                del session.paths[pair]
                session.unchecked.discard((lane.target_rank, lane.path))

    # Messages of sources.

    def on_message(self, session: Session, message: Message) -> None:
        """A source sent something."""
        match message:
            case Landed() | Commit() | AuxRecord() | Quiet() | Unquiet() | OutcomeQuery():
                # Under a grant: from another session than the grant's it is ignored. After the loss of that
                # session a later one of the same incarnation may say quiet.
                transfer = self.grants.get(message.grant)
                if transfer is not None and (
                    transfer.session == session.number
                    or (
                        transfer.record.state is TargetCoordinatorState.QUARANTINED
                        and transfer.epoch == session.epoch
                    )
                ):
                    self._dispatcher.feed(transfer, message)
            case Offer():
                transfer = self.transfers.get(message.transfer)
                if transfer is not None and transfer.session == session.number:
                    if transfer.source_dp < 0:
                        transfer.source_dp = message.source_dp
                    self._dispatcher.feed(transfer, message)
                    self._advance(transfer)
            case Queued():
                transfer = self.transfers.get(message.transfer)
                if transfer is not None and transfer.session == session.number:
                    self._dispatcher.feed(transfer, message)
            case Abort():
                self._aborted(session, message)

    def _aborted(self, session: Session, message: Abort) -> None:
        transfer = self.grants.get(message.grant) if message.grant else self.transfers.get(message.transfer)
        if transfer is None or transfer.session != session.number:
            return
        ungranted = (TargetCoordinatorState.PREPARING, TargetCoordinatorState.OPENING)
        if not message.grant and transfer.record.state not in ungranted:
            return
        if message.cause.why is Why.COPY_FAILED and message.grant:
            self._distrust_paths(transfer, message.cause.rank)
        self._dispatcher.feed(transfer, SourceAborted(message.cause))

    # Lost sessions, time, and the machine.

    def session_lost(self, session: Session, cause: Cause) -> None:
        """A session is gone."""
        for transfer in list(self.transfers.values()):
            if transfer.session == session.number:
                self._dispatcher.feed(transfer, SessionLost(cause))

    def source_unreachable(self, name: str, cause: Cause) -> None:
        """A source could not be reached: transfers that waited for it fail."""
        self.unsent.pop(name, None)
        for transfer in list(self.transfers.values()):
            is_waiting = transfer.record.state is TargetCoordinatorState.PREPARING
            if is_waiting and transfer.record.request.source == name:
                self._dispatcher.feed(transfer, SessionLost(cause))

    def tick(self) -> None:
        """Checks deadlines, repeats queries, and drops what was released long ago."""
        now = self.ports.now()
        for transfer in self.unclosed:
            self._close(transfer, sorted(transfer.record.ranks), must_prove_quiet=False)
        self.unclosed.clear()
        self.given_up = {name: entry for name, entry in self.given_up.items() if entry[1] > now}
        for transfer in list(self.transfers.values()):
            if transfer.is_live:
                self._dispatcher.feed(transfer, Ticked())
            if transfer.forget_at is not None and transfer.forget_at <= now:
                self._forget(transfer)

    def _forget(self, transfer: InboundTransfer) -> None:
        if self.transfers.get(transfer.record.transfer) is transfer:
            del self.transfers[transfer.record.transfer]
        if transfer.record.grant is not None:
            self.grants.pop(transfer.record.grant.grant, None)

    def _perform(self, transfer: InboundTransfer, effect: object) -> None:
        to_rank, transfer_id = self.to_rank, transfer.record.transfer
        match effect:
            case OpenRanks(grant):
                for rank in sorted(transfer.record.ranks):
                    to_rank(rank, Open(grant=_narrowed(grant, rank)))
            case ToSource(message):
                self._to_source(transfer, message)
            case ToCallers(aux):
                for rank in sorted(transfer.callers):
                    to_rank(rank, msgspec.structs.replace(aux, transfer=transfer_id))
            case UnpackAt(rank, landed):
                to_rank(rank, UnpackChunk(grant=landed.grant, landed=landed))
            case CloseRanks() if (
                transfer.record.is_ahead and transfer.record.state is TargetCoordinatorState.READY
            ):
                self.unclosed.append(transfer)
            case CloseRanks(ranks, must_prove_quiet):
                self._close(transfer, ranks, must_prove_quiet)
            case Conclude(outcome):
                transfer.concluded = self.ports.now()
                grant_id = transfer.record.grant.grant if transfer.record.grant else b""
                for rank in transfer.concerned:
                    to_rank(rank, Settled(transfer=transfer_id, grant=grant_id, outcome=outcome))
            case Release():
                transfer.forget_at = self.ports.now() + self.config.timings.linger_s
                for rank in transfer.concerned:
                    to_rank(rank, Released(transfer=transfer_id))
            case _:
                raise AssertionError(f"no such effect: {effect}")

    def _close(self, transfer: InboundTransfer, ranks: Iterable[int], must_prove_quiet: bool) -> None:
        assert transfer.record.grant is not None
        if must_prove_quiet:
            # To be sure, ranks revoke the writers: the next transfer needs new paths.
            self._distrust_paths(transfer, -1)
        close = Close(grant=transfer.record.grant.grant, must_prove_quiet=must_prove_quiet)
        for rank in ranks:
            self.to_rank(rank, close)

    def _to_source(self, transfer: InboundTransfer, message: Message) -> None:
        """Over the transfer's session, or over a newer one with the same incarnation if that is gone."""
        if transfer.session in self.sessions.standing:
            self.sessions.send(transfer.session, message)
        elif transfer.epoch >= 0:
            session = self.sessions.to(transfer.record.request.source)
            if session is not None and session.epoch == transfer.epoch:
                self.sessions.send(session.number, message)
        elif isinstance(message, Abort):
            # There was no session yet: the message is sent when there is one.
            request = transfer.record.request
            self._decline(Decline(transfer=request.transfer, source=request.source, cause=message.cause))

    # Figures; from any thread.

    def num_live(self) -> int:
        """Transfers whose pages are not all the engine's again."""
        return sum(1 for transfer in list(self.transfers.values()) if transfer.is_live)

    def num_active(self) -> int:
        """Transfers without a verdict."""
        return sum(1 for transfer in list(self.transfers.values()) if transfer.record.outcome is None)

    def quarantined(self) -> dict[str, int]:
        """Transfers whose pages wait for quiet, with the number of pages on all ranks together."""
        return {
            transfer.record.transfer: sum(transfer.num_pages.values())
            for transfer in list(self.transfers.values())
            if transfer.record.state is TargetCoordinatorState.QUARANTINED
        }

    def stuck_share(self, since: float) -> float:
        """The largest share of a page space that some rank has in quarantine since then or longer."""
        spec = self.config.spec
        stuck: dict[tuple[int, str], set[int]] = {}
        for transfer in self.transfers.values():
            is_quarantined = transfer.record.state is TargetCoordinatorState.QUARANTINED
            if is_quarantined and transfer.concluded is not None and transfer.concluded <= since:
                for rank, table in transfer.tables.items():
                    for group, raw in table.items():
                        # Transfers may share the pages of a held prefix.
                        pages = stuck.setdefault((rank, page_spaces(spec, rank)[group]), set())
                        pages.update(np.frombuffer(raw, dtype=PAGE_ID).tolist())
        shares = (len(pages) / space_sizes(spec, rank)[space] for (rank, space), pages in stuck.items())
        return max(shares, default=0.0)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The transfer of a prompt, by its plan: modes and bytes by pair of ranks, and the cells to wait for."""

    modes: Mapping[Pair, Mode]
    num_bytes: Mapping[Pair, Mapping[str, int]]
    targets: Mapping[int, tuple[int, ...]]
    ledger: Ledger


def expect(bound: Plan, prompt: Prompt, cost: PackCost) -> Expectation:
    """The same object for prompts of the same length."""
    return _expect(PlanKey(bound), prompt.num_tokens, tuple(sorted(prompt.held.items())), prompt.offset, cost)


@lru_cache(maxsize=EXPECTATIONS_MAX)
def _expect(
    same: PlanKey, num_tokens: int, held: tuple[tuple[str, int], ...], offset: int, cost: PackCost
) -> Expectation:
    prompt = Prompt(num_tokens, dict(held), offset)
    chosen = modes(same.plan, prompt, cost)
    targets: dict[int, tuple[int, ...]] = {}
    for source, target in chosen:
        targets[source] = (*targets.get(source, ()), target)
    cells = {
        pair: tuple(Need(need.layers, need.start) for need in needed)
        for pair, needed in needs(same.plan, prompt).items()
    }
    return Expectation(chosen, expected_bytes(same.plan, prompt), targets, Ledger.empty(num_tokens, cells))


@lru_cache(maxsize=EXPECTATIONS_MAX)
def _is_dealt(same: PlanKey) -> bool:
    """Whether some target has several mirrors to take turns, so that it matters where they begin."""
    return any(route.turns.period > 1 for route in same.plan.routes)


def _narrowed(grant: Grant, rank: int) -> Grant:
    """The part of a grant that one target rank needs."""
    lanes = tuple(lane for lane in grant.lanes if lane.target_rank == rank)
    return msgspec.structs.replace(grant, lanes=lanes, tables={rank: grant.tables[rank]})
