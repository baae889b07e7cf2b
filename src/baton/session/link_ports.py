"""What one driver of a loop sees: its own links under its own numbers, and the loop's clock and workers."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.errors import LocalProtocolError, RemoteProtocolError
from baton.protocol.messages import AnyMessage, Grant, Introduction, Open
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.peer import NONCE_BYTES, Party, accepting, dialling
from baton.protocol.wire import CHANNEL_BYTES
from baton.session.link_sockets import SocketLink, Sockets
from baton.session.link_turns import Turns
from baton.session.links import Established, Link
from baton.session.ports import Driven

LOCAL = "local"
"""The address of the coordinator in the same loop: a link without a socket."""
LONG = (Open, Grant)
"""What keeps a rank busy: those in other processes hear of it before the one in this loop begins."""
TICK_S_MIN = 0.0005
"""A driver that wants to be called at once, again and again, does not keep the loop from its sockets."""


class Directory(Protocol):
    """Where instances find each other; called on the loop."""

    async def look_up(self, instance: str) -> str:
        """The address of an instance's coordinator; raises with the reason if there is none."""

    async def serve(self, address: str) -> None:
        """Makes the coordinator of this loop known; if that raises, the instance ends."""

    async def close(self) -> None:
        """The loop is about to end."""


class Channel(Protocol):
    """A link as its driver's ports see it."""

    def send(self, message: AnyMessage) -> None:
        """Queues a message."""

    def hang_up(self) -> None:
        """Closes after what is queued."""

    def refuse(self, text: str) -> None:
        """Ends it because of what the peer sent."""


@dataclass(frozen=True, slots=True)
class World:
    """What all drivers of a loop share."""

    turns: Turns
    sockets: Sockets
    workers: Executor
    directory: Directory
    ends: list[DriverPorts]


class DriverPorts:
    """The `Ports` of one driver."""

    def __init__(self, world: World, party: Party) -> None:
        self.party = party
        self.driver: Driven | None = None
        self.world = world
        self._links: dict[int, Channel] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = -TICK_S_MIN

    # What the driver asks.

    def now(self) -> float:
        """The clock that asyncio uses too."""
        return time.monotonic()

    def token(self, num_bytes: int) -> bytes:
        """From the system's source."""
        return secrets.token_bytes(num_bytes)

    def dial(self, address: str, instance: str) -> int:
        """Begins a link of the purpose that this end dials for."""
        number = next(self._numbers)
        if address == LOCAL:
            self._links[number] = near = LocalLink(self, number)
            self.world.turns.later(partial(self._join, near, instance))
            return number
        link = SocketLink(self, self.world.sockets, number, instance)
        self._links[number] = link
        self.world.sockets.dial(link, address)
        return number

    def send(self, link: int, message: AnyMessage) -> None:
        """Queues a message."""
        if (channel := self._links.get(link)) is not None:
            channel.send(message)

    def hang_up(self, link: int) -> None:
        """Closes after what is queued."""
        if (channel := self._links.pop(link, None)) is not None:
            channel.hang_up()

    def run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        """Runs a job on a worker."""
        self.world.workers.submit(job).add_done_callback(partial(self._ran, then))

    def look_up(self, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Asks the directory."""
        self.world.turns.spawn(self.world.directory.look_up(instance), partial(_looked_up, then))

    def post(self, call: Callable[[], None]) -> None:
        """From any thread: calls back in a turn."""
        self.world.turns.post(call)

    def serving(self) -> None:
        """The coordinator may be made known."""
        address = self.world.sockets.address
        self.world.turns.spawn(self.world.directory.serve(address), asyncio.Task.result)

    def end(self, cause: str) -> None:
        """The instance is over."""
        self.world.turns.end(cause)

    # What links tell.

    def shake_hands(self, wanted: str | None, deadline: float) -> Link:
        """A new link, with fresh randomness."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        if wanted is not None:
            return Link(dialling(self.party, wanted, nonce, deadline))
        return Link(accepting(self.party, nonce, secrets.token_bytes(CHANNEL_BYTES), deadline))

    def established(self, link: SocketLink, what: Established) -> None:
        """A socket's link stands; one that was accepted gets its number."""
        if link.number < 0:
            link.number = self.adopt(link)
        self.linked(link.number, what.introduction, what.channel)

    def arrived(self, link: SocketLink, message: AnyMessage) -> None:
        """A message came by a socket."""
        self.take(link.number, message)

    def over(self, link: SocketLink, cause: Cause) -> None:
        """A socket's link is gone."""
        self.drop(link.number, cause)

    def lost_peer(self, text: str) -> Cause:
        """That a peer is gone, as this end says it."""
        said = self.party.introduction
        return Cause(Why.PEER_LOST, Stage.HANDSHAKE, said.instance, said.rank, text)

    def adopt(self, channel: Channel) -> int:
        """A number for a link that the other end began."""
        number = next(self._numbers)
        self._links[number] = channel
        return number

    def linked(self, number: int, peer: Introduction, channel: bytes) -> None:
        """Tells the driver of a link."""
        assert self.driver is not None
        self.world.turns.step(self._confined, number, self.driver.linked, peer, channel)

    def take(self, number: int, message: AnyMessage) -> None:
        """Tells the driver of a message."""
        assert self.driver is not None
        self.world.turns.step(self._confined, number, self.driver.received, message)

    def drop(self, number: int, cause: Cause) -> None:
        """Tells the driver that a link is gone, unless it hung up itself."""
        assert self.driver is not None
        if self._links.pop(number, None) is not None:
            self.world.turns.step(self.driver.lost, number, cause)

    def arm(self) -> None:
        """Sees to it that the driver's next tick comes; a timer that is early enough is left as it is."""
        assert self.driver is not None
        when = self.driver.next_tick()
        if when is None:
            return
        when = max(when, self._ticked_s + TICK_S_MIN)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self.world.turns.clock.call_at(when, self._ring)

    def disarm(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self.world.turns.step(self._tick_if_due)

    def _tick_if_due(self) -> None:
        assert self.driver is not None
        when = self.driver.next_tick()
        if when is not None and when <= self.now():
            self.driver.tick()
            self._ticked_s = self.now()

    def _ran(self, then: Callable[[object], None], job: Future[object]) -> None:
        if not job.cancelled():
            self.world.turns.post(partial(then, job.exception() or job.result()))

    def _confined(self, number: int, call: Callable[..., None], *arguments: object) -> None:
        """Calls the driver about a link that is still there; a peer that it finds at fault loses the link."""
        if (channel := self._links.get(number)) is None:
            return
        try:
            call(number, *arguments)
        except RemoteProtocolError as error:
            channel.refuse(str(error))

    def _join(self, near: LocalLink, instance: str) -> None:
        """Links this driver with the one of its loop that accepts such links."""
        if near.number not in self._links:
            return
        far = next((end for end in self.world.ends if self.party.dials in end.party.accepts), None)
        if far is None or instance not in ("", far.party.instance):
            self.drop(near.number, self.lost_peer(f"no coordinator of {instance} in this process"))
            return
        near.far = far_link = LocalLink(far)
        far_link.far, far_link.number = near, far.adopt(far_link)
        channel = secrets.token_bytes(CHANNEL_BYTES)
        far.linked(far_link.number, self.party.introduction, channel)
        self.linked(near.number, far.party.introduction, channel)


class LocalLink:
    """One end of a link inside a loop: messages are handed over as they are."""

    def __init__(self, owner: DriverPorts, number: int = -1) -> None:
        self.owner = owner
        self.number = number
        self.far: LocalLink | None = None

    def send(self, message: AnyMessage) -> None:
        """Queues a message."""
        far = self.far
        if far is None:
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is not there; wait for `linked`"
            )
        turns = self.owner.world.turns
        if isinstance(message, LONG):
            turns.later(turns.flush)
        turns.later(partial(far.owner.take, far.number, message))

    def hang_up(self) -> None:
        """Closes after what is queued."""
        if (far := self.far) is not None:
            cause = far.owner.lost_peer("the peer closed the link")
            self.owner.world.turns.later(partial(far.owner.drop, far.number, cause))

    def refuse(self, text: str) -> None:
        """Ends the link at both ends."""
        said = self.owner.party.introduction
        cause = Cause(Why.REFUSED_VERSION, Stage.HANDSHAKE, said.instance, said.rank, text)
        self.owner.drop(self.number, cause)
        if self.far is not None:
            self.far.owner.drop(self.far.number, cause)


def _looked_up(then: Callable[[str | None, str], None], task: asyncio.Task[str]) -> None:
    error = task.exception()
    if error is None:
        then(task.result(), "")
    else:
        then(None, str(error) or type(error).__name__)
