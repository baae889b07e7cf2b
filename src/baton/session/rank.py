"""One rank's driver: the place where a rank's machines meet its transport.

It has a source half and a target half, which share the pools, the staging and the link to the coordinator. A
failure inside one transfer ends that transfer; a lost coordinator ends the rank, because an instance has one
fate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.errors import LocalProtocolError
from baton.plan import Plan, Spec, plan
from baton.plan.wire import spec_from_bytes, spec_to_bytes
from baton.protocol.messages import (
    AnyMessage,
    AuxRecord,
    Beat,
    Close,
    Decline,
    Goodbye,
    Grant,
    Introduction,
    Invite,
    Meet,
    Open,
    Part,
    Released,
    SessionPaths,
    Settled,
    Unpack,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.timings import Timings
from baton.session.handles import Handle, Receiving, Sending
from baton.session.pools import Pools
from baton.session.ports import Ports
from baton.session.requests import Digest, Request, check_transfer
from baton.session.source import SourceHalf
from baton.session.target import TargetHalf
from baton.transport import Event, Transport


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Who a rank is."""

    instance: str
    epoch: int
    rank: int
    spec: Spec
    fingerprint: str = ""
    timings: Timings = field(default_factory=Timings)

    def introduction(self, transport: str) -> Introduction:
        """What its coordinator is told first."""
        return Introduction(
            instance=self.instance,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            spec=spec_to_bytes(self.spec),
            transport=transport,
            rank=self.rank,
        )


@dataclass(slots=True)
class Pulse:
    """When the coordinator was heard last, and when this rank beat last."""

    heard: float
    beat: float


class RankDriver:
    """Drives one rank; see `baton.session.ports` for who calls what."""

    def __init__(self, config: RankConfig, ports: Ports, transport: Transport, pools: Pools) -> None:
        self.config = config
        self.ports = ports
        self.transport = transport
        self.pools = pools
        self.peers: dict[int, Spec] = {}
        self.on_change: Callable[[Handle], None] = lambda handle: None
        self._link: int | None = None
        self._is_over = False
        self._queued: list[AnyMessage] = []
        self._pulse = Pulse(ports.now(), ports.now())
        self.source = SourceHalf(self)
        self.target = TargetHalf(self)

    # What engines ask for.

    def send(self, transfer: str, digest: Digest) -> Sending:
        """Begins the source's end of a transfer."""
        check_transfer(transfer)
        sending = Sending(transfer, digest.num_tokens, self.source, self.ports.post)
        self.ports.post(lambda: self.source.begin(sending, digest))
        return sending

    def receive(self, request: Request) -> Receiving:
        """Begins the target's end of a transfer, with the pages of one or more ranks."""
        own = request.checked(self.config.spec)
        receiving = Receiving(own.transfer, self._abort_receiving)
        if not self.target.claims.has(own.transfer):
            # An id that is live is refused for that, whatever its pages.
            receiving.claim = self.target.claims.take(own)
        self.ports.post(lambda: self.target.begin(receiving, own))
        return receiving

    def decline(self, transfer: str, source: str, text: str) -> None:
        """Tells the source that this instance will not take a transfer."""
        cause = self.cause(Why.OUT_OF_PAGES, Stage.GRANT, text)
        self.ports.post(lambda: self.tell(Decline(transfer=transfer, source=source, cause=cause)))

    def _abort_receiving(self, receiving: Receiving, text: str) -> None:
        self.ports.post(lambda: self.target.abort(receiving, text))

    # What the world tells.

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        """The coordinator accepted this rank."""
        if (peer.instance, peer.epoch) != (self.config.instance, self.config.epoch):
            self.ports.end(f"rank {self.config.rank} reached another instance's coordinator: {peer.instance}")
            return
        self._link = link
        self._pulse.heard = self.ports.now()
        for message in self._queued:
            self.ports.send(link, message)
        self._queued.clear()
        self.ports.serving()

    def leave(self, text: str) -> None:
        """The owner wishes this rank to end, and with it the instance."""
        cause = self.cause(Why.ABORTED, Stage.COPY, text)
        self.tell(Goodbye(cause=cause))
        self.over(cause)

    def over(self, cause: Cause) -> None:
        """The instance ended: nothing more will come of what is under way."""
        self._is_over = True
        for handle in [*self.source.handles(), *self.target.handles()]:
            self.conclude(handle, Failed(cause))

    def lost(self, link: int, cause: Cause) -> None:
        """Without its coordinator a rank is nothing."""
        if self._is_over:
            return
        self.ports.end(f"rank {self.config.rank} of {self.config.instance} lost its coordinator: {cause}")

    def received(self, link: int, message: AnyMessage) -> None:
        """A word of the coordinator."""
        self._pulse.heard = self.ports.now()
        match message:
            case Beat():
                pass
            case Meet():
                self.peers[message.session] = spec_from_bytes(message.spec)
            case Part():
                self.source.flights.part(message.session)
                self.target.part(message.session)
                self.peers.pop(message.session, None)
            case SessionPaths():
                self.source.flights.take_paths(message)
            case Grant():
                self.source.granted(message)
            case Settled():
                self.source.settled(message)
                self.target.settled(message)
            case AuxRecord():
                self.target.aux_came(message)
            case Invite():
                self.target.invite(message)
            case Open():
                self.target.open(message)
            case Unpack():
                self.target.unpack(message)
            case Close():
                self.target.close(message)
            case Released():
                self.target.released(message)
            case Goodbye(cause=Cause(why=Why.ABORTED)):
                self.over(message.cause)
            case Goodbye():
                self.ports.end(f"rank {self.config.rank} of {self.config.instance}: {message.cause}")
            case _:
                raise LocalProtocolError(f"a coordinator does not say {type(message).__name__} to a rank")

    def moved(self, events: Sequence[Event]) -> None:
        """What the transport has to say."""
        for event in events:
            self.source.flights.moved(event)

    def tick(self) -> None:
        """Says that it lives, and looks whether the coordinator does."""
        now, timings = self.ports.now(), self.config.timings
        if now < self._pulse.beat + timings.beat_s:
            return
        self._pulse.beat = now
        if self._link is None or self._is_over:
            return
        self.ports.send(self._link, Beat())
        if now - self._pulse.heard > timings.silence_s:
            silence = f"silent for {now - self._pulse.heard:.1f} s"
            self.lost(self._link, self.cause(Why.PEER_LOST, Stage.HANDSHAKE, silence))

    def next_tick(self) -> float | None:
        """The next beat."""
        return self._pulse.beat + self.config.timings.beat_s

    # What both halves use.

    def tell(self, message: AnyMessage) -> None:
        """Sends to the coordinator, now or when there is a link to it."""
        if self._link is None:
            self._queued.append(message)
        else:
            self.ports.send(self._link, message)

    def plan_of(self, grant: Grant, *, is_source: bool) -> Plan:
        """The plan that a grant is under; raises if its session is gone."""
        peer = self.peers.get(grant.session)
        if peer is None:
            raise LocalProtocolError(f"grant for transfer {grant.transfer} by a session that is gone")
        ends = (self.config.spec, peer) if is_source else (peer, self.config.spec)
        return plan(*ends, grant.source_dp, grant.target_dp)

    def cause(self, why: Why, stage: Stage, text: str) -> Cause:
        """A cause on this rank."""
        return Cause(why=why, stage=stage, instance=self.config.instance, rank=self.config.rank, text=text)

    def conclude(self, handle: Handle, outcome: Any) -> None:
        """Tells the engine how a transfer ended."""
        if handle.conclude(outcome):
            self.on_change(handle)

    def release(self, handle: Handle) -> None:
        """Tells the engine that pages are its own again."""
        if not handle.is_released:
            if isinstance(handle, Receiving):
                self.target.unclaim(handle)
            handle.release()
            self.on_change(handle)

    def refuse(self, handle: Handle, cause: Cause) -> None:
        """Ends a handle that never became a transfer."""
        self.conclude(handle, Failed(cause))
        self.release(handle)

    def counts(self) -> Mapping[str, int]:
        """How much is under way, for metrics and for the integrity checks of tests."""
        return {**self.source.counts(), **self.target.counts()}
