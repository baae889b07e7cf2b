"""The source of a paired run: ranks and their coordinator, with the little of a driver that they need."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec
from tests.protocol.paired_setup import TRANSFER, BrokenError
from tests.protocol.paired_wire import Flight, Link
from tests.protocol.values import TIMINGS

from baton.protocol import departure as at_source
from baton.protocol import sender as at_rank
from baton.protocol.deadlines import Deadlines
from baton.protocol.departure import Bury, Departure, Forget, Prefill, ToRank, ToSession, ToTarget
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Commit,
    Grant,
    Inquiry,
    Landed,
    Message,
    Offer,
    Quiet,
    QuietAsked,
    Settled,
    Unquiet,
)
from baton.protocol.offer import refusals
from baton.protocol.outcomes import Cause, Failed, Outcome, Stage, Why
from baton.protocol.sender import CancelCopies, Conclude, LetGo, Retire, Sender, Submit, Tell

if TYPE_CHECKING:
    from tests.protocol.paired_world import World

LIVE = Cause(Why.REFUSED_LIVE_ID, Stage.GRANT, "prefill", -1, "ended a moment ago")
OVER = Cause(Why.ABORTED, Stage.GRANT, "prefill", -1, "the grant is over")


class SourceRank:
    """One source rank: its engine's script, its machine, and its copies."""

    def __init__(self, world: World, rank: int, script: tuple[object, ...]) -> None:
        self.world = world
        self.rank = rank
        self.script = deque(script)
        self.record: Sender | None = None
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.flights: dict[int, Flight] = {}
        self.ready: set[int] = set()
        self.let_go: Counter[int] = Counter()
        self.conclusions: list[Outcome] = []
        self.num_retired = 0
        self.last_word = ""

    def call(self) -> None:
        """The engine makes its next call; it may not have heard yet that all is over."""
        event = self.script.popleft()
        if isinstance(event, Prefill):
            self.record = Sender(TRANSFER, self.rank)
            self.outbox.append(
                Offer(
                    transfer=TRANSFER,
                    num_tokens=event.num_tokens,
                    digest=event.digest,
                    source_dp=event.source_dp,
                    rank=self.rank,
                )
            )
            return
        if isinstance(event, at_rank.ChunkReady):
            self.ready.add(event.chunk.index)
        if isinstance(event, at_rank.Aborted | at_rank.AnswerEnded) and not self.conclusions:
            self.world.initiatives.append(type(event).__name__)
        if isinstance(event, at_rank.AnswerEnded) and self.record.state is at_rank.SenderState.COMMITTED:
            return
        self.feed(event)

    def hear(self) -> None:
        """The next word of the coordinator."""
        match self.inbox.popleft():
            case Grant() as grant:
                self.feed(at_rank.Granted(grant))
            case Settled(outcome=outcome):
                self.feed(at_rank.VerdictHeard(outcome))

    def feed(self, event: object) -> None:
        assert self.record is not None
        self.record, effects = self.world.machines.sender.step(self.record, event, self.world.now)
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: object) -> None:
        match effect:
            case Submit(chunk):
                if self.last_word:
                    raise BrokenError(f"rank {self.rank} began a copy after it said {self.last_word}")
                self.flights[chunk.index] = Flight(self.rank, chunk, self.record.grant)
            case CancelCopies():
                for flight in self.flights.values():
                    flight.is_off = True
            case LetGo(indices):
                for index in indices:
                    if index in self.flights:
                        raise BrokenError(f"rank {self.rank} let chunk {index} go while a copy reads it")
                    self.let_go[index] += 1
            case Tell(message):
                if isinstance(message, Quiet | Unquiet | Commit):
                    self.last_word = type(message).__name__
                    self._check_still(message)
                self.outbox.append(message)
            case Conclude(outcome):
                self.conclusions.append(outcome)
            case Retire():
                self.num_retired += 1

    def _check_still(self, message: Message) -> None:
        if self.flights:
            raise BrokenError(f"rank {self.rank} said {type(message).__name__} with copies under way")
        if not isinstance(message, Unquiet) and any(one.source == self.rank for one in self.world.strays):
            raise BrokenError(f"rank {self.rank} vouched for bytes that may still move")

    def end_flight(self, index: int, how: str) -> None:
        """A chunk's copies are terminal: `done`, `failed`, or failed with a `doubt`."""
        flight = self.flights.pop(index)
        world, setup = self.world, self.world.setup
        memory = world.memory_of(flight.grant)
        reached = [target for target in setup.targets(self.rank) if flight.reaches(setup, target)]
        cause = Cause(Why.COPY_FAILED, Stage.COPY, "prefill", self.rank, f"chunk {index}")
        if how == "done" and not any(target in memory.barred for target in reached):
            memory.land(flight)
            counts = {
                target: {"k": len(setup.cells((self.rank, target), flight.chunk.box))} for target in reached
            }
            staged = {target: index for target in reached if (self.rank, target) in setup.worked}
            self.feed(at_rank.ChunkCopied(index, counts, staged))
            return
        if not flight.is_off and not self.conclusions:
            world.initiatives.append("copy")
        if how == "doubt":
            world.strays.append(flight)
        self.feed(at_rank.ChunkFailed(index, cause, "bytes may be under way" if how == "doubt" else ""))


class SourceSide:
    """The source's coordinator."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = {rank: SourceRank(world, rank, script) for rank, script in world.setup.scripts.items()}
        self.record: Departure | None = None
        self.session = -1
        self.graves: dict[bytes, str] = {}
        self.recent: Outcome | None = None
        self.taken = b""
        """The grant that was taken, if any was."""

    # Words of its ranks.

    def hear(self, rank: int) -> None:
        """The next word of a rank."""
        message = self.ranks[rank].outbox.popleft()
        match message:
            case Offer():
                self._offered(rank, message)
            case Landed():
                self._feed_live(at_source.RankLanded(message))
            case Commit():
                self._feed_live(at_source.RankCommitted(message))
            case AuxRecord():
                self._feed_live(at_source.AuxGiven(message))
            case Abort():
                self._feed_live(at_source.RankFailed(rank, message.cause))
            case Quiet():
                self._feed_live(at_source.RankQuiet(rank))
            case Unquiet():
                self._feed_live(at_source.RankQuiet(rank, message.text))

    def _offered(self, rank: int, message: Offer) -> None:
        if self.record is None and self.recent is not None:
            settled = Settled(transfer=TRANSFER, grant=b"", outcome=self.recent)
            self.ranks[rank].inbox.append(settled)
            return
        prefill = Prefill(message.num_tokens, message.digest, message.source_dp)
        self.feed(at_source.RankOffered(rank, prefill, frozenset(self.ranks)))

    # Words of targets.

    def receive(self, link: Link, message: Message) -> None:
        """A target said something."""
        match message:
            case Inquiry() if self.record is None and self.recent is not None:
                self._say(link.number, Abort(transfer=TRANSFER, grant=b"", cause=self._past()))
            case Inquiry():
                self.feed(at_source.Inquired(link.number))
            case Grant():
                self._granted(link, message)
            case QuietAsked(grants=grants):
                for grant in grants:
                    self._answer_quiet(link, grant)
            case Settled():
                if self._is_under(message.grant):
                    self.feed(at_source.TargetSettled(message.outcome))
            case Abort():
                self._aborted(link, message)

    def _granted(self, link: Link, grant: Grant) -> None:
        if grant.channel != link.channel or grant.grant in self.graves:
            self._refuse(link, grant.grant, OVER)
        elif self.record is None and self.recent is not None:
            self._refuse(link, grant.grant, self._past())
        elif self.session not in (-1, link.number):
            for effect in refusals(self.record, grant):
                self._perform(effect, link.number)
        else:
            self.session = link.number
            stamped = msgspec.structs.replace(grant, session=link.number)
            self.feed(at_source.GrantArrived(stamped, frozenset(self.ranks)))

    def _refuse(self, link: Link, grant: bytes, cause: Cause) -> None:
        self.graves.setdefault(grant, "")
        self._say(link.number, Abort(transfer=TRANSFER, grant=grant, cause=cause))
        self._answer_quiet(link, grant)

    def _answer_quiet(self, link: Link, grant: bytes) -> None:
        if self._is_under(grant):
            return
        doubt = self.graves.setdefault(grant, "")
        word: Message = Quiet(transfer=TRANSFER, grant=grant)
        if doubt:
            word = Unquiet(transfer=TRANSFER, grant=grant, text=doubt)
        self._say(link.number, word)

    def _aborted(self, link: Link, message: Abort) -> None:
        event = at_source.TargetAborted(message.cause)
        if self.record is not None and self.record.grant is not None:
            if self._is_under(message.grant):
                self.feed(event)
            return
        if message.grant:
            self.graves.setdefault(message.grant, "")
            self._answer_quiet(link, message.grant)
        if self.record is not None or self.recent is None:
            self.feed(event)

    def _past(self) -> Cause:
        return self.recent.cause if isinstance(self.recent, Failed) else LIVE

    def _is_under(self, grant: bytes) -> bool:
        return self.record is not None and self.record.grant is not None and self.record.grant.grant == grant

    # Machine and effects.

    def lost(self, link: Link) -> None:
        """A session is gone."""
        if self.record is not None and self.session == link.number:
            self.feed(at_source.SessionLost(Cause(Why.PEER_LOST, Stage.COPY, "decode")))

    def tick(self) -> None:
        """Time passed."""
        self._feed_live(at_source.Ticked())

    def _feed_live(self, event: object) -> None:
        if self.record is not None:
            self.feed(event)

    def feed(self, event: object) -> None:
        world = self.world
        if self.record is None:
            deadlines = Deadlines(TIMINGS, began=world.now, moved=world.now)
            self.record = Departure(TRANSFER, "prefill", deadlines)
        before = self.record
        self.record, effects = world.machines.offer.step(before, event, world.now)
        if isinstance(event, at_source.Ticked) and self.record.outcome is not before.outcome:
            world.initiatives.append("deadline")
        if self.record.grant is not None:
            self.taken = self.record.grant.grant
        for effect in effects:
            self._perform(effect, self.session)

    def _perform(self, effect: object, session: int) -> None:
        match effect:
            case ToRank(rank, message):
                self.ranks[rank].inbox.append(message)
            case ToTarget(message):
                self._say(session, message)
            case ToSession(number, message):
                self._say(number, message)
            case Bury(grant, doubt):
                if grant in self.graves:
                    raise BrokenError(f"grant {grant.hex()[:4]} was buried twice")
                self.graves[grant] = doubt
            case Forget():
                assert self.record is not None
                self.recent, self.record = self.record.outcome, None

    def _say(self, session: int, message: Message) -> None:
        if isinstance(message, Quiet | Unquiet):
            self._check_quiet(message)
        link = self.world.link_of(session)
        if link is not None:
            link.put(link.to_target, message)

    def _check_quiet(self, message: Quiet | Unquiet) -> None:
        for rank in self.ranks.values():
            if any(flight.grant == message.grant for flight in rank.flights.values()):
                raise BrokenError(f"the source said {type(message).__name__} while rank {rank.rank} copies")
        memory = self.world.memory_of(message.grant)
        if isinstance(message, Quiet) and self.world.live_strays(memory):
            raise BrokenError("the source said Quiet, and bytes may still move")
