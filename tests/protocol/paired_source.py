"""The source of a paired run: ranks and their coordinator, with the little of a driver that they need."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from tests.protocol.paired_setup import TRANSFER, BrokenError
from tests.protocol.paired_wire import Flight, Link
from tests.protocol.values import TIMINGS

from baton.protocol import departure as at_source
from baton.protocol import sender as at_rank
from baton.protocol.deadlines import Deadlines
from baton.protocol.departure import Bury, Departure, Forget, Prefill, ToRank, ToSession, ToTarget, refusals
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
from baton.protocol.outcomes import Cause, Failed, Outcome, Stage, Why
from baton.protocol.sender import CancelCopies, Conclude, LetGo, Retire, Sender, Submit, Tell

if TYPE_CHECKING:
    from tests.protocol.paired_world import World

LIVE = Cause(Why.REFUSED_LIVE_ID, Stage.GRANT, "prefill", -1, "ended a moment ago")
OVER = Cause(Why.ABORTED, Stage.GRANT, "prefill", -1, "the grant is over")


@dataclass
class Attempt:
    """One transfer of a rank's engine, and what came of it."""

    record: Sender
    flights: dict[int, Flight] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    let_go: Counter[int] = field(default_factory=Counter)
    conclusions: list[Outcome] = field(default_factory=list)
    num_retired: int = 0
    last_word: str = ""


class SourceRank:
    """One source rank: its engine's script, its machine, and its copies."""

    def __init__(self, world: World, rank: int, script: tuple[object, ...]) -> None:
        self.world = world
        self.rank = rank
        self.script = deque(script)
        self.attempts: list[Attempt] = []
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    def flights(self) -> list[Flight]:
        """Every chunk whose copies are under way."""
        return list(self.last.flights.values()) if self.attempts else []

    def call(self) -> None:
        """The engine makes its next call; it may not have heard yet that all is over."""
        event = self.script.popleft()
        if isinstance(event, Prefill):
            self._begin(event)
            return
        one = self.last
        if isinstance(event, at_rank.ChunkReady):
            one.ready.add(event.chunk.index)
        if isinstance(event, at_rank.Aborted | at_rank.AnswerEnded) and not one.conclusions:
            self.world.initiatives.append(type(event).__name__)
        self.feed(event)

    def _begin(self, prefill: Prefill) -> None:
        if self.attempts and not self.last.num_retired:
            self.script.clear()  # the id is live here: refused
            return
        self.attempts.append(Attempt(Sender(TRANSFER, self.rank)))
        offer = Offer(
            transfer=TRANSFER,
            num_tokens=prefill.num_tokens,
            digest=prefill.digest,
            source_dp=prefill.source_dp,
        )
        self.outbox.append(offer)

    def hear(self) -> None:
        """The next word of the coordinator."""
        match self.inbox.popleft():
            case Grant() as grant:
                self.feed(at_rank.Granted(grant))
            case Settled(outcome=outcome):
                self.feed(at_rank.VerdictHeard(outcome))

    def feed(self, event: object) -> None:
        one = self.last
        one.record, effects = self.world.machines.sender.step(one.record, event, self.world.now)
        for effect in effects:
            self._perform(one, effect)

    def _perform(self, one: Attempt, effect: object) -> None:
        match effect:
            case Submit(chunk):
                if one.last_word:
                    raise BrokenError(f"rank {self.rank} began a copy after it said {one.last_word}")
                one.flights[chunk.index] = Flight(self.rank, chunk, one.record.grant)
            case CancelCopies():
                for flight in one.flights.values():
                    flight.is_off = True
            case LetGo(indices):
                for index in indices:
                    if index in one.flights:
                        raise BrokenError(f"rank {self.rank} let chunk {index} go while a copy reads it")
                    one.let_go[index] += 1
            case Tell(message):
                if isinstance(message, Quiet | Unquiet | Commit):
                    one.last_word = type(message).__name__
                    self._check_still(one, message)
                self.outbox.append(message)
            case Conclude(outcome):
                one.conclusions.append(outcome)
            case Retire():
                one.num_retired += 1

    def _check_still(self, one: Attempt, message: Message) -> None:
        if one.flights:
            raise BrokenError(f"rank {self.rank} said {type(message).__name__} with copies under way")
        strays = [stray for stray in self.world.strays if stray.grant == message.grant]
        if not isinstance(message, Unquiet) and any(stray.source == self.rank for stray in strays):
            raise BrokenError(f"rank {self.rank} vouched for bytes that may still move")

    def end_flight(self, index: int, how: str) -> None:
        """A chunk's copies are terminal: `done`, `failed`, or failed with a `doubt`."""
        flight = self.last.flights.pop(index)
        world, setup = self.world, self.world.setup
        memory = world.memory_of(flight.grant)
        reached = [target for target in setup.targets(self.rank) if flight.reaches(setup, target)]
        if how == "done" and not any(target in memory.barred for target in reached):
            memory.land(flight)
            box = flight.chunk.box
            counts = {target: {"k": len(setup.cells((self.rank, target), box))} for target in reached}
            staged = {target: index for target in reached if (self.rank, target) in setup.worked}
            self.feed(at_rank.ChunkCopied(index, counts, staged))
            return
        if not flight.is_off and not self.last.conclusions:
            world.initiatives.append("copy")
        if how == "doubt":
            world.strays.append(flight)
        cause = Cause(Why.COPY_FAILED, Stage.COPY, "prefill", self.rank, f"chunk {index}")
        self.feed(at_rank.ChunkFailed(index, cause, "bytes may be under way" if how == "doubt" else ""))

    def check_over(self) -> None:
        """Each attempt was concluded and retired once, and each of its chunks let go once."""
        for one in self.attempts:
            if (len(one.conclusions), one.num_retired) != (1, 1):
                told = f"{len(one.conclusions)} conclusions, retired {one.num_retired} times"
                raise BrokenError(f"source rank {self.rank}: {told}")
            if dict(one.let_go) != dict.fromkeys(one.ready, 1):
                raise BrokenError(f"rank {self.rank}: ready {one.ready}, let go {dict(one.let_go)}")


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
            if any(flight.grant == message.grant for flight in rank.flights()):
                raise BrokenError(f"the source said {type(message).__name__} while rank {rank.rank} copies")
        memory = self.world.memory_of(message.grant)
        if isinstance(message, Quiet) and self.world.live_strays(memory):
            raise BrokenError("the source said Quiet, and bytes may still move")
