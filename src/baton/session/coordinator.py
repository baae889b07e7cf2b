"""An instance's driver: its ranks on one side, other instances on the other.

All control of an instance goes through here, so that there is one verdict and every rank gets the same. The
machines decide what is sent to a rank and to a peer; this file connects them with links.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from baton.errors import BatonError, ProtocolError
from baton.plan import plan
from baton.plan.wire import spec_from_bytes, spec_to_bytes
from baton.protocol.instance import (
    INSTANCE,
    DrainRequested,
    EndAll,
    EndRequested,
    InstanceRecord,
    InstanceState,
    RankAttached,
    RankLost,
    RefuseRank,
    Serve,
    StopGranting,
    WorkCounted,
)
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Commit,
    Goodbye,
    Heartbeat,
    Introduction,
    Landed,
    Message,
    Offer,
    Queued,
    Quiet,
    Refused,
    SessionClosed,
    SessionOpened,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Stage, Why
from baton.session.config import DriverConfig
from baton.session.inbound import InboundTransfers
from baton.session.outbound import OutboundTransfers
from baton.session.ports import Ports
from baton.session.sessions import Sessions

log = logging.getLogger(__name__)

FROM_SOURCE_RANKS = (Offer, Landed, Commit, AuxRecord, Quiet, Unquiet)


class CoordinatorDriver:
    """Drives an instance; `baton.session.ports` has the calls in both directions."""

    def __init__(self, config: DriverConfig, ports: Ports) -> None:
        self.config = config
        self.ports = ports
        self.record = InstanceRecord(config.instance, config.epoch, config.spec.layout.num_ranks)
        self.on_serving: Callable[[], None] = lambda: None
        self.members: dict[int, int] = {}
        """The link of every rank that takes part."""
        self.ranks: dict[int, int] = {}
        """The rank behind every member link."""
        self._heard: dict[int, float] = {}
        self._ticked = ports.now()
        self.sessions = Sessions(config, ports, self._source_unreachable)
        self.outbound = OutboundTransfers(config, ports, self.sessions, self.to_rank)
        self.inbound = InboundTransfers(config, ports, self.sessions, self.to_rank)

    # Calls of the owner.

    def drain(self, text: str) -> None:
        """Takes no new transfers; ends when those under way have."""
        self._feed(DrainRequested(text))

    def counts(self) -> Mapping[str, int]:
        """How much is under way, for metrics and for the integrity checks of tests; from any thread."""
        return {
            "inbound": self.inbound.num_live(),
            "outbound": self.outbound.num_active(),
            "sessions": len(self.sessions.standing),
            "quarantined": len(self.inbound.quarantined()),
        }

    # Links.

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        """A rank of this instance, or another instance, passed its handshake."""
        if peer.rank >= 0:
            self._attach(link, peer)
            return
        is_target = self.sessions.is_accepted(link)
        fault = self._incompatible(peer)
        if fault is None:
            try:
                spec = spec_from_bytes(peer.spec)
                # Raises LayoutError where no plan exists.
                plan(*((self.config.spec, spec) if is_target else (spec, self.config.spec)), 0, 0)
            except BatonError as error:
                fault = self.config.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, str(error))
        if fault is not None:
            self.ports.send(link, Refused(cause=fault))
            self.ports.hang_up(link)
            self._drop(link, fault)
            return
        if is_target:
            self._replace_older(peer)
        session = self.sessions.add(link, peer, spec, channel)
        for rank in sorted(self.members):
            self.to_rank(rank, SessionOpened(session=session.number, spec=peer.spec))
        self.inbound.session_up(session)

    def _attach(self, link: int, peer: Introduction) -> None:
        mine, fault = self.config, ""
        if (peer.instance, peer.epoch) != (mine.instance, mine.epoch):
            fault = f"rank {peer.rank} is of {peer.instance} epoch {peer.epoch}, not of {mine.epoch}"
        elif peer.spec != spec_to_bytes(mine.spec) or peer.transport != mine.transport:
            fault = f"rank {peer.rank} has another layout, cache, storage or transport than its coordinator"
        elif peer.fingerprint != mine.fingerprint:
            fault = f"rank {peer.rank} has another model than its coordinator"
        self.ranks[link] = peer.rank
        if not fault and self.record.state is InstanceState.FORMING and peer.rank not in self.members:
            self.members[peer.rank] = link
        self._heard[link] = self.ports.now()
        self._feed(RankAttached(peer.rank, fault), link)

    def _incompatible(self, peer: Introduction) -> Cause | None:
        mine = self.config
        if self.record.state not in (InstanceState.SERVING, InstanceState.DRAINING):
            text = f"{mine.instance} is {self.record.state.value}; try again"
            return mine.cause(Why.PEER_LOST, Stage.HANDSHAKE, text)
        if peer.fingerprint != mine.fingerprint:
            text = (
                f"{mine.instance} has model {mine.fingerprint!r}, {peer.instance} has {peer.fingerprint!r}; "
                "start both with the same config and weights"
            )
            return mine.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, text)
        if peer.transport != mine.transport:
            text = f"{mine.instance} moves bytes by {mine.transport}, {peer.instance} by {peer.transport}"
            return mine.cause(Why.REFUSED_LAYOUT, Stage.HANDSHAKE, text)
        return None

    def _replace_older(self, peer: Introduction) -> None:
        """A target has one link to its source: if it dials again, the older one is dead, known or not."""
        for old in list(self.sessions.standing.values()):
            if old.is_target and old.instance == peer.instance:
                text = f"{peer.instance} came back" + (", restarted" if old.epoch != peer.epoch else "")
                self.ports.hang_up(old.link)
                self._drop(old.link, self.config.cause(Why.PEER_LOST, Stage.COPY, text))

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
        self.outbound.session_lost(session, cause)
        self.inbound.session_lost(session, cause)
        for rank in sorted(self.members):
            self.to_rank(rank, SessionClosed(session=session.number))

    def _source_unreachable(self, name: str, cause: Cause) -> None:
        self.inbound.source_unreachable(name, cause)

    # Messages.

    def received(self, link: int, message: Message) -> None:
        """A message of a rank or of a peer."""
        if (rank := self.ranks.get(link)) is not None:
            self._heard[link] = self.ports.now()
            self._on_rank_message(rank, message)
            return
        session = self.sessions.by_link(link)
        if isinstance(message, Goodbye | Refused):
            # Before there is a session a peer can only refuse it.
            self.ports.hang_up(link)
            self._drop(link, message.cause)
            return
        if session is None:
            return
        session.heard = self.ports.now()
        if isinstance(message, Heartbeat):
            return
        try:
            if session.is_target:
                self.outbound.on_message(session, message)
            else:
                self.inbound.on_message(session, message)
        except ProtocolError as error:
            # A peer that breaks the protocol loses its session; this instance goes on.
            log.warning("closing the session with %s: %s", session.instance, error)
            text = f"{session.instance} broke the protocol: {error}"
            cause = self.config.cause(Why.PEER_LOST, Stage.COPY, text)
            self.ports.send(session.link, Goodbye(cause=cause))
            self.ports.hang_up(session.link)
            self._drop(session.link, cause)

    def _on_rank_message(self, rank: int, message: Message) -> None:
        match message:
            case Heartbeat():
                pass
            case Goodbye(cause=Cause(why=Why.ABORTED, text=text)):
                self._feed(EndRequested(text))
            case Goodbye():
                self._feed(RankLost(rank, str(message.cause)))
            case Abort(source_rank=source_rank) if source_rank >= 0:
                self.outbound.on_rank_message(rank, message)
            case Queued(source=""):
                self.outbound.on_rank_message(rank, message)
            case _ if isinstance(message, FROM_SOURCE_RANKS):
                self.outbound.on_rank_message(rank, message)
            case _:
                self.inbound.on_rank_message(rank, message)

    def to_rank(self, rank: int, message: Message) -> None:
        """Sends to a rank of this instance."""
        link = self.members.get(rank)
        if link is not None:
            self.ports.send(link, message)

    # Time, and the machine.

    def tick(self) -> None:
        """Heartbeats, silent links and deadlines."""
        now, timings = self.ports.now(), self.config.timings
        if now < self._ticked + timings.beat_s:
            return
        self._ticked = now
        for rank, link in list(self.members.items()):
            self.ports.send(link, Heartbeat())
            if now - self._heard[link] > timings.silence_s:
                self._feed(RankLost(rank, f"silent for {now - self._heard[link]:.1f} s"))
        for session in self.sessions.tick():
            text = f"{session.instance} was silent for {now - session.heard:.1f} s"
            self.ports.hang_up(session.link)
            self._drop(session.link, self.config.cause(Why.PEER_LOST, Stage.COPY, text))
        self.outbound.tick()
        self.inbound.tick()
        num_active = self.inbound.num_active() + self.outbound.num_active()
        self._feed(WorkCounted(num_active, self.inbound.stuck_share(now - timings.stuck_s)))

    def next_tick(self) -> float | None:
        """The next heartbeat."""
        return self._ticked + self.config.timings.beat_s

    def _feed(self, event: object, link: int = -1) -> None:
        self.record, effects = INSTANCE.step(self.record, event, self.ports.now())
        for effect in effects:
            match effect:
                case RefuseRank(_, text):
                    cause = self.config.cause(Why.PEER_LOST, Stage.HANDSHAKE, text)
                    self.ports.send(link, Goodbye(cause=cause))
                    self.ports.hang_up(link)
                    self.ranks.pop(link, None)
                case Serve():
                    self.ports.serving()
                    self.on_serving()
                case StopGranting(text):
                    self.inbound.refusal = self.outbound.refusal = text
                    log.error("%s accepts no new transfers: %s", self.config.instance, text)
                case EndAll(text, is_requested):
                    self._end_all(text, is_requested)
                case _:
                    raise AssertionError(f"no such effect: {effect}")

    def _end_all(self, text: str, is_requested: bool) -> None:
        lost = Goodbye(cause=self.config.cause(Why.PEER_LOST, Stage.COPY, text))
        for session in self.sessions.standing.values():
            self.ports.send(session.link, lost)
        # Ranks of an instance that was closed on purpose end without an error.
        aborted = Goodbye(cause=self.config.cause(Why.ABORTED, Stage.COPY, text))
        for link in self.members.values():
            self.ports.send(link, aborted if is_requested else lost)
        if not is_requested:
            self.ports.end(text)
