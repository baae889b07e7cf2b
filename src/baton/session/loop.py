"""The production world of drivers: one thread with an asyncio loop.

It listens, dials and shakes hands; passes messages, completions of the data transport and the time to
drivers; and runs their jobs on workers. A peer that misbehaves loses its link. A driver that fails, or a loop
that dies, ends the instance with an error: nothing is recovered in place.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Protocol

from baton.errors import ConfigError, LocalProtocolError
from baton.protocol.handshake import NONCE_BYTES, Party, accepting, dialling
from baton.protocol.messages import Grant, Introduction, Message, Open
from baton.protocol.outcomes import Cause, Stage, Why
from baton.protocol.wire import CHANNEL_BYTES
from baton.session.event_loop import EventLoop, PassLoop
from baton.session.links import Link, SocketConfig, SocketLink, Sockets
from baton.session.ports import Driver
from baton.transport.base import Completion, Transport

LOCAL = "local"
"""The address of the coordinator in the same loop: a link without a socket."""
LONG = (Open, Grant)
"""Messages that keep a rank busy: they reach other processes before the rank in this loop begins."""
TICK_S_MIN = 0.0005
"""A driver that wants its ticks at once, again and again, does not keep the loop from its sockets."""


def exit_loudly(cause: str) -> None:
    """Ends the process at once, with one line that says why."""
    sys.stderr.write(f"baton: this instance ends: {cause}\n")
    sys.stderr.flush()
    os._exit(1)


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

    def send(self, message: Message) -> None:
        """Queues a message."""

    def hang_up(self) -> None:
        """Closes after what is queued."""

    def refuse(self, text: str) -> None:
        """Ends it because of what the peer sent."""


class DriverPorts:
    """The `Ports` of one driver: its own links under its own numbers, and the loop's clock and workers."""

    def __init__(
        self,
        party: Party,
        events: EventLoop,
        sockets: Sockets,
        workers: Executor,
        directory: Directory,
        siblings: list[DriverPorts],
    ) -> None:
        self.party = party
        self.driver: Driver | None = None
        self.events = events
        self.post = events.post
        self._sockets = sockets
        self._workers = workers
        self._directory = directory
        self._siblings = siblings
        """The ports of all drivers of the loop."""
        self._links: dict[int, Channel] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = -TICK_S_MIN

    # Calls of the driver.

    def now(self) -> float:
        """The clock that asyncio uses too."""
        return time.monotonic()

    def token(self, num_bytes: int) -> bytes:
        """From the system's source."""
        return secrets.token_bytes(num_bytes)

    def introduce_as(self, introduction: Introduction) -> None:
        """Of links that begin later."""
        self.party = replace(self.party, introduction=introduction)

    def dial(self, address: str, instance: str) -> int:
        """Begins a link of the purpose that this end dials for."""
        number = next(self._numbers)
        if address == LOCAL:
            self._links[number] = near = LocalLink(self, number)
            self.events.later(partial(self._join, near, instance))
            return number
        link = SocketLink(self, self._sockets, number, instance)
        self._links[number] = link
        self._sockets.dial(link, address)
        return number

    def send(self, link: int, message: Message) -> None:
        """Queues a message."""
        if (channel := self._links.get(link)) is not None:
            channel.send(message)

    def hang_up(self, link: int) -> None:
        """Closes after what is queued."""
        if (channel := self._links.pop(link, None)) is not None:
            channel.hang_up()

    def run(self, job: Callable[[], object], then: Callable[[object], None]) -> None:
        """Runs a job on a worker."""
        self._workers.submit(job).add_done_callback(partial(self._on_job_ended, then))

    def _on_job_ended(self, then: Callable[[object], None], job: Future[object]) -> None:
        if not job.cancelled():
            self.post(partial(then, job.exception() or job.result()))

    def look_up(self, instance: str, then: Callable[[str | None, str], None]) -> None:
        """Asks the directory."""
        self.events.spawn(self._directory.look_up(instance), partial(_looked_up, then))

    def serving(self) -> None:
        """The coordinator may be made known."""
        self.events.spawn(self._directory.serve(self._sockets.address), asyncio.Task.result)

    def end(self, cause: str) -> None:
        """The instance is over."""
        self.events.end(cause)

    # Events of links.

    def shake_hands(self, wanted: str | None, deadline: float) -> Link:
        """A new link, with fresh randomness."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        if wanted is not None:
            return Link(dialling(self.party, wanted, nonce, deadline))
        return Link(accepting(self.party, nonce, secrets.token_bytes(CHANNEL_BYTES), deadline))

    def adopt(self, channel: Channel) -> int:
        """A number for a link that the other end began."""
        number = next(self._numbers)
        self._links[number] = channel
        return number

    def linked(self, number: int, peer: Introduction, channel: bytes) -> None:
        """Passes a new link to the driver; if the driver rejects the peer, the link is closed."""
        assert self.driver is not None
        if (link := self._links.get(number)) is not None:
            self.events.step(self.driver.linked, number, peer, channel, refuse=link.refuse)

    def on_message(self, number: int, message: Message) -> None:
        """Passes a message to the driver, unless the link is gone."""
        assert self.driver is not None
        if (link := self._links.get(number)) is not None:
            self.events.step(self.driver.received, number, message, refuse=link.refuse)

    def on_lost(self, number: int, cause: Cause) -> None:
        """Reports a lost link to the driver, unless the driver hung up itself."""
        assert self.driver is not None
        if self._links.pop(number, None) is not None:
            self.events.step(self.driver.lost, number, cause)

    def peer_lost(self, text: str) -> Cause:
        """The cause, at this end, of a lost peer."""
        own = self.party.introduction
        return Cause(Why.PEER_LOST, Stage.HANDSHAKE, own.instance, own.rank, text)

    def _join(self, near: LocalLink, instance: str) -> None:
        """Links this driver with the one of its loop that accepts such links."""
        if near.number not in self._links:
            return
        far = next((ports for ports in self._siblings if self.party.dials in ports.party.accepts), None)
        if far is None or instance not in ("", far.party.instance):
            self.on_lost(near.number, self.peer_lost(f"no coordinator of {instance} in this process"))
            return
        near.far = far_link = LocalLink(far)
        far_link.far, far_link.number = near, far.adopt(far_link)
        channel = secrets.token_bytes(CHANNEL_BYTES)
        far.linked(far_link.number, self.party.introduction, channel)
        self.linked(near.number, far.party.introduction, channel)

    # Time.

    def arm(self) -> None:
        """Schedules the driver's next tick; a timer that is early enough is left as it is."""
        assert self.driver is not None
        when = self.driver.next_tick()
        if when is None:
            return
        when = max(when, self._ticked_s + TICK_S_MIN)
        if self._timer is not None:
            if self._timer.when() <= when:
                return
            self._timer.cancel()
        self._timer = self.events.clock.call_at(when, self._on_timer)

    def disarm(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.events.step(self._tick_if_due)

    def _tick_if_due(self) -> None:
        assert self.driver is not None
        when = self.driver.next_tick()
        if when is not None and when <= self.now():
            self.driver.tick()
            self._ticked_s = self.now()


class LocalLink:
    """One end of a link inside a loop: messages are passed as objects."""

    def __init__(self, ports: DriverPorts, number: int = -1) -> None:
        self.ports = ports
        self.number = number
        self.far: LocalLink | None = None

    def send(self, message: Message) -> None:
        """Queues a message."""
        far = self.far
        if far is None:
            raise LocalProtocolError(
                f"{type(message).__name__} on a link that is not there; wait for `linked`"
            )
        events = self.ports.events
        if isinstance(message, LONG):
            events.later(events.flush)
        events.later(partial(far.ports.on_message, far.number, message))

    def hang_up(self) -> None:
        """Closes after what is queued."""
        if (far := self.far) is not None:
            cause = far.ports.peer_lost("the peer closed the link")
            self.ports.events.later(partial(far.ports.on_lost, far.number, cause))

    def refuse(self, text: str) -> None:
        """Ends the link at both ends."""
        own = self.ports.party.introduction
        cause = Cause(Why.REFUSED_VERSION, Stage.HANDSHAKE, own.instance, own.rank, text)
        self.ports.on_lost(self.number, cause)
        if self.far is not None:
            self.far.ports.on_lost(self.far.number, cause)


class DriverLoop:
    """Runs drivers: first `ports` and `add` for each, then `start`; `close` from any thread."""

    def __init__(
        self,
        config: SocketConfig,
        *,
        directory: Directory,
        on_end: Callable[[str], None] = exit_loudly,
        num_workers: int = 1,
    ) -> None:
        self._events = EventLoop(on_end)
        self._workers = ThreadPoolExecutor(num_workers, thread_name_prefix="baton-worker")
        self._sockets = Sockets(config, self._events)
        self._directory = directory
        self._ports: list[DriverPorts] = []
        self._watched: list[tuple[Transport, Callable[[Completion], None]]] = []
        self._thread = threading.Thread(target=self._run, name="baton-loop", daemon=True)
        self._started: Future[None] = Future()
        self.post = self._events.post
        """From any thread: calls in the loop, as if a driver had been called; after the end, does nothing."""

    @property
    def address(self) -> str:
        """Where it listens, once started; empty if no driver accepts links."""
        return self._sockets.address

    def ports(self, party: Party) -> DriverPorts:
        """The ports to build a driver of this party with."""
        return DriverPorts(party, self._events, self._sockets, self._workers, self._directory, self._ports)

    def add(self, ports: DriverPorts, driver: Driver) -> None:
        """Runs a driver behind its ports; before `start`."""
        self._check_new()
        if ports.party.accepts and any(other.party.accepts for other in self._ports):
            raise LocalProtocolError("a loop has one driver that accepts links; give the other its own loop")
        ports.driver = driver
        self._ports.append(ports)
        self._events.after_pass.append(ports.arm)

    def watch(self, transport: Transport, on_completion: Callable[[Completion], None]) -> None:
        """Passes the events of a data transport to a driver; before `start`."""
        self._check_new()
        self._watched.append((transport, on_completion))

    def start(self) -> None:
        """Begins; raises if it cannot listen."""
        self._check_new()
        self._thread.start()
        self._started.result()

    def close(self) -> None:
        """Sends what is queued, then ends links, workers and the thread."""
        if self._thread.ident is None:
            self._workers.shutdown()
            return
        self._events.post(self._events.stopped.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_new(self) -> None:
        if self._thread.ident is not None:
            raise LocalProtocolError("the loop was started already; add drivers before `start`")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: PassLoop(self._events.end_pass)) as runner:
                runner.run(self._serve())
        finally:
            self._events.die()
            if not self._started.done():
                self._started.set_exception(LocalProtocolError("the control loop died before it ran"))
            self._workers.shutdown(cancel_futures=True)

    async def _serve(self) -> None:
        events, aio = self._events, asyncio.get_running_loop()
        events.aio = aio
        acceptor = next((ports for ports in self._ports if ports.party.accepts), None)
        try:
            if acceptor is not None:
                await self._sockets.listen(acceptor)
        except ConfigError as error:
            events.close()
            self._started.set_exception(error)
            return
        for transport, on_completion in self._watched:
            aio.add_reader(transport.fileno(), partial(events.step, _poll, transport, on_completion))
        self._started.set_result(None)
        events.open(aio)
        await events.stopped.wait()
        events.close()
        for transport, _ in self._watched:
            aio.remove_reader(transport.fileno())
        for ports in self._ports:
            ports.disarm()
        await self._sockets.close()
        await self._directory.close()


def _poll(transport: Transport, on_completion: Callable[[Completion], None]) -> None:
    for event in transport.poll():
        on_completion(event)


def _looked_up(then: Callable[[str | None, str], None], task: asyncio.Task[str]) -> None:
    error = task.exception()
    if error is None:
        then(task.result(), "")
    else:
        then(None, str(error) or type(error).__name__)
