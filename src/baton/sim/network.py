"""Control links in virtual time: the ports of each driver, session links, member links, and the registry.

A session link runs the production handshake and framing (`baton.session.links`) over frames that the network
may delay, lose, duplicate or reorder. A member link joins a rank to its own coordinator on one machine: it
keeps its order, and dies only with a process.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from baton.errors import RemoteProtocolError
from baton.protocol.handshake import NONCE_BYTES, Ended, Established, Party, Secure, accepting, dialling
from baton.protocol.messages import Goodbye, Introduction, Message, Refused
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.wire import CHANNEL_BYTES, Codec, Plain, decode, encode
from baton.session.links import Link
from baton.session.ports import Driver
from baton.sim.core import Context, ScheduledCall, SimProcess

INF = float("inf")
POST_S = 0.00002
LATENCY_S = 0.0004
HANDSHAKE_S = 1.0
EXPIRE_RETRY_S = 0.02
CLOSED_S = 0.02
"""How long it takes to notice that the other end's process is gone."""
REGISTRY_S = 0.002
NUM_KEPT = 20
"""Messages of a broken link that are kept for later."""


class Host:
    """The ports (`baton.session.ports`) of one driver."""

    def __init__(self, network: Network, process: SimProcess, name: str, rng: random.Random) -> None:
        self.network = network
        self.context = network.context
        self.process = process
        self.name = name
        self.rng = rng
        self.driver: Driver | None = None
        self.after_call: Callable[[], None] | None = None
        """Called after each call into the driver: the engine looks for changes."""
        self.links: dict[int, SessionEnd | MemberEnd] = {}
        self._num_links = 0
        self._posted_s = 0.0
        self._tick: ScheduledCall | None = None
        self._tick_at = 0.0

    # The ports.

    def now(self) -> float:
        return self.process.clock.now()

    def token(self, num_bytes: int) -> bytes:
        return self.rng.randbytes(num_bytes)

    def introduce_as(self, introduction: Introduction) -> None:
        parties = self.network.parties
        parties[self.name] = replace(parties[self.name], introduction=introduction)

    def dial(self, address: str, instance: str) -> int:
        number = self.new_link()
        self.network.dial(self, number, address, instance)
        return number

    def send(self, link: int, message: Message) -> None:
        end = self.links.get(link)
        if end is not None:
            end.send(message)

    def hang_up(self, link: int) -> None:
        end = self.links.pop(link, None)
        if end is not None:
            end.hang_up()

    def run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        self.process.call_after(self.network.job_s * self.rng.random(), self._run, job, then)

    def look_up(self, instance: str, then: Callable[[str | None, str], None]) -> None:
        self.process.call_after(REGISTRY_S, self.network.registry.answer, self, instance, then)

    def post(self, call: Callable[[], None]) -> None:
        schedule = self.context.schedule
        self._posted_s = max(self._posted_s, schedule.now + POST_S * self.rng.random())
        schedule.at(self._posted_s, self.process.call, self.enter, call)

    def serving(self) -> None:
        if self.network.parties[self.name].accepts:
            self.network.registry.register(self)

    def end(self, cause: str) -> None:
        self.context.note(self.name, "end", detail=cause)
        # The driver has to return first.
        self.process.call_after(0.0, self.process.kill)

    # What the simulator calls.

    def new_link(self) -> int:
        """A number that no link of this host had."""
        self._num_links += 1
        return self._num_links

    def enter(self, act: Callable[..., Any], *args: Any) -> None:
        """Calls into the driver, then schedules the tick that the driver wants next."""
        act(*args)
        if self.after_call is not None:
            self.after_call()
        assert self.driver is not None
        wanted = self.driver.next_tick()
        if wanted is None:
            self._cancel_tick()
            return
        if self._tick is not None and self._tick.act is not None and self._tick_at == wanted:
            return
        self._cancel_tick()
        self._tick_at = wanted
        # Rounding must not make the tick come before the driver's own clock shows it.
        moment = self.process.clock.schedule_time(wanted) + 1e-9
        self._tick = self.context.schedule.at(moment, self.process.call, self._run_tick)

    def _run_tick(self) -> None:
        self._tick = None
        assert self.driver is not None
        self.enter(self.driver.tick)

    def _cancel_tick(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    def _run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        try:
            result = job()
        except Exception as error:
            result = error
        self.process.call_after(self.network.job_s * self.rng.random(), self.enter, then, result)

    def link_lost(self, text: str) -> Cause:
        """The cause of a link that ended by accident."""
        return Cause(Why.PEER_LOST, Stage.COPY, self.process.instance, -1, text)


def address_of(instance: str) -> str:
    """The address of an instance's coordinator, before and after a restart."""
    return f"{instance}:1"


@dataclass(slots=True)
class SimRegistry:
    """The addresses of the coordinators that serve."""

    network: Network
    addresses: dict[str, str] = field(default_factory=dict)
    is_up: bool = True

    def register(self, host: Host) -> None:
        name = host.process.instance
        self.addresses[name] = address_of(name)
        self.network.context.note(host.name, "serving")

    def answer(self, asker: Host, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Answers a look-up."""
        address = self.addresses.get(instance) if self.is_up else None
        if address is not None:
            asker.enter(then, address, "")
            return
        self.network.note_loss(asker.process.instance, instance)
        is_unknown = f"instance {instance} is not registered"
        asker.enter(then, None, is_unknown if self.is_up else "the registry does not answer")


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
    """Whether the handshake is done."""
    arrival_s: float = 0.0
    """When the last frame that this end sent arrives."""
    sent: list[Message] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, str]:
        """The instance of this end, and that of the other."""
        assert self.peer is not None
        return self.host.process.instance, self.peer.host.process.instance

    def send(self, message: Message) -> None:
        if self.is_open and self.link.is_standing:
            self._notify("sent", message)
            if isinstance(message, Refused | Goodbye):
                self.network.note_loss(*self.names)
            self.sent.append(message)
            self.network.send_frame(self, self.link.send(message), message)

    def hang_up(self) -> None:
        if self.is_open:
            self.is_open = False
            self.network.hang_up(self)

    def receive(self, data: bytes) -> None:
        if not self.is_open:
            return
        for event in self.link.receive(data, self.host.now()):
            self._on_event(event)
        self._reply()

    def deliver(self, message: Message) -> None:
        """Hands a message to the driver."""
        driver = self.host.driver
        if self.is_open and self.is_linked and driver is not None:
            self._notify("received", message)
            self._call_driver(driver.received, self.number, message)

    def _notify(self, event: str, message: Message) -> None:
        context = self.network.context
        if context.trace.is_on:
            transfer = getattr(message, "transfer", "")
            context.note(self.host.name, event, transfer, type(message).__name__)
        context.notify(f"on_{event}", self, message)

    def _call_driver(self, call: Callable[..., None], *args: Any) -> None:
        """Calls the driver; a peer that broke the protocol loses the link."""
        try:
            self.host.enter(call, *args)
        except RemoteProtocolError as error:
            for event in self.link.refuse(str(error), self.host.now()):
                self._on_event(event)
            self._reply()

    def expire(self) -> None:
        """The time for the handshake is over."""
        if self.is_open and not self.is_linked:
            for event in self.link.expire(self.host.now()):
                self._on_event(event)
            self._reply()
        if self.is_open and not self.is_linked:
            # The host's clock is slow: by that clock the time is not over yet.
            self.host.process.call_after(EXPIRE_RETRY_S, self.expire)

    def lose(self, cause: Cause | str) -> None:
        """The link is gone; tells the driver if it knew of the link."""
        if not self.is_open:
            return
        self.is_open = False
        self.host.links.pop(self.number, None)
        driver = self.host.driver
        if (self.is_linked or self.link.handshake.is_dialler) and driver is not None:
            known = cause if isinstance(cause, Cause) else self.host.link_lost(cause)
            if self.peer is not None:
                self.network.note_loss(*self.names)
            self.network.context.note(self.host.name, "lost", detail=str(known))
            self.host.enter(driver.lost, self.number, known)

    def _reply(self) -> None:
        if replies := self.link.replies():
            self.network.send_frame(self, replies)

    def _on_event(self, event: Message | Established | Ended) -> None:
        driver = self.host.driver
        assert driver is not None
        match event:
            case Established(introduction, channel):
                self.is_linked = True
                self.host.links[self.number] = self
                peer = self.peer.host.name if self.peer else ""
                self.network.context.note(self.host.name, "linked", detail=peer)
                self._reply()
                self._call_driver(driver.linked, self.number, introduction, channel)
            case Ended(cause):
                self._reply()
                self.network.hang_up(self)
                self.lose(cause)
            case _:
                self.deliver(event)


@dataclass(slots=True, eq=False)
class MemberEnd:
    """One end of a member link."""

    host: Host
    number: int
    delay_s: float
    peer: MemberEnd | None = None
    is_open: bool = True
    arrival_s: float = 0.0

    def send(self, message: Message) -> None:
        if not self.is_open or self.peer is None:
            return
        context = self.host.context
        if context.trace.is_on:
            transfer = getattr(message, "transfer", "")
            context.note(self.host.name, "member", transfer, type(message).__name__)
        context.notify("on_member_sent", self.host, message)
        delay_s = self.delay_s * (0.5 + self.host.rng.random())
        self.arrival_s = max(self.arrival_s, context.schedule.now + delay_s)
        context.schedule.at(self.arrival_s, self.peer.host.process.call, self.peer.receive, encode(message))

    def hang_up(self) -> None:
        self.is_open = False
        if self.peer is not None:
            schedule = self.host.context.schedule
            moment = max(self.arrival_s, schedule.now + self.delay_s)
            schedule.at(moment, self.peer.host.process.call, self.peer.lose, "hung up")

    def receive(self, body: bytes) -> None:
        driver = self.host.driver
        if self.is_open and driver is not None:
            self.host.enter(driver.received, self.number, decode(body))

    def lose(self, text: str) -> None:
        driver = self.host.driver
        if self.is_open and driver is not None:
            self.is_open = False
            self.host.links.pop(self.number, None)
            self.host.enter(driver.lost, self.number, self.host.link_lost(text))


def join_member(rank: Host, coordinator: Host, delay_s: float) -> None:
    """Makes a member link, with the production handshake at once; what is refused there becomes no link."""
    network, channel = rank.network, coordinator.token(16)
    nonces = rank.context.rng(f"member/{rank.name}")
    links = [
        Link(dialling(network.parties[rank.name], rank.process.instance, nonces.randbytes(NONCE_BYTES), INF)),
        Link(accepting(network.parties[coordinator.name], nonces.randbytes(NONCE_BYTES), channel, INF)),
    ]
    established: dict[int, Introduction] = {}
    data, receiver = links[0].begin(0.0), 1
    while data:
        for event in links[receiver].receive(data, 0.0):
            if isinstance(event, Established):
                established[receiver] = event.introduction
        data, receiver = links[receiver].replies(), 1 - receiver
    if len(established) < len(links):
        rank.process.call_after(delay_s, rank.end, "the coordinator refused this rank at the handshake")
        return
    ends = [MemberEnd(host, host.new_link(), delay_s) for host in (rank, coordinator)]
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    for index, end in enumerate(ends):
        introduction = established[index]
        end.host.links[end.number] = end
        end.host.process.at_death.append(end.hang_up)
        driver = end.host.driver
        assert driver is not None
        end.host.process.call_after(delay_s, end.host.enter, driver.linked, end.number, introduction, channel)


@dataclass(slots=True, eq=False)
class SimFrame:
    """One frame on its way."""

    sender: SessionEnd
    receiver: SessionEnd
    data: bytes
    message: Message | None
    """None for a frame of a handshake."""
    arrivals: list[float]
    """When it arrives; none if it is lost, several if it is duplicated."""
    is_ordered: bool = True


class Network:
    """All session links of a seed."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.rng = context.rng("network")
        self.registry = SimRegistry(self)
        self.faults: list[Callable[[SimFrame], None]] = []
        """Each may change the arrivals of a frame that was just sent."""
        self.listeners: dict[str, Host] = {}
        """By address; the last to listen has it."""
        self.parties: dict[str, Party] = {}
        """By the name of a host: what it says in a handshake."""
        self.ends: list[SessionEnd] = []
        self.cuts: set[tuple[str, str]] = set()
        """Ordered pairs of instances between which nothing passes."""
        self.loss_s: dict[frozenset[str], float] = {}
        """By pair of instances: when they last lost a frame or a link."""
        self.job_s = 0.0002
        """How long a job that a driver runs aside takes at most, and its result as long again."""
        self.slowest_s = 0.0
        """The longest that a frame took."""
        self.past: deque[tuple[str, str, Message]] = deque(maxlen=200)
        """Messages of links that are gone, with sender and receiver."""

    def dial(self, host: Host, number: int, address: str, instance: str) -> None:
        """Begins a session link from a host."""
        party = self.parties[host.name]
        deadline = host.now() + HANDSHAKE_S
        link = Link(dialling(party, instance, host.token(NONCE_BYTES), deadline), _plain)
        host.process.call_after(LATENCY_S, self._connect, SessionEnd(self, host, number, link), address)

    def _connect(self, end: SessionEnd, address: str) -> None:
        host = self.listeners.get(address)
        if host is None or not host.process.is_alive:
            end.host.process.call(end.lose, f"nobody listens at {address}")
            return
        nonce, channel = host.token(NONCE_BYTES), host.token(CHANNEL_BYTES)
        party = self.parties[host.name]
        link = Link(accepting(party, nonce, channel, host.now() + HANDSHAKE_S), _plain)
        accepted = SessionEnd(self, host, host.new_link(), link, peer=end)
        end.peer = accepted
        self.ends += [end, accepted]
        self.send_frame(end, end.link.begin(end.host.now()))
        for side in (end, accepted):
            side.host.process.call_after(HANDSHAKE_S * 1.01, side.expire)

    def send_frame(self, sender: SessionEnd, data: bytes, message: Message | None = None) -> None:
        receiver = sender.peer
        if receiver is None:
            return
        now = self.context.schedule.now
        frame = SimFrame(sender, receiver, data, message, [now + LATENCY_S * (0.5 + self.rng.random())])
        for fault in self.faults:
            fault(frame)
        if not frame.arrivals:
            self.note_loss(*sender.names)
        elif frame.is_ordered:
            frame.arrivals = [max(arrival, sender.arrival_s) for arrival in frame.arrivals]
            sender.arrival_s = max(frame.arrivals)
        for arrival in frame.arrivals:
            self.slowest_s = max(self.slowest_s, arrival - now)
            self.context.schedule.at(arrival, self._arrive, frame)

    def _arrive(self, frame: SimFrame) -> None:
        if frame.sender.names in self.cuts:
            self.note_loss(*frame.sender.names)
        else:
            frame.receiver.host.process.call(frame.receiver.receive, frame.data)

    def hang_up(self, end: SessionEnd) -> None:
        """The other end gets the hang-up after what was sent."""
        if end.peer is not None:
            moment = max(end.arrival_s, self.context.schedule.now + LATENCY_S)
            self.context.schedule.at(moment, self._close_peer, end)

    def _close_peer(self, end: SessionEnd) -> None:
        assert end.peer is not None
        if end.names in self.cuts:
            self.context.schedule.after(CLOSED_S, self._close_peer, end)
        else:
            end.peer.host.process.call(end.peer.lose, "the other end hung up")

    def sever(self, end: SessionEnd) -> None:
        """Breaks a connection under both ends."""
        assert end.peer is not None
        self.note_loss(*end.names)
        for side in (end, end.peer):
            self._keep(side)
            side.host.process.call_after(CLOSED_S * self.rng.random(), side.lose, "the connection broke")

    def on_death(self, host: Host) -> None:
        """The process of a host is gone: its links break."""
        for end in self.ends:
            if end.host is host and end.is_open and end.peer is not None:
                end.is_open = False
                self.note_loss(*end.names)
                self._keep(end)
                self._keep(end.peer)
                delay_s = CLOSED_S * self.rng.random()
                end.peer.host.process.call_after(delay_s, end.peer.lose, "the other process is gone")

    def _keep(self, end: SessionEnd) -> None:
        self.past.extend((*end.names, message) for message in end.sent[-NUM_KEPT:])

    def standing(self) -> list[SessionEnd]:
        """The dialler's end of every link that is up."""
        self.ends = [end for end in self.ends if end.is_open]
        return [end for end in self.ends if end.is_linked and end.link.handshake.is_dialler]

    def note_loss(self, name: str, other: str) -> None:
        """Two instances have just lost something, or could not reach each other."""
        self.loss_s[frozenset((name, other))] = self.context.schedule.now


def _plain(secure: Secure) -> Codec:
    return Plain(secure.channel)
