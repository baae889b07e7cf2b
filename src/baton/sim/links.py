"""Control links of both kinds.

A session link runs the production handshake and framing (`baton.session.links`) over frames that the network
may delay, lose, double or swap. A member link joins a rank to its own coordinator on one machine: it is
ordered, and dies only with a process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from baton.errors import RemoteProtocolError
from baton.protocol.handshake import Ended, Established
from baton.protocol.messages import AnyMessage, Goodbye, Introduction, Refused
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.wire import decode, encode
from baton.session.links import Link
from baton.sim.host import Host

if TYPE_CHECKING:
    from baton.sim.network import Network

EXPIRE_S = 0.02


class Cord(Protocol):
    """One end of a link, as its host uses it."""

    def send(self, message: AnyMessage) -> None:
        """Sends a message to the other end."""

    def hang_up(self) -> None:
        """Ends the link from this end."""


@dataclass(slots=True, eq=False)
class SessionEnd:
    """One end of a session link."""

    network: Network
    host: Host
    number: int
    link: Link
    peer: SessionEnd | None = None
    is_open: bool = True
    is_linked: bool = False
    arrival_s: float = 0.0
    """When the last frame that this end sent arrives."""
    sent: list[AnyMessage] = field(default_factory=list)
    """What was sent last; a fault may have it arrive on a later link."""

    def send(self, message: AnyMessage) -> None:
        """Sends a message as a frame."""
        if self.is_open and self.link.is_standing:
            self.network.world.note_message(self, message, "sent")
            if isinstance(message, Refused | Goodbye):
                self.network.note_trouble(self)
            self.sent.append(message)
            self.network.post(self, self.link.send(message), message)

    def hang_up(self) -> None:
        """Closes behind what was sent."""
        if self.is_open:
            self.is_open = False
            self.network.hung_up(self)

    def receive(self, data: bytes) -> None:
        """Takes what came for this end."""
        if not self.is_open:
            return
        for happening in self.link.receive(data, self.host.now()):
            self._happened(happening)
        self._reply()

    def deliver(self, message: AnyMessage) -> None:
        """Hands a message to the driver."""
        driver = self.host.driver
        if self.is_open and self.is_linked and driver is not None:
            self.network.world.note_message(self, message, "received")
            self._confined(driver.received, self.number, message)

    def _confined(self, call: Callable[..., None], *args: Any) -> None:
        """Calls the driver; a peer that it finds at fault loses the link."""
        try:
            self.host.enter(call, *args)
        except RemoteProtocolError as error:
            for happening in self.link.refuse(str(error), self.host.now()):
                self._happened(happening)
            self._reply()

    def expire(self) -> None:
        """The time for the handshake is over."""
        if self.is_open and not self.is_linked:
            for happening in self.link.expire(self.host.now()):
                self._happened(happening)
            self._reply()
        if self.is_open and not self.is_linked:
            # By a clock that is slow the time is not over yet.
            self.host.process.later(EXPIRE_S, self.expire)

    def lose(self, cause: Cause | str) -> None:
        """The link is gone; the driver is told if it knew of it."""
        if not self.is_open:
            return
        self.is_open = False
        self.host.cords.pop(self.number, None)
        driver = self.host.driver
        if (self.is_linked or self.link.handshake.is_dialler) and driver is not None:
            found = cause if isinstance(cause, Cause) else gone(self.host, cause)
            if self.peer is not None:
                self.network.note_trouble(self)
            self.network.world.note(self.host.name, "lost", detail=str(found))
            self.host.enter(driver.lost, self.number, found)

    def _reply(self) -> None:
        if replies := self.link.replies():
            self.network.post(self, replies)

    def _happened(self, happening: AnyMessage | Established | Ended) -> None:
        driver = self.host.driver
        assert driver is not None
        match happening:
            case Established(introduction, channel):
                self.is_linked = True
                self.host.cords[self.number] = self
                self.network.linked(self)
                self._reply()
                self._confined(driver.linked, self.number, introduction, channel)
            case Ended(cause):
                self._reply()
                self.network.hung_up(self)
                self.lose(cause)
            case _:
                self.deliver(happening)


@dataclass(slots=True, eq=False)
class MemberEnd:
    """One end of a member link."""

    host: Host
    number: int
    delay_s: float
    peer: MemberEnd | None = None
    is_open: bool = True
    arrival_s: float = 0.0

    def send(self, message: AnyMessage) -> None:
        """Sends a message, in order."""
        if not self.is_open or self.peer is None:
            return
        self.host.world.note_member(self.host, message)
        schedule = self.host.world.schedule
        delay_s = self.delay_s * (0.5 + self.host.chance.random())
        self.arrival_s = max(self.arrival_s, schedule.now + delay_s)
        schedule.at(self.arrival_s, self.peer.host.process.do, self.peer.receive, encode(message))

    def hang_up(self) -> None:
        """Closes behind what was sent."""
        self.is_open = False
        if self.peer is not None:
            moment = max(self.arrival_s, self.host.world.schedule.now + self.delay_s)
            self.host.world.schedule.at(moment, self.peer.host.process.do, self.peer.lose, "hung up")

    def receive(self, body: bytes) -> None:
        """Takes what came for this end."""
        driver = self.host.driver
        if self.is_open and driver is not None:
            self.host.enter(driver.received, self.number, decode(body))

    def lose(self, cause: str) -> None:
        """The other process is gone."""
        driver = self.host.driver
        if self.is_open and driver is not None:
            self.is_open = False
            self.host.cords.pop(self.number, None)
            self.host.enter(driver.lost, self.number, gone(self.host, cause))


def gone(host: Host, text: str) -> Cause:
    """Why a link is over that nobody ended on purpose."""
    return Cause(Why.PEER_LOST, Stage.COPY, host.process.instance, -1, text)


def join(rank: Host, coordinator: Host, said: tuple[Introduction, Introduction], delay_s: float) -> None:
    """Makes a member link; `said` is what the rank and what the coordinator introduce themselves with."""
    ends = [MemberEnd(host, host.new_link(), delay_s) for host in (rank, coordinator)]
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    channel = coordinator.token(16)
    for end, words in zip(ends, (said[1], said[0]), strict=True):
        end.host.cords[end.number] = end
        assert end.peer is not None
        end.host.process.at_death.append(end.hang_up)
        driver = end.host.driver
        assert driver is not None
        end.host.process.later(delay_s, end.host.enter, driver.linked, end.number, words, channel)
