"""Deliberate defects: each is put into the production code for a while, and a checker has to notice.

A variant is a generator function that patches, yields and restores. `around` wraps cells of a protocol table,
`patched` replaces functions of a module or a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from baton.plan import binding, chunks
from baton.plan.chunks import PlacedRoute, RouteEnd
from baton.protocol import source_coordinator, target_coordinator
from baton.protocol import source_coordinator as at_source
from baton.protocol import source_rank as at_source_rank
from baton.protocol import target_coordinator as at_target
from baton.protocol.instance import INSTANCE, InstanceState, RankLost
from baton.protocol.ledger import Ledger, Rectangle
from baton.protocol.machine import IGNORED, Cell, Table, replace
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Close,
    Closed,
    Commit,
    Grant,
    Landed,
    Offer,
    Opened,
    Queued,
    Quiet,
    Receive,
    Settled,
    Unquiet,
)
from baton.protocol.outcomes import Aux, Cause, Failed, Stage, Why
from baton.protocol.source_coordinator import SOURCE_COORDINATOR, SourceCoordinator, SourceCoordinatorState
from baton.protocol.source_rank import SOURCE_RANK, SourceRankState
from baton.protocol.target_coordinator import TARGET_COORDINATOR, TargetCoordinatorState, UnpackAt
from baton.protocol.target_rank import TARGET_RANK, RevokePermissions, TargetRankState
from baton.protocol.timings import Deadlines
from baton.session import copies, tensors
from baton.session.coordinator import CoordinatorDriver
from baton.session.copies import SourceCopies
from baton.session.handles import Sending
from baton.session.inbound import InboundTransfers
from baton.session.outbound import OutboundTransfers
from baton.session.writers import TargetWriters
from baton.sim.core import Strength, Violation
from baton.sim.faults import Aborts, Copies, Crash, Duplication, Pressure, RankMismatch, Reordering, Tokeniser
from baton.sim.network import Host
from baton.sim.runner import make_world, options_of, run_world
from baton.sim.scenarios import run_scenario
from baton.transport import NOW, Done, FailedQuiet, FailedUnknown

Step = tuple[Any, tuple[object, ...]]
WEAK = Strength(can_enforce_grants=False, can_revoke=False)


@dataclass(frozen=True)
class Variant:
    """A defect, where to look for it, and the checkers of which one has to notice."""

    name: str
    text: str
    broken: Callable[[], AbstractContextManager[None]]
    checkers: tuple[str, ...]
    scenario: str
    options: Mapping[str, Any]
    num_tries: int

    def run(self, seed: int) -> Violation | None:
        if self.scenario:
            return run_scenario(self.scenario, seed)[1]
        return run_world(make_world(seed, options_of(seed, **self.options)))

    def catch(self) -> tuple[int, Violation] | None:
        """Runs seeds with the defect until one of the checkers notices: the try, and the violation."""
        for number in range(1, self.num_tries + 1):
            with self.broken():
                violation = self.run(number)
            if violation is not None and violation.checker in self.checkers:
                return number, violation
        return None


VARIANTS: dict[str, Variant] = {}


def variant(text: str, *checkers: str, scenario: str = "", num_tries: int = 60, **options: Any) -> Any:
    """Registers a defect; `options` are set in every seed, so that the defect has a chance to show."""

    def register(broken: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        VARIANTS[broken.__name__] = Variant(
            broken.__name__, text, contextmanager(broken), checkers, scenario, options, num_tries
        )
        return broken

    return register


@contextmanager
def patched(owner: Any, **changes: Any) -> Iterator[None]:
    """Sets attributes of a module or a class."""
    before = {name: owner.__dict__[name] for name in changes}
    for name, value in changes.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def around(table: Table[Any], wrong: Callable[..., Step] | None, *keys: tuple[Any, type]) -> Iterator[None]:
    """Has cells do `wrong(right, record, event, now)` instead, or nothing if `wrong` is None."""
    cells: Any = table.cells
    before = {key: cells[key] for key in keys}
    for key, entry in before.items():
        cells[key] = IGNORED if wrong is None else _wrapped(wrong, entry, table)
    try:
        yield
    finally:
        cells.update(before)


def _wrapped(wrong: Callable[..., Step], entry: Any, table: Table[Any]) -> Cell:
    right = entry.act if isinstance(entry, Cell) else lambda record, event, now: (record, ())
    return Cell(lambda record, event, now: wrong(right, record, event, now), tuple(table.states))


# The target admits too early.


@variant(
    "a target admits when every source rank has committed, without a look at its ledger",
    "bytes_right",
    "full_ledger",
    faults={"reordering": Reordering(0.5, 0.02)},
    is_packing=True,
    finish_share=0.0,
)
def admit_on_count() -> Iterator[None]:
    def is_counted(account: Any, terms: Any) -> bool:
        return account.aux is not None and account.commits.keys() >= terms.sources

    with patched(target_coordinator, is_complete=is_counted):
        yield


@variant(
    "a target admits when its ledger is full, without the commits",
    "all_committed",
    faults={"reordering": Reordering(0.5, 0.02)},
    finish_share=0.0,
)
def admit_without_commits() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        account = after.account
        if (
            after.state is not TargetCoordinatorState.GRANTED
            or account.aux is None
            or not account.ledger.is_full
        ):
            return after, effects
        return target_coordinator._admit(after, account)

    with around(TARGET_COORDINATOR, wrong, (TargetCoordinatorState.GRANTED, Landed)):
        yield


@variant(
    "a transfer that was granted ahead is ready before every rank has opened",
    "all_opened",
    scenario="written-unopened",
)
def admit_unopened() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, opened=record.ranks), event, now)

    events = (Landed, Commit, AuxRecord)
    with around(TARGET_COORDINATOR, wrong, *((TargetCoordinatorState.GRANTED, event) for event in events)):
        yield


@variant(
    "a transfer is ready without its aux record",
    "agreement",
    faults={"reordering": Reordering(0.5, 0.05)},
)
def admit_without_aux() -> Iterator[None]:
    admit = target_coordinator._admit
    _complete = target_coordinator.is_complete

    def is_complete(account: Any, terms: Any) -> bool:
        return _complete(replace(account, aux=account.aux or Aux()), terms)

    def admit_anyhow(record: Any, account: Any) -> Any:
        return admit(record, replace(account, aux=account.aux or Aux()))

    with patched(target_coordinator, is_complete=is_complete, _admit=admit_anyhow):
        yield


@variant(
    "a chunk that is reported twice counts twice",
    "bytes_right",
    faults={"duplication": Duplication(0.3, 0.001), "reordering": Reordering(0.5, 0.05)},
    is_packing=True,
    verified_share=0.0,
)
def count_duplicates() -> Iterator[None]:
    enter_landed = target_coordinator.enter_landed

    def enter_anew(account: Any, terms: Any, landed: Any) -> Any:
        if (landed.source_rank, landed.chunk) in account.chunks:
            landed = msgspec.structs.replace(landed, chunk=1000 + len(account.chunks))
        return enter_landed(account, terms, landed)

    def entered(self: Ledger, pair: Any, chunk: Any) -> Ledger:
        missing = dict(self.missing)
        left = missing.pop(pair, 0) - sum(part.area for part in self._wanted(pair, chunk))
        if left > 0:
            missing[pair] = left
        return replace(self, missing=missing)

    with patched(target_coordinator, enter_landed=enter_anew), patched(Ledger, entered=entered):
        yield


@variant(
    "a staged chunk counts before it is unpacked",
    "bytes_right",
    faults={},
    is_packing=True,
    verified_share=0.0,
)
def admit_before_unpack() -> Iterator[None]:
    enter_landed = target_coordinator.enter_landed

    def enter_at_once(account: Any, terms: Any, landed: Any) -> Any:
        after, _ = enter_landed(account, replace(terms, unpacked=frozenset()), landed)
        if after is account:
            return account, ()
        targets = terms.targets.get(landed.source_rank, ())
        worked = (rank for rank in targets if (landed.source_rank, rank) in terms.unpacked)
        return after, tuple(UnpackAt(rank, landed) for rank in worked if rank in landed.staged)

    with patched(target_coordinator, enter_landed=enter_at_once):
        yield


@variant("checksums are not compared", "bytes_right", scenario="bad-wire", num_tries=10)
def ignore_checksums() -> Iterator[None]:
    with patched(tensors, checksums=lambda *args: {}):
        yield


# Prompts.


@variant(
    "a differing digest is accepted, at both ends",
    "bytes_right",
    "same_prompt",
    faults={"tokeniser": Tokeniser(1.0, False)},
    held_share=0.0,
)
def ignore_digest() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(event, num_tokens=record.num_tokens, digest=record.digest), now)

    states = (
        TargetCoordinatorState.PREPARING,
        TargetCoordinatorState.OPENING,
        TargetCoordinatorState.GRANTED,
    )
    with (
        patched(SourceCoordinator, mismatch=lambda record, prefill: None),
        around(TARGET_COORDINATOR, wrong, *((state, Offer) for state in states)),
    ):
        yield


@variant(
    "an answer that ended at the source is given to a target with another prompt",
    "same_prompt",
    faults={"tokeniser": Tokeniser(1.0, False)},
    finish_share=1.0,
)
def answer_any_prompt() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, offer=None), event, now)

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.DECIDED, Grant)):
        yield


@variant(
    "an answer counts as soon as one rank has ended it, whatever the others prefilled",
    "same_prompt",
    scenario="rank-mismatch-finished",
)
def believe_one_rank() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, ranks=record.joined), event, now)

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.OPEN, AuxRecord)):
        yield


@variant(
    "a source does not compare what its ranks prefilled",
    "same_prompt",
    "bytes_right",
    faults={"rank_mismatch": RankMismatch(1.0, 1.0)},
    finish_share=0.0,
)
def ignore_odd_rank() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(record.offer or event, source_rank=event.source_rank), now)

    states = (SourceCoordinatorState.OPEN, SourceCoordinatorState.RUNNING)
    with around(SOURCE_COORDINATOR, wrong, *((state, Offer) for state in states)):
        yield


@variant(
    "a target does not compare what its ranks ask for",
    "same_prompt",
    "bytes_right",
    scenario="rank-mismatch-target",
)
def ignore_odd_target_rank() -> Iterator[None]:
    with around(TARGET_COORDINATOR, None, (TargetCoordinatorState.PREPARING, Receive)):
        yield


@variant(
    "a target refuses a rank that asks for another prompt, and its group waits for the deadline",
    "prompt_failure",
    scenario="rank-mismatch-target",
)
def refuse_only_the_odd_rank() -> Iterator[None]:
    asked = InboundTransfers._asked

    def refuse(self: InboundTransfers, rank: int, message: Any) -> None:
        transfer = self.transfers.get(message.transfer)
        if transfer is not None and transfer.record.request.digest != message.digest:
            self._refuse(rank, message, self.config.cause(Why.REFUSED_LIVE_ID, Stage.GRANT, ""))
        else:
            asked(self, rank, message)

    with patched(InboundTransfers, _asked=refuse):
        yield


# Chunks, fences and staging.


@variant(
    "the chunk that ends a prompt is not copied",
    "bytes_right",
    "full_ledger",
    "written_once",
    verified_share=0.0,
)
def drop_last_chunk() -> Iterator[None]:
    make_loads = binding.bind_source

    def without_last(terms: Any, source_rank: int, table: Any, box: Any) -> Any:
        made = make_loads(terms, source_rank, table, box)
        if box.tokens[1] < terms.prompt.num_tokens:
            return made
        return [replace(load, copies=(), packs=()) for load in made]

    with patched(copies, bind_source=without_last):
        yield


@variant("copies do not wait for their fences", "bytes_right", verified_share=0.0)
def ignore_fence() -> Iterator[None]:
    dispatch = SourceCopies._submit

    def at_once(self: SourceCopies, flight: Any, load: Any, staged_at: int, fence: Any) -> None:
        dispatch(self, flight, load, staged_at, NOW)

    with patched(SourceCopies, _submit=at_once):
        yield


@variant(
    "pages are granted before the device is done with them",
    "bytes_right",
    faults={},
    slowness=0.3,
    verified_share=0.0,
)
def early_grant() -> Iterator[None]:
    begin = TargetWriters.begin

    def at_once(self: TargetWriters, receiving: Any, request: Any) -> None:
        begin(self, receiving, replace(request, fence=NOW))

    with patched(TargetWriters, begin=at_once):
        yield


@variant(
    "source staging is used anew while it is read",
    "bytes_right",
    "clean",
    faults={"copies": Copies(0.0, ("late",), 0.1, 5.0)},
    is_packing=True,
    num_requests=4,
    spread_s=0.0,
    verified_share=0.0,
)
def staging_reused() -> Iterator[None]:
    packed = SourceCopies._packed

    def let_go(self: SourceCopies, *args: Any) -> None:
        packed(self, *args)
        flight, _, lease, _ = args
        if lease in flight.leases:
            flight.leases.remove(lease)
            self.pools.staging.give_back(lease)
            self._lease_staging()

    with patched(SourceCopies, _packed=let_go):
        yield


# Declared memory.


@contextmanager
def bound_anew() -> Iterator[None]:
    """What was bound before is forgotten, and so is what is bound now."""
    for kept in (chunks._pair_index, chunks._bound_plan):
        kept.cache_clear()
    try:
        yield
    finally:
        for kept in (chunks._pair_index, chunks._bound_plan):
            kept.cache_clear()


@variant(
    "the offset of a declared placement is ignored",
    "bytes_right",
    "no_late_write",
    "source_pages",
    family=31,
    verified_share=0.0,
)
def ignore_declared_offset() -> Iterator[None]:
    right = PlacedRoute._end

    def at_zero(self: PlacedRoute, *args: Any) -> Any:
        end = right(self, *args)
        return replace(end, layer_offsets=end.layer_offsets - end.at.offset)

    with bound_anew(), patched(PlacedRoute, _end=at_zero):
        yield


@variant(
    "layers that an engine registered in another order are taken to lie in the order of their ids",
    "bytes_right",
    "no_late_write",
    family=31,
    verified_share=0.0,
)
def ignore_layer_offsets() -> Iterator[None]:
    right = PlacedRoute._end

    def in_order(self: PlacedRoute, *args: Any) -> Any:
        end = right(self, *args)
        return replace(end, layer_offsets=np.sort(end.layer_offsets))

    with bound_anew(), patched(PlacedRoute, _end=in_order):
        yield


@variant(
    "where two groups overlay each other, a page of one is written under the other",
    "bytes_right",
    "written_once",
    "no_late_write",
    family=31,
    verified_share=0.0,
)
def write_under_another_group() -> Iterator[None]:
    right = RouteEnd.table

    def of_another(self: RouteEnd, tables: Any, num_pages: int) -> Any:
        groups = sorted(tables[self.rank]) if self.side == "target" else [self.group]
        return right(replace(self, group=groups[0]), tables, num_pages)

    with bound_anew(), patched(RouteEnd, table=of_another):
        yield


# Source pages.


@variant(
    "source pages are free as soon as the engine commits",
    "source_pages",
    "bytes_right",
    "clean",
)
def free_at_commit() -> Iterator[None]:
    reading = Sending.reading

    def until_commit(self: Sending) -> dict[str, frozenset[int]]:
        return {} if self._is_sealed else reading(self)

    with patched(Sending, reading=until_commit):
        yield


@variant("the pages of a chunk are free as soon as its copy begins", "source_pages", "bytes_right")
def let_go_when_a_copy_begins() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        begun = tuple(effect.index for effect in effects if isinstance(effect, at_source_rank.StartCopies))
        return after, (*effects, at_source_rank.ReleaseChunks(begun))

    with around(SOURCE_RANK, wrong, (SourceRankState.COPYING, at_source_rank.ChunkReady)):
        yield


# A source rank says too much.


@variant("a rank commits while it copies", "rank_quiet", slowness=0.3, finish_share=0.0)
def commit_while_copying() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        if after.state is SourceRankState.COMMITTED:
            return after, effects
        commit = Commit(
            transfer=record.transfer,
            grant=record.grant,
            source_rank=record.rank,
            num_chunks=record.num_chunks,
            num_bytes={},
        )
        return replace(after, state=SourceRankState.COMMITTED), (*effects, commit)

    with around(SOURCE_RANK, wrong, (SourceRankState.COPYING, at_source_rank.Sealed)):
        yield


@variant(
    "a rank says quiet while it copies",
    "rank_quiet",
    "final_quiet",
    faults={"aborts": Aborts(0.9, 0.02, False), "copies": Copies(0.0, ("late",), 0.1, 5.0)},
)
def quiet_while_copying() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        quiet = Quiet(transfer=record.transfer, grant=record.grant, source_rank=record.rank)
        return replace(after, state=SourceRankState.ENDED), (*effects, quiet)

    with around(SOURCE_RANK, wrong, (SourceRankState.COPYING, Settled)):
        yield


@variant(
    "a rank copies under a grant that comes after its end",
    "final_quiet",
    "rank_quiet",
    "no_late_write",
    "escape",
    faults={"aborts": Aborts(0.9, 0.005, True)},
    slowness=0.3,
)
def copy_after_the_end() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return SOURCE_RANK.step(replace(record, state=SourceRankState.WAITING), event, now)

    with around(SOURCE_RANK, wrong, (SourceRankState.ENDED, Grant)):
        yield


@variant(
    "a copy that failed unknown is taken for quiet by the rank's driver",
    "no_late_write",
    "final_quiet",
    "bytes_right",
    faults={"copies": Copies(0.2, ("late", "again"), 0.2, 1.0)},
    strength=WEAK,
)
def error_is_quiet() -> Iterator[None]:
    moved = SourceCopies.on_completion

    def trusting(self: SourceCopies, event: Any) -> None:
        known = FailedQuiet(event.ticket, event.cause) if isinstance(event, FailedUnknown) else event
        moved(self, known)

    with patched(SourceCopies, on_completion=trusting):
        yield


@variant(
    "a rank forgets that it cannot vouch for a copy",
    "no_late_write",
    "final_quiet",
    "bytes_right",
    faults={"copies": Copies(0.2, ("late", "again"), 0.2, 1.0)},
    strength=WEAK,
)
def forget_the_doubt() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(event, doubt=""), now)

    states = (SourceRankState.COPYING, SourceRankState.DRAINING)
    with around(SOURCE_RANK, wrong, *((state, at_source_rank.ChunkFailed) for state in states)):
        yield


@variant(
    "a rank forgets an aborted transfer before it has the outcome",
    "agreement",
    "settles",
    "escape",
    "final_quiet",
    "rank_quiet",
    "id-aborted-again",
    scenario="id-aborted-again",
)
def retire_before_the_verdict() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        return replace(after, is_settled=True), (*effects, at_source_rank.Forget())

    with around(SOURCE_RANK, wrong, (SourceRankState.WAITING, at_source_rank.Aborted)):
        yield


# A source rank that withdraws.


@variant(
    "a withdrawal is quiet while its copies are still under way",
    "withdrawals",
    "source_pages",
    "bytes_right",
    faults={},
    withdraw_share=1.0,
)
def quiet_while_withdrawing() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        return after, (*effects, at_source_rank.EndWithdrawal(record.landed))

    states = (SourceRankState.COPYING, SourceRankState.DRAINING)
    with around(SOURCE_RANK, wrong, *((state, at_source_rank.Withdrawn) for state in states)):
        yield


@variant(
    "a rank says that it withdraws without cancelling anything, and its pages are taken for free",
    "withdrawals",
    "source_pages",
    "bytes_right",
    scenario="preempted-copying",
    num_tries=10,
)
def withdraw_nothing() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return record, (at_source_rank.EndWithdrawal(record.landed),)

    with around(SOURCE_RANK, wrong, (SourceRankState.COPYING, at_source_rank.Withdrawn)):
        yield


@variant(
    "a withdrawal claims that a chunk has landed which was dropped",
    "withdrawals",
    faults={},
    withdraw_share=1.0,
)
def claim_dropped_chunks() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        box = record.under_way[event.index].box
        return right(replace(record, landed=(*record.landed, box)), event, now)

    with around(SOURCE_RANK, wrong, (SourceRankState.WITHDRAWING, at_source_rank.ChunkDropped)):
        yield


@variant(
    "a chunk of which some copies were dropped is reported as landed",
    "bytes_right",
    "full_ledger",
    "written_once",
    faults={"copies": Copies(0.0, ("late",), 0.1, 5.0)},
    withdraw_share=1.0,
    verified_share=0.0,
)
def report_dropped_chunks() -> Iterator[None]:
    cancel = SourceCopies._cancel

    def cancel_as_done(self: SourceCopies, chunk: Any) -> None:
        cancel(self, chunk)
        if chunk.is_withdrawn:
            chunk.num_unfinished = 0

    moved = SourceCopies.on_completion

    def count_as_done(self: SourceCopies, event: Any) -> None:
        chunk = self.tickets.get(event.ticket.number)
        if chunk is not None and chunk.is_withdrawn:
            chunk.num_unfinished = 1 if isinstance(event, Done) else 0
        moved(self, event)

    with patched(SourceCopies, _cancel=cancel_as_done, on_completion=count_as_done):
        yield


@variant("what was dropped is not sent again", "clean", faults={}, withdraw_share=1.0)
def forget_dropped_chunks() -> Iterator[None]:
    resume = Sending.resume

    def resume_as_sent(self: Sending) -> None:
        resume(self)
        self._landed = (Rectangle((0, 1 << 20), (0, self.num_tokens)),)

    with patched(Sending, resume=resume_as_sent):
        yield


@variant("what has landed is sent again", "clean", "written_once", faults={}, withdraw_share=1.0)
def send_landed_chunks_again() -> Iterator[None]:
    resume = Sending.resume

    def resume_from_nothing(self: Sending) -> None:
        resume(self)
        self._landed = ()

    with patched(Sending, resume=resume_from_nothing):
        yield


@variant("the manifest counts chunks that were dropped", "clean", faults={}, withdraw_share=1.0)
def count_dropped_chunks() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, num_chunks=record.num_chunks + 1), event, now)

    with around(SOURCE_RANK, wrong, (SourceRankState.WITHDRAWING, at_source_rank.ChunkDropped)):
        yield


@variant(
    "what is sent again takes a new place in the target's staging",
    "clean",
    faults={},
    withdraw_share=1.0,
    is_packing=True,
)
def forget_staging() -> Iterator[None]:
    reserve = SourceCopies._reserve_staging

    def reserve_anew(self: SourceCopies, chunk: Any, load: Any) -> bool:
        chunk.transfer.dropped.clear()
        return reserve(self, chunk, load)

    with patched(SourceCopies, _reserve_staging=reserve_anew):
        yield


@variant(
    "a withdrawn copy that ended in doubt is sent again, and may be overwritten by the old one",
    "withdrawals",
    "bytes_right",
    "written_once",
    scenario="preempted-doubt",
    num_tries=10,
)
def resend_in_doubt() -> Iterator[None]:
    moved = SourceCopies.on_completion

    def trusting(self: SourceCopies, event: Any) -> None:
        chunk = self.tickets.get(event.ticket.number)
        if isinstance(event, FailedUnknown) and chunk is not None and chunk.is_withdrawn:
            event = FailedQuiet(event.ticket, event.cause)
        moved(self, event)

    with patched(SourceCopies, on_completion=trusting):
        yield


@variant(
    "a rank that withdraws says quiet when its transfer has ended, and then sends the rest all the same",
    "final_quiet",
    "rank_quiet",
    "no_late_write",
    scenario="preempted-aborted",
)
def send_after_the_end() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return record, (Quiet(transfer=record.transfer, grant=record.grant, source_rank=record.rank),)

    with around(SOURCE_RANK, wrong, (SourceRankState.WITHDRAWING, Settled)):
        yield


@variant(
    "a rank that has to commit again after a withdrawal keeps its old commit",
    "rank_quiet",
    "clean",
    "escape",
    "settles",
    faults={},
    withdraw_share=1.0,
)
def commit_and_withdraw() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        commit = Commit(
            transfer=record.transfer,
            grant=record.grant,
            source_rank=record.rank,
            num_chunks=len(record.landed),
            num_bytes=dict(record.num_bytes),
        )
        return after, (*effects, commit)

    with around(SOURCE_RANK, wrong, (SourceRankState.DRAINING, at_source_rank.Withdrawn)):
        yield


# A source coordinator.


@variant(
    "a source says quiet when it has asked its ranks to stop",
    "no_late_write",
    "final_quiet",
    "bytes_right",
    faults={"aborts": Aborts(0.9, 0.02, False), "copies": Copies(0.0, ("late",), 0.1, 40.0)},
)
def early_quiet() -> Iterator[None]:
    quiet_if_all = source_coordinator._quiet_if_all

    def at_once(record: Any, effects: Any) -> Any:
        return quiet_if_all(replace(record, quiet=record.quiet | record.joined), effects)

    with patched(source_coordinator, _quiet_if_all=at_once):
        yield


@variant(
    "a source says quiet when its first rank is",
    "no_late_write",
    "final_quiet",
    "bytes_right",
    faults={"aborts": Aborts(0.9, 0.02, False), "copies": Copies(0.0, ("late",), 0.1, 40.0)},
)
def quiet_when_the_first_rank_is() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, joined=frozenset({event.source_rank})), event, now)

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.STOPPING, Quiet)):
        yield


@variant(
    "a source gives its grant to a rank that joins after the stop",
    "final_quiet",
    "no_late_write",
    "rank_quiet",
    "escape",
    scenario="rank-joins-late",
)
def grant_a_late_rank() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        return after, (at_source.ToRank(event.source_rank, record.grant), *effects)

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.STOPPING, Offer)):
        yield


@variant(
    "a source forgets the commit of a rank that it has asked to stop",
    "settles",
    "prompt_failure",
    faults={"copies": Copies(0.2, ("error",), 0.01, 5.0)},
)
def forget_a_late_commit() -> Iterator[None]:
    with around(SOURCE_COORDINATOR, None, (SourceCoordinatorState.STOPPING, Commit)):
        yield


@variant(
    "a source ignores that its target gave up",
    "prompt_failure",
    "settles",
    faults={"aborts": Aborts(0.9, 0.02, False), "copies": Copies(0.0, ("late",), 0.1, 40.0)},
)
def ignore_the_target() -> Iterator[None]:
    with around(SOURCE_COORDINATOR, None, (SourceCoordinatorState.RUNNING, at_source.TargetAborted)):
        yield


@variant(
    "a source that stops does not answer a target that asks for the dp group",
    "prompt_failure",
    "settles",
    "rival-asks-late",
    scenario="rival-asks-late",
)
def leave_an_asker_waiting() -> Iterator[None]:
    with around(SOURCE_COORDINATOR, None, (SourceCoordinatorState.STOPPING, at_source.GroupRequested)):
        yield


@variant(
    "a committed source whose deadline passes does not leave the outcome to its target",
    "verdict-slow",
    scenario="verdict-slow",
)
def give_up_without_asking() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        if not record.deadlines.passed(now):
            return right(record, event, now)
        cause = Cause(Why.DEADLINE, Stage.COMMIT, record.instance)
        return SOURCE_COORDINATOR.step(
            record, Settled(transfer=record.transfer, grant=b"", outcome=Failed(cause)), now
        )

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.COMMITTED, at_source.Ticked)):
        yield


@variant(
    "tombstones are forgotten",
    "final_quiet",
    "no_late_write",
    "quiet-asked-then-grant",
    scenario="quiet-asked-then-grant",
    num_tries=10,
)
def forget_tombstones() -> Iterator[None]:
    with patched(OutboundTransfers, _retire=lambda self, transfer, grant, doubt: None):
        yield


@variant(
    "a doubt is lifted when the source gets the grant again",
    "final_quiet",
    "no_late_write",
    scenario="doubt-stays",
    num_tries=10,
)
def lift_doubt() -> Iterator[None]:
    bury = OutboundTransfers._retire

    def forgetful(self: OutboundTransfers, transfer: str, grant: bytes, doubt: str) -> None:
        self.tombstones.pop(grant, None)
        bury(self, transfer, grant, doubt)

    with patched(OutboundTransfers, _retire=forgetful):
        yield


@variant(
    "a source accepts grants of a channel that is gone",
    "final_quiet",
    scenario="old-channel",
    num_tries=10,
)
def ignore_epoch() -> Iterator[None]:
    fault = OutboundTransfers._fault

    def blind(self: OutboundTransfers, session: Any, grant: Any) -> Any:
        return fault(self, session, msgspec.structs.replace(grant, channel=session.channel))

    with patched(OutboundTransfers, _fault=blind):
        yield


@variant(
    "one rank's failure is ignored by its coordinator",
    "prompt_failure",
    "settles",
    faults={"copies": Copies(0.2, ("error",), 0.01, 1.0)},
)
def ignore_rank_failure() -> Iterator[None]:
    heard = OutboundTransfers.on_rank_message

    def deaf(self: OutboundTransfers, rank: int, message: Any) -> None:
        if not isinstance(message, Abort | Quiet | Unquiet):
            heard(self, rank, message)

    with patched(OutboundTransfers, on_rank_message=deaf):
        yield


# Target pages.


@variant(
    "target pages are free as soon as a transfer fails",
    "no_late_write",
    "bytes_right",
    faults={"aborts": Aborts(0.9, 0.01, False), "copies": Copies(0.0, ("late",), 0.1, 10.0)},
)
def release_on_error() -> Iterator[None]:
    quarantine = target_coordinator._quarantine

    def released(record: Any, outcome: Any, now: float, effects: Any) -> Any:
        after, wanted = quarantine(record, outcome, now, effects)
        return after, (*wanted, at_target.Release())

    with patched(target_coordinator, _quarantine=released):
        yield


@variant(
    "a grant that was sent ahead is taken for one that was not sent",
    "no_late_write",
    "bytes_right",
    "escape",
    scenario="unopened-target-aborts",
)
def take_ahead_for_unsent() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(
            record if record.opened else replace(record, state=TargetCoordinatorState.OPENING), event, now
        )

    events = (Opened, at_target.CallerAborted)
    with around(TARGET_COORDINATOR, wrong, *((TargetCoordinatorState.GRANTED, event) for event in events)):
        yield


@variant(
    "the pages of a lost source's transfers are free at once",
    "no_late_write",
    "bytes_right",
    faults={"crash": Crash(2, 0.3, 1.0), "copies": Copies(0.0, ("late",), 0.1, 40.0)},
    faults_s=0.1,
    strength=WEAK,
)
def no_quarantine() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(replace(record, closing=replace(record.closing, is_quiet=True)), event, now)

    with around(TARGET_COORDINATOR, wrong, (TargetCoordinatorState.GRANTED, at_target.SessionLost)):
        yield


@variant(
    "a rank says that writers are quiet without asking its transport",
    "no_late_write",
    "bytes_right",
    faults={"copies": Copies(0.3, ("late", "hang", "again"), 0.3, 1.0)},
    strength=WEAK,
)
def trust_transport() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(event, is_quiet=True), now)

    with around(TARGET_RANK, wrong, (TargetRankState.CLOSING, Closed)):
        yield


@variant(
    "a rank closes a grant while it still unpacks",
    "escape",
    "pages",
    scenario="abort-unpacking",
)
def close_while_unpacking() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, _ = right(record, event, now)
        return after, (RevokePermissions(event.must_prove_quiet),)

    with around(TARGET_RANK, wrong, (TargetRankState.OPEN, Close)):
        yield


@variant(
    "a rank whose opening failed says that the writers of a grant sent ahead are quiet",
    "no_late_write",
    "bytes_right",
    scenario="unopened-late",
)
def quiet_unopened() -> Iterator[None]:
    expect = TargetWriters._expect

    def expect_nobody(self: TargetWriters, grant: Any) -> Any:
        expected = expect(self, grant)
        if "agree" in vars(self):  # the opening is going to fail
            expected.leases.clear()
        return expected

    with patched(TargetWriters, _expect=expect_nobody):
        yield


# Queues.


@variant(
    "the time in the queue of an engine counts as time without progress", "queue_waits", scenario="overload"
)
def count_time_in_queues() -> Iterator[None]:
    with patched(Deadlines, queued=lambda self, now: self):
        yield


@variant(
    "the same in random seeds",
    "queue_waits",
    "clean",
    num_requests=12,
    slowness=60.0,
    withdraw_share=0.0,
    faults={"pressure": Pressure(source_share=0.8, target_share=0.8)},
)
def count_time_in_any_queue() -> Iterator[None]:
    with patched(Deadlines, queued=lambda self, now: self):
        yield


@variant(
    "a source takes no notice of a target whose queue moves",
    "queue_waits",
    scenario="overload-of-the-target",
)
def ignore_full_targets() -> Iterator[None]:
    with around(SOURCE_COORDINATOR, None, (SourceCoordinatorState.OPEN, at_source.TargetQueued)):
        yield


@variant(
    "a target takes no notice of a source whose queue moves",
    "queue_waits",
    scenario="overload-of-the-source",
)
def ignore_full_sources() -> Iterator[None]:
    with around(TARGET_COORDINATOR, None, (TargetCoordinatorState.GRANTED, Queued)):
        yield


@variant(
    "a queue that does not move never ends",
    "overload-that-is-stuck",
    "settles",
    scenario="overload-that-is-stuck",
    num_tries=2,
)
def wait_for_ever() -> Iterator[None]:
    with patched(Deadlines, passed=lambda self, now: ""):
        yield


# Instances and messages.


@variant(
    "an instance goes on without a rank",
    "ends_together",
    "settles",
    faults={"crash": Crash(2, 0.01, 0.0)},
)
def ignore_lost_rank() -> Iterator[None]:
    with around(INSTANCE, lambda right, record, event, now: (record, ()), (InstanceState.SERVING, RankLost)):
        yield


@variant(
    "a target takes messages under an old grant for messages under the new one",
    "bytes_right",
    "full_ledger",
    "written_once",
    "all_committed",
    "id-reused",
    scenario="id-reused",
    num_tries=10,
)
def ignore_grant_id() -> Iterator[None]:
    received = InboundTransfers.on_message

    def by_transfer(self: InboundTransfers, session: Any, message: Any) -> None:
        coming = self.transfers.get(getattr(message, "transfer", ""))
        grant = getattr(message, "grant", None)
        if coming is not None and coming.record.grant is not None and grant:
            self.grants[grant] = coming
        received(self, session, message)

    with patched(InboundTransfers, on_message=by_transfer):
        yield


@variant("only rank 0 is told the outcome", "settles", faults={}, num_tries=20)
def tell_only_rank_0() -> Iterator[None]:
    to_rank = CoordinatorDriver.to_rank

    def to_some(self: CoordinatorDriver, rank: int, message: Any) -> None:
        if not isinstance(message, Settled) or rank == 0:
            to_rank(self, rank, message)

    with patched(CoordinatorDriver, to_rank=to_some):
        yield


@variant(
    "a target that fails because its source aborted after the commit does not say so",
    "committed-source-aborts",
    scenario="committed-source-aborts",
)
def tell_a_committed_source_nothing() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        after, effects = right(record, event, now)
        return after, tuple(effect for effect in effects if not isinstance(effect, at_target.ToSource))

    with around(TARGET_COORDINATOR, wrong, (TargetCoordinatorState.GRANTED, at_target.SourceAborted)):
        yield


@variant(
    "the progress deadline runs from the start",
    "patience",
    "clean",
    faults={},
    slowness=180.0,
    num_requests=2,
    withdraw_share=0.0,
)
def timer_from_start() -> Iterator[None]:
    def passed(self: Deadlines, now: float) -> str:
        patience_s = self._patience_s
        return f"no progress for {patience_s:g} s" if now - self.began >= patience_s else ""

    with patched(Deadlines, passed=passed):
        yield


@variant(
    "a target does not keep to the progress deadline that its source names",
    "patience",
    "slow-step",
    scenario="slow-step",
)
def ignore_the_sources_deadline() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(event, progress_s=0.0), now)

    states = (
        TargetCoordinatorState.PREPARING,
        TargetCoordinatorState.OPENING,
        TargetCoordinatorState.GRANTED,
    )
    with around(TARGET_COORDINATOR, wrong, *((state, Offer) for state in states)):
        yield


@variant(
    "a source does not keep to the progress deadline that its target names",
    "patience",
    "slow-step",
    scenario="slow-step",
)
def ignore_the_targets_deadline() -> Iterator[None]:
    def wrong(right: Any, record: Any, event: Any, now: float) -> Step:
        return right(record, replace(event, progress_s=0.0), now)

    with around(SOURCE_COORDINATOR, wrong, (SourceCoordinatorState.OPEN, Grant)):
        yield


@variant(
    "a rank learns another epoch from another coordinator",
    "one_incarnation",
    scenario="rank-outlives",
    num_tries=5,
)
def learn_again() -> Iterator[None]:
    with patched(Host, introduce_as=lambda self, introduction: None):
        yield


@variant(
    "a coordinator takes a rank of an earlier incarnation",
    "one_incarnation",
    scenario="rank-outlives",
    num_tries=5,
)
def take_any_epoch() -> Iterator[None]:
    attach = CoordinatorDriver._attach

    def attach_any(self: CoordinatorDriver, link: int, peer: Any) -> None:
        attach(self, link, msgspec.structs.replace(peer, epoch=self.config.epoch))

    with patched(CoordinatorDriver, _attach=attach_any):
        yield
