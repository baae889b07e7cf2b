"""One rank's driver: the place where a rank's machines meet its transport.

`SourceCopies` sends, `TargetWriters` receives; they share the pools, the staging and the link to the
coordinator. A failure inside one transfer ends that transfer; a lost coordinator ends the rank, because an
instance has one fate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from baton.errors import LocalProtocolError
from baton.plan import Spec
from baton.plan.wire import spec_from_bytes
from baton.protocol.messages import (
    AuxRecord,
    Close,
    Decline,
    Goodbye,
    Grant,
    Heartbeat,
    Introduction,
    Invite,
    Message,
    Open,
    Queued,
    Released,
    SessionClosed,
    SessionOpened,
    SessionPaths,
    Settled,
    UnpackChunk,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.timings import check_progress
from baton.session.config import DriverConfig
from baton.session.copies import SourceCopies
from baton.session.handles import Digest, Handle, Receiving, Request, Sending, check_transfer
from baton.session.memory import Pools
from baton.session.ports import Ports
from baton.session.writers import TargetWriters
from baton.transport import Transport


class RankDriver:
    """Drives one rank; `baton.session.ports` has the calls in both directions."""

    def __init__(self, config: DriverConfig, ports: Ports, transport: Transport, pools: Pools) -> None:
        self.config = config
        self.ports = ports
        self.pools = pools
        self.on_change: Callable[[Handle], None] = lambda handle: None
        self.on_attached: Callable[[int], None] = lambda epoch: None
        """Called with the epoch of the coordinator that this rank reached."""
        self.on_accepted: Callable[[], None] = lambda: None
        """Called with the first message of a coordinator that did not refuse this rank."""
        self._is_accepted = False
        self._link: int | None = None
        self._over: Cause | None = None
        """Why the instance has ended."""
        self._coordinator = ""
        self._attach_until_s = self._redial_s = -math.inf
        """Until when it is dialled again if it is not there yet, and when that is due."""
        self._num_dialled = 0
        self._queued: list[Message] = []
        """Messages from before there was a link."""
        self._heard_s = self._beat_s = ports.now()
        """When the coordinator was heard last, and when this rank last sent a heartbeat."""
        self._peers: dict[int, Spec] = {}
        self.source = SourceCopies(config, ports, transport, pools, self._peers, self._send)
        self.target = TargetWriters(config, ports, transport, pools, self._peers, self._send)

    # Calls of the engine.

    def attach(self, address: str, patience_s: float = 0.0) -> None:
        """Dials the coordinator, and again for a while if nothing answers there yet."""
        self._coordinator = address
        self._attach_until_s = self.ports.now() + patience_s
        self._dial()

    def send(
        self, transfer: str, digest: Digest, progress_s: float | None = None, *, is_queued: bool = False
    ) -> Sending:
        """Begins the source's end of a transfer."""
        check_transfer(transfer)
        if progress_s is not None:
            check_progress(progress_s)
        sending = Sending(transfer, digest.num_tokens, self.source, self.ports.post, self._changed)
        begin = partial(self.source.begin, sending, digest, progress_s or 0.0, is_queued=is_queued)
        self.ports.post(partial(self._begin, sending, begin))
        return sending

    def receive(self, request: Request) -> Receiving:
        """Begins the target's end of a transfer, with the pages of one or more ranks."""
        checked = request.checked(self.config.spec)
        receiving = Receiving(checked.transfer, checked.source, self._abort_receiving, self._changed)
        receiving.claim = self.target.claims.take_unless_live(checked)
        self.ports.post(partial(self._begin, receiving, partial(self.target.begin, receiving, checked)))
        return receiving

    def decline(self, transfer: str, source: str, text: str) -> None:
        """Tells the source that this instance will not take a transfer."""
        cause = self.config.cause(Why.OUT_OF_PAGES, Stage.GRANT, text)
        self.ports.post(partial(self._send, Decline(transfer=transfer, source=source, cause=cause)))

    def queue(self, transfer: str, source: str) -> None:
        """Tells the source that a transfer waits for room here."""
        self.ports.post(partial(self._send, Queued(transfer=transfer, source=source)))

    def leave(self, text: str) -> None:
        """The owner ends this rank, and with it the instance."""
        cause = self.config.cause(Why.ABORTED, Stage.COPY, text)
        self._send(Goodbye(cause=cause))
        self.over(cause)

    def over(self, cause: Cause) -> None:
        """The instance ended: transfers under way fail, and none begins.

        Nothing comes from the coordinator any more, so this rank takes its place: copies are cancelled, and
        a source's pages come back with the last one. Those of a target do not, because a source that has not
        heard of it may still write them.
        """
        if self._over is not None:
            return
        self._over = cause
        for transfer, sent in list(self.source.transfers.items()):
            self.source.settled(Settled(transfer=transfer, grant=sent.record.grant, outcome=Failed(cause)))
        for receiving in self.target.receiving.values():
            receiving.conclude(Failed(cause))

    def _begin(self, handle: Handle, begin: Callable[[], None]) -> None:
        if self._over is None:
            begin()
        else:
            handle.refuse(self._over)

    def counts(self) -> Mapping[str, int]:
        """How much is under way, for metrics and for the integrity checks of tests."""
        return {**self.source.counts(), **self.target.counts()}

    def _abort_receiving(self, receiving: Receiving, text: str) -> None:
        self.ports.post(partial(self.target.abort, receiving, text))

    def _changed(self, handle: Handle) -> None:
        self.on_change(handle)

    # Links, messages, completions and time.

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        """The handshake with the coordinator held; its epoch is learned once, and never another one."""
        own = self.config
        if peer.instance != own.instance or own.epoch not in (0, peer.epoch):
            self.ports.end(
                f"rank {own.rank} reached another instance's coordinator: {peer.instance} epoch "
                f"{peer.epoch}, not {own.instance} epoch {own.epoch}; attach with a new endpoint"
            )
            return
        if not own.epoch:
            self.config = self.source.config = self.target.config = replace(own, epoch=peer.epoch)
            self.ports.introduce_as(self.config.introduction())
        self._link = link
        self.on_attached(peer.epoch)
        self._heard_s = self.ports.now()
        for message in self._queued:
            self.ports.send(link, message)
        self._queued.clear()
        self.ports.serving()

    def lost(self, link: int, cause: Cause) -> None:
        """A rank cannot go on without its coordinator; one that was never there may still come."""
        now, timings = self.ports.now(), self.config.timings
        if self._link is None and cause.why is Why.PEER_LOST and now < self._attach_until_s:
            pause_s = min(timings.redial_s * 2 ** min(self._num_dialled, 16), timings.redial_s_max)
            self._redial_s = min(now + pause_s, self._attach_until_s)
            return
        if self._over is None:
            self.ports.end(f"rank {self.config.rank} of {self.config.instance} lost its coordinator: {cause}")

    def received(self, link: int, message: Message) -> None:
        """A message of the coordinator."""
        self._heard_s = self.ports.now()
        if not self._is_accepted and not isinstance(message, Goodbye):
            self._is_accepted = True
            self.on_accepted()
        match message:
            case Heartbeat():
                pass
            case SessionOpened():
                self._peers[message.session] = spec_from_bytes(message.spec)
            case SessionClosed():
                self.source.session_closed(message.session)
                self.target.session_closed(message.session)
                self._peers.pop(message.session, None)
            case SessionPaths():
                self.source.connect(message)
            case Grant():
                self.source.granted(message)
            case Queued():
                self.source.target_queued(message)
            case Settled():
                self.source.settled(message)
                self.target.settled(message)
            case AuxRecord():
                self.target.aux_came(message)
            case Invite():
                self.target.invite(message)
            case Open():
                self.target.open(message)
            case UnpackChunk():
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
                raise LocalProtocolError(f"a coordinator does not send {type(message).__name__} to a rank")

    def tick(self) -> None:
        """Sends a heartbeat, and checks that the coordinator does."""
        now, timings = self.ports.now(), self.config.timings
        if -math.inf < self._redial_s <= now:
            self._dial()
        if now < self._beat_s + timings.beat_s:
            return
        self._beat_s = now
        if self._link is None or self._over is not None:
            return
        self.ports.send(self._link, Heartbeat())
        if now - self._heard_s > timings.silence_s:
            text = f"silent for {now - self._heard_s:.1f} s"
            self.lost(self._link, self.config.cause(Why.PEER_LOST, Stage.HANDSHAKE, text))

    def next_tick(self) -> float | None:
        """The next heartbeat, or the next attempt to attach."""
        beat_s = self._beat_s + self.config.timings.beat_s
        return min(beat_s, self._redial_s) if self._redial_s > -math.inf else beat_s

    def _dial(self) -> None:
        self._redial_s = -math.inf
        self._num_dialled += 1
        self.ports.dial(self._coordinator, self.config.instance)

    def _send(self, message: Message) -> None:
        """Sends to the coordinator, now or when there is a link to it, and until it is over."""
        if self._over is not None:
            return
        if self._link is None:
            self._queued.append(message)
        else:
            self.ports.send(self._link, message)
