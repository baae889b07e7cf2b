"""The network between instances: frames that arrive late, twice, swapped or never."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.protocol.handshake import NONCE_BYTES, Party, Secure, accepting, dialling
from baton.protocol.messages import AnyMessage
from baton.protocol.wire import CHANNEL_BYTES, Codec, Plain
from baton.session.links import Link
from baton.sim.host import Host
from baton.sim.links import SessionEnd

if TYPE_CHECKING:
    from baton.sim.world import World

LATENCY_S = 0.0004
HANDSHAKE_S = 1.0
CLOSED_S = 0.02
"""How long it takes to notice that the other end's process is gone."""


@dataclass(slots=True, eq=False)
class Frame:
    """One frame on its way: when copies of it arrive, and whether it keeps its place in the order."""

    sender: SessionEnd
    receiver: SessionEnd
    data: bytes
    message: AnyMessage | None
    """What is in it, unless it is of a handshake."""
    arrivals: list[float]
    is_ordered: bool = True


class FrameFault(Protocol):
    """A fault that changes when frames arrive."""

    def bend(self, frame: Frame) -> None:
        """Changes the arrivals of a frame that was just sent."""


@dataclass(slots=True)
class Listener:
    """Who answers at an address."""

    host: Host
    party: Party


@dataclass(slots=True)
class Network:
    """All session links of a world."""

    world: World
    chance: random.Random
    faults: list[FrameFault] = field(default_factory=list)
    listeners: dict[str, Listener] = field(default_factory=dict)
    """By address; whoever listens last has it."""
    parties: dict[str, Party] = field(default_factory=dict)
    """By the name of the host that dials."""
    ends: list[SessionEnd] = field(default_factory=list)
    cuts: set[tuple[str, str]] = field(default_factory=set)
    """Ordered pairs of instances between which nothing passes."""
    trouble: dict[frozenset[str], float] = field(default_factory=dict)
    """By pair of instances: when a frame or a link of theirs was last lost."""
    slowest_s: float = 0.0
    """The longest that a frame took."""
    past: deque[tuple[str, str, AnyMessage]] = field(default_factory=lambda: deque(maxlen=200))
    """Messages of links that are gone: who sent them, to whom."""

    def dial(self, host: Host, number: int, address: str, instance: str) -> None:
        """Begins a session link from a host."""
        deadline = host.now() + HANDSHAKE_S
        party = self.parties[host.name]
        link = Link(dialling(party, instance, host.token(NONCE_BYTES), deadline), _plain)
        end = SessionEnd(self, host, number, link)
        host.process.later(LATENCY_S, self._call, end, address)

    def _call(self, end: SessionEnd, address: str) -> None:
        listener = self.listeners.get(address)
        if listener is None or not listener.host.process.is_alive:
            end.host.process.do(end.lose, f"nobody listens at {address}")
            return
        host = listener.host
        nonce, channel = host.token(NONCE_BYTES), host.token(CHANNEL_BYTES)
        link = Link(accepting(listener.party, nonce, channel, host.now() + HANDSHAKE_S), _plain)
        other = SessionEnd(self, host, host.new_link(), link, peer=end)
        end.peer = other
        self.ends += [end, other]
        self.post(end, end.link.begin(end.host.now()))
        for one in (end, other):
            one.host.process.later(HANDSHAKE_S * 1.01, one.expire)

    def post(self, sender: SessionEnd, data: bytes, message: AnyMessage | None = None) -> None:
        """Sends a frame on its way."""
        receiver = sender.peer
        if receiver is None:
            return
        now = self.world.schedule.now
        arrival = now + LATENCY_S * (0.5 + self.chance.random())
        frame = Frame(sender, receiver, data, message, [arrival])
        for fault in self.faults:
            fault.bend(frame)
        if not frame.arrivals:
            self.note_trouble(sender)
        if frame.is_ordered and frame.arrivals:
            frame.arrivals = [max(arrival, sender.arrival_s) for arrival in frame.arrivals]
            sender.arrival_s = max(frame.arrivals)
        for arrival in frame.arrivals:
            self.slowest_s = max(self.slowest_s, arrival - now)
            self.world.schedule.at(arrival, self._arrive, frame)

    def _arrive(self, frame: Frame) -> None:
        if self.is_cut(frame.sender.host, frame.receiver.host):
            self.note_trouble(frame.sender)
            return
        frame.receiver.host.process.do(frame.receiver.receive, frame.data)

    def is_cut(self, sender: Host, receiver: Host) -> bool:
        """Whether nothing passes from one host to another now."""
        return (sender.process.instance, receiver.process.instance) in self.cuts

    def hung_up(self, end: SessionEnd) -> None:
        """The other end hears that a link is gone, after what was sent on it."""
        if end.peer is None:
            return
        moment = max(end.arrival_s, self.world.schedule.now + LATENCY_S)
        self.world.schedule.at(moment, self._closed, end)

    def _closed(self, end: SessionEnd) -> None:
        assert end.peer is not None
        if self.is_cut(end.host, end.peer.host):
            self.world.schedule.after(CLOSED_S, self._closed, end)
        else:
            end.peer.host.process.do(end.peer.lose, "the other end hung up")

    def sever(self, end: SessionEnd) -> None:
        """Breaks a connection under both ends."""
        assert end.peer is not None
        self.note_trouble(end)
        for one in (end, end.peer):
            self.past.extend(
                (one.host.process.instance, one.peer.host.process.instance, message)
                for message in one.sent[-20:]
                if one.peer is not None
            )
            one.host.process.later(CLOSED_S * self.chance.random(), one.lose, "the connection broke")

    def died(self, host: Host) -> None:
        """The process of a host is gone: its links break."""
        for end in self.ends:
            if end.host is host and end.is_open and end.peer is not None:
                end.is_open = False
                self.note_trouble(end)
                for one in (end, end.peer):
                    assert one.peer is not None
                    ends = (one.host.process.instance, one.peer.host.process.instance)
                    self.past.extend((*ends, message) for message in one.sent[-20:])
                delay_s = CLOSED_S * self.chance.random()
                end.peer.host.process.later(delay_s, end.peer.lose, "the other process is gone")

    def standing(self) -> list[SessionEnd]:
        """The dialler's end of every link that stands."""
        self.ends = [end for end in self.ends if end.is_open]
        return [end for end in self.ends if end.is_linked and end.link.handshake.is_dialler]

    def linked(self, end: SessionEnd) -> None:
        """A link passed its handshake at one end."""
        self.world.note(end.host.name, "linked", detail=end.peer.host.name if end.peer else "")

    def note_trouble(self, end: SessionEnd) -> None:
        """Remembers when a pair of instances last lost something."""
        assert end.peer is not None
        self.note_apart(end.host.process.instance, end.peer.host.process.instance)

    def note_apart(self, one: str, other: str) -> None:
        """Remembers when two instances last could not reach each other."""
        self.trouble[frozenset((one, other))] = self.world.schedule.now


def _plain(secure: Secure) -> Codec:
    return Plain(secure.channel)
