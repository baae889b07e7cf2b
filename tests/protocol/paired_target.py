"""A target of a paired run: ranks and their coordinator, with the little of a driver that they need."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from tests.protocol.paired_setup import DIGEST, TRANSFER, BrokenError
from tests.protocol.paired_wire import Link, Memory
from tests.protocol.values import TIMINGS

from baton.protocol import arrival as at_target
from baton.protocol import landing as at_rank
from baton.protocol.arrival import (
    Arrival,
    CloseRanks,
    Conclude,
    OpenRanks,
    ReceiverState,
    Release,
    SendGrant,
    TellAux,
    ToSource,
    UnpackAt,
)
from baton.protocol.deadlines import Deadlines
from baton.protocol.landing import FreeStaging, Landing, LandingState, StartUnpack, TakeBack, Tell
from baton.protocol.ledger import Rectangle
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Close,
    Closed,
    Commit,
    Grant,
    Inquiry,
    Landed,
    Lane,
    Message,
    Offer,
    Open,
    Opened,
    Quiet,
    SettledAsked,
    Unpack,
    Unpacked,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Outcome, Ready, Stage, Why
from baton.protocol.sender import Chunk

if TYPE_CHECKING:
    from tests.protocol.paired_world import World


class TargetRank:
    """One target rank: its machine, its unpacks and what it takes back."""

    def __init__(self, side: TargetSide, rank: int) -> None:
        self.side = side
        self.rank = rank
        self.record: Landing | None = None
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.jobs: list[Landed] = []
        self.take_backs: deque[bool] = deque()
        """Those under way, each with whether stillness has to be proved."""
        self.num_freed = 0
        self.has_opened = False

    def hear(self) -> None:
        """The next word of the coordinator."""
        world = self.side.world
        match self.inbox.popleft():
            case Open(grant=grant):
                cause = None
                # Also where it fails: the source may have been let in ahead of it.
                self.record = Landing(grant.grant, self.rank)
                if world.setup.faults.opens_fail and world.choices.one_in(3):
                    cause = Cause(Why.OUT_OF_PAGES, Stage.GRANT, "decode", self.rank, "no staging")
                    if not self.side.conclusions:
                        world.initiatives.append("open")
                self.has_opened = cause is None
                lanes = tuple(lane for lane in grant.lanes if lane.target_rank == self.rank)
                self.outbox.append(Opened(grant=grant.grant, rank=self.rank, lanes=lanes, cause=cause))
            case Unpack(landed=landed):
                if self.record is not None:
                    self.feed(at_rank.UnpackAsked(landed))
            case Close(grant=number, must_still=must_still):
                if self.record is None:
                    self.outbox.append(Closed(grant=number, rank=self.rank, is_still=True))
                else:
                    self.feed(at_rank.CloseAsked(must_still))

    def feed(self, event: object) -> None:
        world = self.side.world
        self.record, effects = world.machines.landing.step(self.record, event, world.now)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: object) -> None:
        match effect:
            case StartUnpack(landed):
                self.jobs.append(landed)
            case TakeBack(must_still):
                if self.jobs:
                    raise BrokenError(f"target rank {self.rank} takes permissions back while it unpacks")
                self.take_backs.append(must_still)
            case Tell(message):
                self.outbox.append(message)
            case FreeStaging():
                self.num_freed += 1
                self.side.check_still(self.rank, "its staging was freed")

    def end_job(self, index: int, is_good: bool) -> None:
        """An unpack is done, or found the chunk wrong."""
        landed = self.jobs.pop(index)
        cause = None
        if is_good:
            chunk = Chunk(landed.chunk, Rectangle(landed.layers, landed.tokens))
            self.side.memory.unpack(self.rank, landed.source_rank, chunk)
        else:
            cause = Cause(Why.CORRUPTED, Stage.COPY, "decode", self.rank, "checksum")
            self.side.world.initiatives.append("unpack")
        self.feed(at_rank.JobEnded(landed.source_rank, landed.chunk, cause))

    def take_back(self, is_still: bool) -> None:
        """The transport took the permissions back; it is still only if it turned the source out."""
        must_still = self.take_backs.popleft()
        if must_still and is_still:
            self.side.memory.barred.add(self.rank)
        self.feed(at_rank.TakenBack(is_still))


class TargetSide:
    """A target's coordinator, with the memory that it grants."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.link = Link(number, world.setup.faults)
        self.memory = Memory(world.setup, bytes([0x10 + number]) * 16)
        self.ranks = {rank: TargetRank(self, rank) for rank in range(world.setup.num_targets)}
        self.record: Arrival | None = None
        self.has_offer = world.setup.knows_group
        self.has_prepared = False
        self.conclusions: list[Outcome] = []
        self.num_releases = 0

    # Calls of its engine.

    def begin(self) -> None:
        """The engine asks for the transfer."""
        setup, now = self.world.setup, self.world.now
        deadlines = Deadlines(TIMINGS, began=now, moved=now)
        ranks = frozenset(self.ranks)
        self.record = Arrival(TRANSFER, "decode", ranks, setup.num_tokens, setup.digest, deadlines)
        if not setup.knows_group:
            self._say(Inquiry(transfer=TRANSFER))

    def prepare(self) -> None:
        """Session, paths and pages are there."""
        self.has_prepared = True
        setup = self.world.setup
        grant = Grant(
            transfer=TRANSFER,
            grant=self.memory.grant,
            channel=self.link.channel,
            num_tokens=setup.num_tokens,
            digest=setup.digest,
            source_dp=0,
            target_dp=0,
            held={},
            offset=0,
            tables={},
            lanes=tuple(Lane(source, target, 1) for source, target in sorted(setup.needs)),
        )
        self.feed(at_target.Prepared(grant, setup.terms(), setup.ledger(), setup.is_ahead))

    def abort(self) -> None:
        """The engine gives up."""
        if not self.conclusions:
            self.world.initiatives.append("target abort")
        self.feed(at_target.CallerAborted(Cause(Why.ABORTED, Stage.COPY, "decode", -1, "client gone")))

    # Words of the source.

    def receive(self, message: Message) -> None:
        """The source said something."""
        if self.record is None:
            return
        match message:
            case Offer():
                self.has_offer = True
                self.feed(at_target.Offered(message.num_tokens, message.digest))
            case Abort(grant=b"", cause=cause):
                self.feed(at_target.SourceAborted(cause))
            case _ if self.record.grant is None:
                pass
            case Abort(cause=cause):
                self.feed(at_target.SourceAborted(cause))
            case Landed():
                self.feed(at_target.ChunkLanded(message))
            case Commit():
                self.feed(at_target.SourceCommitted(message))
            case AuxRecord(aux=aux, is_final=is_final):
                self.feed(at_target.AuxArrived(aux, is_final))
            case Quiet():
                self.feed(at_target.SourceQuiet())
            case Unquiet(text=text):
                self.feed(at_target.SourceUnquiet(text))
            case SettledAsked():
                self.feed(at_target.VerdictAsked())

    # Words of its ranks.

    def hear(self, rank: int) -> None:
        """The next word of a rank."""
        match self.ranks[rank].outbox.popleft():
            case Opened(cause=None, lanes=lanes):
                self.feed(at_target.RankOpened(rank, lanes))
            case Opened(cause=cause):
                self.feed(at_target.RankFailed(rank, cause))
            case Unpacked(cause=None, source_rank=source, chunk=chunk):
                self.feed(at_target.ChunkUnpacked(rank, source, chunk))
            case Unpacked(cause=cause):
                self.feed(at_target.RankFailed(rank, cause))
            case Closed(is_still=is_still):
                self.feed(at_target.RankClosed(rank, is_still))

    # Machine and effects.

    def lost(self) -> None:
        """The session is gone."""
        if self.record is not None:
            self.feed(at_target.SessionLost(Cause(Why.PEER_LOST, Stage.COPY, "prefill")))

    def tick(self) -> None:
        """Time passed."""
        if self.record is not None:
            self.feed(at_target.Ticked())

    def feed(self, event: object) -> None:
        before = self.record
        self.record, effects = self.world.machines.receiver.step(before, event, self.world.now)
        if isinstance(event, at_target.Ticked) and self.record.outcome is not before.outcome:
            self.world.initiatives.append("deadline")
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: object) -> None:
        match effect:
            case OpenRanks(grant):
                for rank in self.ranks.values():
                    rank.inbox.append(Open(grant=grant))
            case SendGrant(grant):
                self._say(grant)
            case ToSource(message):
                self._say(message)
            case TellAux():
                pass  # a word for the engine alone
            case UnpackAt(rank, landed):
                self.ranks[rank].inbox.append(Unpack(grant=self.memory.grant, landed=landed))
            case CloseRanks(ranks, must_still):
                for rank in ranks:
                    self.ranks[rank].inbox.append(Close(grant=self.memory.grant, must_still=must_still))
            case Conclude(outcome):
                self.conclusions.append(outcome)
                if not isinstance(outcome, Failed) and self.world.setup.digest != DIGEST:
                    raise BrokenError(f"the answer to another prompt: {outcome}")
                if isinstance(outcome, Ready):
                    self._check_ready()
            case Release():
                self.num_releases += 1
                for rank in self.ranks:
                    self.check_still(rank, "the pages were released")
                self.memory.is_released = True

    def _say(self, message: Message) -> None:
        self.link.put(self.link.to_source, message)

    def _check_ready(self) -> None:
        self.memory.check_complete()
        world = self.world
        for rank in world.source.ranks.values():
            if rank.last.last_word != "Commit":
                raise BrokenError(f"ready, but source rank {rank.rank} has not committed")
            if rank.last.ready != set(rank.last.let_go):
                raise BrokenError(f"ready, but not every chunk of source rank {rank.rank} landed")
        for one in self.ranks.values():
            if not one.has_opened:
                raise BrokenError(f"ready, but target rank {one.rank} has not opened")
        if self.conclusions[-1] != world.ready:
            raise BrokenError("ready with another aux record")

    def check_still(self, rank: int, what: str) -> None:
        """Nobody can write at a rank any more: no copy, nothing that was left of one, and no unpack."""
        world, memory = self.world, self.memory
        if self.ranks[rank].jobs:
            raise BrokenError(f"{what} while rank {rank} unpacks")
        if rank in memory.barred:
            return
        flying = [flight for one in world.source.ranks.values() for flight in one.flights()]
        for flight in [*flying, *world.strays]:
            if flight.grant == memory.grant and flight.reaches(world.setup, rank):
                raise BrokenError(f"{what} while source rank {flight.source} may write at rank {rank}")

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left."""
        if self.record is None:
            return True
        landings = [rank.record for rank in self.ranks.values() if rank.record is not None]
        is_closed = all(one.state is LandingState.CLOSED for one in landings)
        return self.record.state is ReceiverState.RELEASED and is_closed
