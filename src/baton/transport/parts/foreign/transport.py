"""A transport over a foreign library: one listener, and the two halves of every connection."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from baton.errors import ConfigError, TransportError
from baton.transport.base import Counters, Description, Peer, Region
from baton.transport.parts.endpoint import Endpoint
from baton.transport.parts.foreign.library import Library
from baton.transport.parts.foreign.source import Source
from baton.transport.parts.foreign.target import House, Writer
from baton.transport.parts.proof import Hello
from baton.transport.parts.tally import Tally
from baton.transport.parts.watcher import Watcher
from baton.transport.tcp.porch import Porch


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a target listens for its peers; the library's own ports are the library's choice."""

    host: str = "127.0.0.1"
    """The one address of this machine that peers use."""
    port: int = 0
    """0 takes any free one."""

    def __post_init__(self) -> None:
        """Refuses what cannot be listened on."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port {self.port}: use 0 to 65535")
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"host '{self.host}': give the one address at which peers reach this machine")


class ForeignTransport(Endpoint):
    """One opened transport over a foreign library."""

    def __init__(self, library: Library, listening: Listening) -> None:
        super().__init__()
        self.library = library
        self.listening = listening
        self.watcher = Watcher(f"{self.name}-{self.incarnation}")
        self.tally = Tally()
        self.house = House(library, self.regions, self.mailbox, self.tally)
        self.porch: Porch | None = None

    def reach(self, peer: Peer, description: Description) -> Source:
        """Begins a connection."""
        source = Source(peer, self.tickets, self.watcher, self.library)
        source.open(description)
        return source

    def admit(self, peer: Peer, secret: str) -> Writer:
        """Makes ready for one more writer."""
        if self.porch is None:
            self.porch = Porch(self._listen(), self.watcher, self._find_writer, self.tally)  # type: ignore[arg-type]
        return Writer(peer, secret, self.house)

    def address(self) -> str:
        """Host and port of the listener."""
        assert self.porch is not None
        return f"{self.listening.host}:{self.porch.listener.getsockname()[1]}"

    def counters(self) -> Counters:
        """What was turned away so far; the library's own ports turn nobody away."""
        return self.tally.counters()

    def unregister(self, region: Region) -> None:
        """Forgets a region, here and in every library instance that knows it."""
        super().unregister(region)
        for incoming in list(self.incoming.values()):
            if isinstance(incoming, Writer):
                incoming.withdraw(region.number)
        for outgoing in list(self.outgoing.values()):
            if isinstance(outgoing, Source):
                outgoing.forget(region.number)

    def stop(self) -> None:
        """Ends listening and the thread, and lets go of peers that could not be made quiet."""
        if self.porch is not None:
            self.watcher.call(self.porch.close)
        for incoming in list(self.incoming.values()):
            if isinstance(incoming, Writer):
                incoming.abandon()
        self.watcher.close()

    def _listen(self) -> socket.socket:
        host, port = self.listening.host, self.listening.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=128)
        except OSError as cause:
            raise TransportError(
                f"cannot listen on {host} port {port}: {cause}; "
                "choose another port, or an address of this machine"
            ) from None

    def _find_writer(self, hello: Hello) -> Writer | None:
        found = self.incoming.get(Peer(hello.peer, hello.incarnation.decode("ascii", "replace")))
        return found if isinstance(found, Writer) else None
