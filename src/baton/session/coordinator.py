"""An instance's driver: its ranks on one side, other instances on the other.

All control of an instance goes through here, so that a verdict is one and everybody hears the same. What it
says to a rank and to a peer is decided by machines; this file connects them with links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.errors import BatonError, ProtocolError
from baton.plan import PackCost, Spec, plan
from baton.plan.wire import spec_from_bytes, spec_to_bytes
from baton.protocol.coordinator import (
    COORDINATOR,
    CoordinatorState,
    DrainAsked,
    EndAll,
    EndAsked,
    Instance,
    RankAttached,
    RankLost,
    RefuseRank,
    Serve,
    StopGranting,
    WorkCounted,
)
from baton.protocol.messages import (
    Abort,
    AnyMessage,
    AuxRecord,
    Beat,
    Commit,
    Goodbye,
    Introduction,
    Landed,
    Meet,
    Offer,
    Part,
    Quiet,
    Refused,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.timings import Timings
from baton.session.arrivals import Arrivals
from baton.session.departures import Departures
from baton.session.holding import num_active, num_live, quarantined, stuck_share
from baton.session.ports import Ports
from baton.session.sessions import Session, Sessions

log = logging.getLogger(__name__)

Call: TypeAlias = Callable[[Session, AnyMessage], None]
FROM_SOURCE = (Offer, Landed, Commit, AuxRecord, Quiet, Unquiet)


@dataclass(frozen=True, slots=True)
class InstanceConfig:
    """What an instance is."""

    instance: str
    epoch: int
    spec: Spec
    transport: str
    fingerprint: str = ""
    timings: Timings = field(default_factory=Timings)
    cost: PackCost = field(default_factory=PackCost)
    """When its transfers are packed; a target without staging never wants that."""

    def introduction(self) -> Introduction:
        """What peers and ranks are told first."""
        return Introduction(
            instance=self.instance,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            spec=spec_to_bytes(self.spec),
            transport=self.transport,
        )


class CoordinatorDriver:
    """Drives an instance; see `baton.session.ports` for who calls what."""

    def __init__(self, config: InstanceConfig, ports: Ports) -> None:
        self.config = config
        self.ports = ports
        self.record = Instance(config.instance, config.epoch, config.spec.layout.num_ranks)
        self.refusal = ""
        """Why nothing new is granted; empty while it is."""
        self.on_serving: Callable[[], None] = lambda: None
        self.members: dict[int, int] = {}
        self.ranks: dict[int, int] = {}
        self._heard: dict[int, float] = {}
        self._ticked = ports.now()
        self.sessions = Sessions(self)
        self.departures = Departures(self)
        self.arrivals = Arrivals(self)

    # What the owner asks.

    def drain(self, text: str) -> None:
        """Takes nothing new; ends when what is under way has."""
        self._feed(DrainAsked(text))

    def end(self, text: str) -> None:
        """Ends the instance now."""
        self._feed(EndAsked(text))

    @property
    def is_serving(self) -> bool:
        """Whether every rank is there and transfers are taken."""
        return self.record.state is CoordinatorState.SERVING

    # What the world tells.

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        """A rank of this instance, or another instance, passed its handshake."""
        if peer.rank >= 0:
            self._attach(link, peer)
            return
        try:
            spec = spec_from_bytes(peer.spec)
            is_target = self.sessions.is_accepted(link)
            fault = self._unlike(peer) or self._unplanned(spec, is_target)
        except BatonError as error:
            fault = self.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, str(error))
        if fault is not None:
            self.ports.send(link, Refused(cause=fault))
            self.ports.hang_up(link)
            self._drop(link, fault)
            return
        self._replace_older(peer, is_target)
        session = self.sessions.add(link, spec, (peer.instance, peer.epoch), channel)
        meet = Meet(session=session.number, spec=peer.spec)
        for rank in sorted(self.members):
            self.to_rank(rank, meet)
        self.arrivals.session_up(session)

    def _attach(self, link: int, peer: Introduction) -> None:
        mine = self.config
        fault = ""
        if (peer.instance, peer.epoch) != (mine.instance, mine.epoch):
            fault = f"rank {peer.rank} is of {peer.instance} epoch {peer.epoch}, not of {mine.epoch}"
        elif peer.spec != spec_to_bytes(mine.spec) or peer.transport != mine.transport:
            fault = f"rank {peer.rank} has another layout, cache, storage or transport than its coordinator"
        elif peer.fingerprint != mine.fingerprint:
            fault = f"rank {peer.rank} has another model than its coordinator"
        self.ranks[link] = peer.rank
        if not fault and self.record.state is CoordinatorState.FORMING and peer.rank not in self.members:
            self.members[peer.rank] = link
        self._heard[link] = self.ports.now()
        self._feed(RankAttached(peer.rank, fault), link)

    def _replace_older(self, peer: Introduction, is_target: bool) -> None:
        """A target has one link to its source: if it dials again, the older one is dead, known or not."""
        for old in list(self.sessions.standing.values()):
            if is_target and old.is_target and old.instance == peer.instance:
                text = f"{peer.instance} came back" + (", restarted" if old.epoch != peer.epoch else "")
                self.ports.hang_up(old.link)
                self._drop(old.link, self.cause(Why.PEER_LOST, Stage.COPY, text))

    def _unlike(self, peer: Introduction) -> Cause | None:
        mine = self.config
        if not self.is_serving and self.record.state is not CoordinatorState.DRAINING:
            text = f"{mine.instance} is {self.record.state.value}; try again"
            return self.cause(Why.PEER_LOST, Stage.HANDSHAKE, text)
        if peer.fingerprint != mine.fingerprint:
            text = f"{mine.instance} has model {mine.fingerprint!r}, {peer.instance} has {peer.fingerprint!r}"
            return self.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, text)
        if peer.transport != mine.transport:
            text = f"{mine.instance} moves bytes by {mine.transport}, {peer.instance} by {peer.transport}"
            return self.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, text)
        return None

    def _unplanned(self, spec: Spec, is_target: bool) -> Cause | None:
        """Raises LayoutError, with the reason in plain words, where no hand-over exists."""
        ends = (self.config.spec, spec) if is_target else (spec, self.config.spec)
        plan(*ends, 0, 0)
        return None

    def lost(self, link: int, cause: Cause) -> None:
        """A rank or a peer is gone."""
        rank = self.ranks.pop(link, None)
        if rank is None:
            self._drop(link, self.sessions.named(link, cause))
            return
        self._heard.pop(link, None)
        if self.members.get(rank) == link:
            del self.members[rank]
            self._feed(RankLost(rank, cause.text))

    def _drop(self, link: int, cause: Cause) -> None:
        session = self.sessions.drop(link, cause)
        if session is None:
            return
        self.departures.lost(session, cause)
        self.arrivals.lost(session, cause)
        for rank in sorted(self.members):
            self.to_rank(rank, Part(session=session.number))

    def received(self, link: int, message: AnyMessage) -> None:
        """A word of a rank or of a peer."""
        now = self.ports.now()
        if link in self.ranks:
            self._heard[link] = now
            self._hear(self.ranks[link], message)
            return
        session = self.sessions.by_link(link)
        if session is None:
            self._unanswered(link, message)
            return
        session.heard = now
        match message:
            case Beat():
                pass
            case Goodbye() | Refused():
                self.ports.hang_up(link)
                self._drop(link, message.cause)
            case _ if session.is_target:
                self._confined(session, self.departures.received, message)
            case _:
                self._confined(session, self.arrivals.received, message)

    def _unanswered(self, link: int, message: AnyMessage) -> None:
        """Before there is a session a peer can only refuse it."""
        if isinstance(message, Goodbye | Refused):
            self.ports.hang_up(link)
            self._drop(link, message.cause)

    def _confined(self, session: Session, call: Call, message: AnyMessage) -> None:
        """A peer that breaks the protocol loses its session; this instance goes on."""
        try:
            call(session, message)
        except ProtocolError as error:
            log.warning("session with %s: %s", session.instance, error)
            cause = self.cause(Why.PEER_LOST, Stage.COPY, f"{session.instance} broke the protocol: {error}")
            self.ports.send(session.link, Goodbye(cause=cause))
            self.ports.hang_up(session.link)
            self._drop(session.link, cause)

    def _hear(self, rank: int, message: AnyMessage) -> None:
        match message:
            case Beat():
                pass
            case Goodbye(cause=Cause(why=Why.ABORTED, text=text)):
                self._feed(EndAsked(text))
            case Goodbye():
                self._feed(RankLost(rank, str(message.cause)))
            case Abort(source_rank=source) if source >= 0:
                self.departures.heard(rank, message)
            case _ if isinstance(message, FROM_SOURCE):
                self.departures.heard(rank, message)
            case _:
                self.arrivals.heard(rank, message)

    def tick(self) -> None:
        """Beats, silences and deadlines."""
        now, timings = self.ports.now(), self.config.timings
        if now < self._ticked + timings.beat_s:
            return
        self._ticked = now
        for rank, link in list(self.members.items()):
            self.ports.send(link, Beat())
            if now - self._heard[link] > timings.silence_s:
                self._feed(RankLost(rank, f"silent for {now - self._heard[link]:.1f} s"))
        for session in self.sessions.tick():
            text = f"{session.instance} was silent for {now - session.heard:.1f} s"
            cause = self.cause(Why.PEER_LOST, Stage.COPY, text)
            self.ports.hang_up(session.link)
            self._drop(session.link, cause)
        self.departures.tick()
        self.arrivals.tick()
        comings = self.arrivals.coming.values()
        stuck = stuck_share(comings, self.config.spec.storage, now - timings.stuck_s)
        self._feed(WorkCounted(num_active(comings) + self.departures.num_active(), stuck))

    def next_tick(self) -> float | None:
        """The next beat."""
        return self._ticked + self.config.timings.beat_s

    # What both sides use.

    def to_rank(self, rank: int, message: AnyMessage) -> None:
        """Sends to a rank of this instance."""
        link = self.members.get(rank)
        if link is not None:
            self.ports.send(link, message)

    def cause(self, why: Why, stage: Stage, text: str) -> Cause:
        """A cause at this coordinator."""
        return Cause(why=why, stage=stage, instance=self.config.instance, text=text)

    def counts(self) -> Mapping[str, int]:
        """How much is under way, for metrics and for the integrity checks of tests; from any thread."""
        comings = list(self.arrivals.coming.values())
        return {
            "arrivals": num_live(comings),
            "departures": self.departures.num_active(),
            "sessions": len(self.sessions.standing),
            "quarantined": len(quarantined(comings)),
        }

    def _feed(self, event: object, link: int = -1) -> None:
        self.record, effects = COORDINATOR.step(self.record, event, self.ports.now())
        for effect in effects:
            self._perform(effect, link)

    def _perform(self, effect: object, link: int) -> None:
        match effect:
            case RefuseRank(_, text):
                cause = self.cause(Why.PEER_LOST, Stage.HANDSHAKE, text)
                self.ports.send(link, Goodbye(cause=cause))
                self.ports.hang_up(link)
                self.ranks.pop(link, None)
            case Serve():
                self.ports.serving()
                self.on_serving()
            case StopGranting(text):
                self.refusal = text
                log.error("%s stops granting: %s", self.config.instance, text)
            case EndAll(text, is_wished):
                lost = Goodbye(cause=self.cause(Why.PEER_LOST, Stage.COPY, text))
                for session in self.sessions.standing.values():
                    self.ports.send(session.link, lost)
                # Ranks of an instance that was closed on purpose end without noise.
                wished = Goodbye(cause=self.cause(Why.ABORTED, Stage.COPY, text))
                for member in self.members.values():
                    self.ports.send(member, wished if is_wished else lost)
                if not is_wished:
                    self.ports.end(text)
            case _:
                raise AssertionError(f"no such effect: {effect}")
