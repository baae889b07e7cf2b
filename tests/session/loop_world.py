"""Real loops with drivers that only remember, and strangers with bare sockets."""

import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.session.link_ends import PREFILL

from baton.errors import BatonError
from baton.protocol.handshake import Party
from baton.protocol.messages import Introduction, Message
from baton.protocol.outcomes import Cause
from baton.session.links import Link, SocketConfig
from baton.session.loop import DriverLoop, DriverPorts
from baton.transport.base import Completion

PATIENCE_S = 60.0
"""How long a test waits for what has to come; never for what must not."""
PATIENT = SocketConfig(connect_s=PATIENCE_S, handshake_s=PATIENCE_S)


class Recorder:
    """A driver that remembers what it was told; `on_message` may do more."""

    def __init__(self, ports: DriverPorts) -> None:
        self.ports = ports
        self.told: list[tuple[Any, ...]] = []
        self.causes: list[Cause] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self.on_message: Callable[[int, Message], None] = lambda link, message: None
        self.next_tick_s: float | None = None
        self.on_tick: Callable[[], None] = lambda: None

    def note(self, *what: Any) -> None:
        with self.changed:
            self.told.append(what)
            self.threads.add(threading.get_ident())
            self.changed.notify_all()

    def linked(self, link: int, peer: Introduction, channel: bytes) -> None:
        self.note("linked", link, peer, channel)

    def received(self, link: int, message: Message) -> None:
        self.note("received", link, message)
        self.on_message(link, message)

    def lost(self, link: int, cause: Cause) -> None:
        self.causes.append(cause)
        self.note("lost", link, cause.text)

    def on_completion(self, event: Completion) -> None:
        self.note("completion", event)

    def tick(self) -> None:
        self.note("tick", self.ports.now())
        self.on_tick()

    def next_tick(self) -> float | None:
        return self.next_tick_s

    def wait(self, kind: str, count: int = 1) -> list[tuple[Any, ...]]:
        """The first `count` of a kind of events, as soon as they are there."""

        def found() -> list[tuple[Any, ...]]:
            return [what[1:] for what in self.told if what[0] == kind]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= count, PATIENCE_S), (kind, self.told)
        return found()[:count]

    def messages(self, count: int) -> list[Message]:
        return [message for _, message in self.wait("received", count)]


class NoDirectory:
    """A directory that finds nobody."""

    async def look_up(self, instance: str) -> str:
        raise BatonError(f"nobody knows {instance}")

    async def serve(self, address: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Ended:
    """An `on_end` that remembers."""

    def __init__(self) -> None:
        self.causes: list[str] = []
        self.event = threading.Event()

    def __call__(self, cause: str) -> None:
        self.causes.append(cause)
        self.event.set()

    def wait(self) -> str:
        assert self.event.wait(PATIENCE_S)
        return self.causes[0]


class Loops:
    """Loops that are closed at the end, and a look at what they left behind."""

    def __init__(self) -> None:
        self.made: list[DriverLoop] = []
        self.socks: list[socket.socket] = []
        self.ended: dict[DriverLoop, Ended] = {}
        gc.collect()
        self.before = fds() | threads()

    def make(self, *parties: Party, config: SocketConfig | None = None, **options: Any) -> tuple[Any, ...]:
        """A started loop and a recorder per party."""
        ended = Ended()
        options = {"on_end": ended, "directory": NoDirectory(), **options}
        loop = DriverLoop(config or PATIENT, **options)
        self.made.append(loop)
        self.ended[loop] = ended
        drivers = []
        for party in parties:
            ports = loop.ports(party)
            drivers.append(Recorder(ports))
            loop.add(ports, drivers[-1])
        loop.start()
        return loop, *drivers

    def dial(self, loop: DriverLoop, driver: Recorder, address: str, instance: str = "prefill") -> None:
        loop.post(lambda: driver.note("dialled", driver.ports.dial(address, instance)))

    def pair(self, dialler: Party, acceptor: Party = PREFILL, **options: Any) -> tuple[Any, Any, int, int]:
        """Two drivers of two loops, linked, and the number of the link at each."""
        far_loop, far = self.make(acceptor, **options)
        near_loop, near = self.make(dialler, **options)
        self.dial(near_loop, near, far_loop.address)
        return near, far, near.wait("linked")[0][0], far.wait("linked")[0][0]

    def connect(self, address: str) -> socket.socket:
        """A bare socket; somebody who has proven nothing."""
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socks.append(sock)
        return sock

    def close(self) -> None:
        for sock in self.socks:
            sock.close()
        for loop in self.made:
            loop.close()
        self.made.clear()
        self.ended.clear()
        gc.collect()
        limit_s = time.monotonic() + PATIENCE_S
        # A thread that has no more work may not have run yet.
        while left := (fds() | threads()) - self.before:
            assert time.monotonic() < limit_s, left
            time.sleep(0.01)


def opened() -> Iterator[Loops]:
    """The body of a fixture."""
    made = Loops()
    yield made
    made.close()


def fds() -> set[str]:
    """Open sockets and polls of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            place = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if place.startswith(("socket:", "anon_inode:")):
            found.add(place + name)
    return found


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith(("baton", "asyncio"))}


def hear(sock: socket.socket, num_bytes: int | None = None) -> bytes:
    """Everything until the other end closes, or this many bytes."""
    heard = b""
    try:
        while (num_bytes is None or len(heard) < num_bytes) and (data := sock.recv(65536)):
            heard += data
    except ConnectionResetError:
        pass
    return heard


def converse(sock: socket.socket, link: Link) -> Link:
    """Takes a link through its handshake over a bare socket."""
    sock.sendall(link.begin(0.0))
    while not (link.is_standing or link.is_ended):
        data = sock.recv(65536)
        assert data, "hung up on"
        link.receive(data, 0.0)
        sock.sendall(link.replies())
    return link
