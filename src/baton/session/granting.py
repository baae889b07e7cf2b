"""From a request to a grant: what has to be there before a target lets anyone write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from baton.plan import PackCost, Plan, Prompt, plan
from baton.plan.binding import Mode, expected_bytes, modes, needs
from baton.plan.chunks import Pair, PlanKey
from baton.plan.steps import DIRECT
from baton.protocol.arrival import Arrival, Prepared, ReceiverState, Terms
from baton.protocol.ledger import Ledger, Need
from baton.protocol.messages import Grant, Inquiry, Invite, Lane, PageTable, Receive
from baton.session.page_tables import check_ranks
from baton.session.sessions import Session

if TYPE_CHECKING:
    from baton.session.coordinator import CoordinatorDriver

GRANT_BYTES = 16
NUM_OFFSETS = 16
"""Few, so that what is kept of a plan under a prompt is found again."""
OUTLOOKS_MAX = 256


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
    offset: int | None = None
    """Where dealing over mirrors begins."""
    is_inquired: bool = False
    concluded: float | None = None
    forget_at: float | None = None

    @property
    def is_live(self) -> bool:
        """Whether its pages are not all the engine's again."""
        return self.record.state is not ReceiverState.RELEASED

    @property
    def concerned(self) -> list[int]:
        """The ranks that have to hear how it ended: of what is ready, those that asked."""
        # A rank may be about to ask for what fails. What is ready had all its tables from those that asked.
        is_ready = self.record.state is ReceiverState.READY
        return sorted(self.callers if is_ready else self.record.ranks | self.callers)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a plan under a prompt will bring: how pairs move, what they move, and which cells matter."""

    modes: Mapping[Pair, Mode]
    expected: Mapping[Pair, Mapping[str, int]]
    targets: Mapping[int, tuple[int, ...]]
    ledger: Ledger


def look_ahead(found: Plan, prompt: Prompt, cost: PackCost) -> Outlook:
    """The outlook; asked again for a prompt of the same length, the same one."""
    return _look_ahead(
        PlanKey(found), prompt.num_tokens, tuple(sorted(prompt.held.items())), prompt.offset, cost
    )


@lru_cache(maxsize=OUTLOOKS_MAX)
def _look_ahead(
    same: PlanKey, num_tokens: int, held: tuple[tuple[str, int], ...], offset: int, cost: PackCost
) -> Outlook:
    prompt = Prompt(num_tokens, dict(held), offset)
    chosen = modes(same.plan, prompt, cost)
    targets: dict[int, tuple[int, ...]] = {}
    for source, target in chosen:
        targets[source] = (*targets.get(source, ()), target)
    cells = {
        pair: tuple(Need(need.layers, need.start) for need in needed)
        for pair, needed in needs(same.plan, prompt).items()
    }
    return Outlook(chosen, expected_bytes(same.plan, prompt), targets, Ledger.empty(num_tokens, cells))


def is_dealt(found: Plan) -> bool:
    """Whether some target has several mirrors to take turns, so that it matters where they begin."""
    return _is_dealt(PlanKey(found))


@lru_cache(maxsize=OUTLOOKS_MAX)
def _is_dealt(same: PlanKey) -> bool:
    return any(route.turns.period > 1 for route in same.plan.routes)


class Granting:
    """Leads requests to their grants."""

    def __init__(self, owner: CoordinatorDriver) -> None:
        self.owner = owner
        self.cost = owner.config.cost

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
        if coming.offset is None:
            coming.offset = self.owner.ports.token(1)[0] % NUM_OFFSETS if is_dealt(found) else 0
        prompt = Prompt(record.num_tokens, dict(coming.request.held), coming.offset)
        outlook = look_ahead(found, prompt, self.cost)
        if not self._has_paths(session, list(outlook.modes)):
            return None
        lanes = tuple(
            Lane(source, target, session.paths[source, target].number, mode.mode, 0, mode.staging_bytes)
            for (source, target), mode in outlook.modes.items()
        )
        check_ranks(coming.tables, found.target, coming.target_dp)
        return self._prepared(coming, outlook, prompt, lanes)

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

    def _prepared(
        self, coming: Coming, outlook: Outlook, prompt: Prompt, lanes: tuple[Lane, ...]
    ) -> Prepared:
        session = self.owner.sessions.standing[coming.session]
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
        is_worked = {pair: request.is_verified or mode.mode != DIRECT for pair, mode in outlook.modes.items()}
        terms = Terms(
            sources=frozenset(session.spec.layout.group(coming.source_dp)),
            expected=outlook.expected,
            worked=frozenset(pair for pair, needed in is_worked.items() if needed),
            targets=outlook.targets,
        )
        return Prepared(grant, terms, outlook.ledger, is_ahead=self._can_go_ahead(session, grant, terms))

    @staticmethod
    def _can_go_ahead(session: Session, grant: Grant, terms: Terms) -> bool:
        """Whether nothing that ranks do in opening changes what the source can do, or has to know."""
        paths = {(lane.target_rank, lane.path) for lane in grant.lanes}
        return bool(paths) and not terms.worked and paths <= session.unchecked

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
                session.unchecked.discard((lane.target_rank, lane.path))


def for_target(grant: Grant, rank: int) -> Grant:
    """A grant as one target rank has to know it."""
    lanes = tuple(lane for lane in grant.lanes if lane.target_rank == rank)
    return msgspec.structs.replace(grant, lanes=lanes, tables={rank: grant.tables[rank]})


def is_same(one: Receive, other: Receive) -> bool:
    """Whether two ranks ask for the same."""
    return (one.source, one.digest, one.num_tokens, one.held) == (
        other.source,
        other.digest,
        other.num_tokens,
        other.held,
    )
