"""From a request to a grant: what has to be there before a target lets anyone write."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.plan import PackCost, Plan, Prompt, plan
from baton.plan.sides import expected_bytes, modes, needs
from baton.protocol.arrival import Arrival, Prepared, ReceiverState, Terms
from baton.protocol.ledger import Ledger, Need
from baton.protocol.messages import Grant, Inquiry, Invite, Lane, PageTable, Receive
from baton.session.loads import decode_tables
from baton.session.sessions import Session

if TYPE_CHECKING:
    from baton.session.coordinator import CoordinatorDriver

GRANT_BYTES = 16
NUM_OFFSETS = 16


@dataclass(slots=True)
class Coming:
    """One transfer: its machine's record and what the driver keeps beside it."""

    record: Arrival
    request: Receive
    target_dp: int
    tables: dict[int, PageTable] = field(default_factory=dict)
    callers: set[int] = field(default_factory=set)
    source_dp: int = -1
    session: int = -1
    epoch: int = -1
    """Of the source, when the session was taken."""
    is_inquired: bool = False
    forget_at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether its pages are not all the engine's again."""
        return self.record.state is not ReceiverState.RELEASED


class Granting:
    """Leads requests to their grants."""

    def __init__(self, owner: CoordinatorDriver) -> None:
        self.owner = owner
        self.cost = PackCost()

    def advance(self, coming: Coming) -> Prepared | None:
        """Goes one step nearer to the grant, and answers it if nothing is missing any more."""
        record = coming.record
        if record.state is not ReceiverState.PREPARING or not record.ranks <= coming.tables.keys():
            return None
        session = self.owner.sessions.to(coming.request.source)
        if session is None:
            return None
        coming.session, coming.epoch = session.number, session.epoch
        if coming.source_dp < 0 and session.spec.layout.size("dp") == 1:
            coming.source_dp = 0
        if coming.source_dp < 0:
            if not coming.is_inquired:
                coming.is_inquired = True
                self.owner.sessions.send(session.number, Inquiry(transfer=record.transfer))
            return None
        found = plan(session.spec, self.owner.config.spec, coming.source_dp, coming.target_dp)
        # Where dealing over mirrors begins; few values, so that what is kept of a plan is found again.
        offset = self.owner.ports.token(1)[0] % NUM_OFFSETS
        prompt = Prompt(record.num_tokens, dict(coming.request.held), offset)
        chosen = modes(found, prompt, self.cost)
        if not self._has_paths(session, list(chosen)):
            return None
        lanes = tuple(
            Lane(source, target, session.paths[source, target].number, mode.mode, 0, mode.staging_bytes)
            for (source, target), mode in chosen.items()
        )
        return self._prepared(coming, found, prompt, lanes)

    def _has_paths(self, session: Session, pairs: list[tuple[int, int]]) -> bool:
        """Whether every pair can connect; asks for what is missing."""
        missing = [pair for pair in pairs if pair not in session.paths]
        by_target: dict[int, list[int]] = {}
        for source, target in missing:
            if (source, target) not in session.asked:
                session.asked.add((source, target))
                by_target.setdefault(target, []).append(source)
        for target, sources in by_target.items():
            self.owner.to_rank(target, Invite(session=session.number, source_ranks=tuple(sources)))
        return not missing

    def _prepared(self, coming: Coming, found: Plan, prompt: Prompt, lanes: tuple[Lane, ...]) -> Prepared:
        session = self.owner.sessions.standing[coming.session]
        decode_tables(coming.tables, found.target, coming.target_dp)
        request = coming.request
        grant = Grant(
            transfer=request.transfer,
            grant=self.owner.ports.token(GRANT_BYTES),
            channel=session.channel,
            num_tokens=request.num_tokens,
            digest=request.digest,
            source_dp=coming.source_dp,
            target_dp=coming.target_dp,
            held=request.held,
            offset=prompt.offset,
            tables=coming.tables,
            lanes=lanes,
            is_verified=request.is_verified,
            session=coming.session,
        )
        targets: dict[int, tuple[int, ...]] = {}
        for lane in lanes:
            targets[lane.source_rank] = (*targets.get(lane.source_rank, ()), lane.target_rank)
        worked = frozenset(
            (lane.source_rank, lane.target_rank)
            for lane in lanes
            if request.is_verified or lane.mode != "direct"
        )
        terms = Terms(
            sources=frozenset(session.spec.layout.group(coming.source_dp)),
            expected=expected_bytes(found, prompt),
            worked=worked,
            targets=targets,
        )
        cells = {
            pair: tuple(Need(need.layers, need.start) for need in needed)
            for pair, needed in needs(found, prompt).items()
        }
        return Prepared(grant, terms, Ledger.empty(request.num_tokens, cells))

    def mistrust_paths(self, coming: Coming, source_rank: int) -> None:
        """A copy failed: the next transfer gets new paths from that rank (-1: from all)."""
        session = self.owner.sessions.standing.get(coming.session)
        if session is None or coming.record.grant is None:
            return
        for lane in coming.record.grant.lanes:
            pair = (lane.source_rank, lane.target_rank)
            is_suspect = source_rank in (-1, lane.source_rank)
            if is_suspect and pair in session.paths and session.paths[pair].number == lane.path:
                del session.paths[pair]
