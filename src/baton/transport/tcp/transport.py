"""Anywhere: several streams per peer, sent from and received into registered memory in place.

Theory. A batch is cut into parts, which whichever stream is free takes and sends: header, table of target
ranges, bytes. The target checks the table against its regions and this peer's grants before it reads the
bytes to where they belong, and acknowledges the part; a ticket is Done when all its parts are acknowledged,
so Done means memory. Once a part has begun, the stream has to carry it whole, hence only parts not yet begun
can be cancelled, and a deadline that passes breaks the connection. Connections are never made again: a
successor at the same address has another incarnation and other secrets, and refuses whoever was invited by
its predecessor.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from baton.errors import ConfigError, TransportError
from baton.transport.base import Capabilities, Counters, Description, Peer, Place, Reach
from baton.transport.parts.endpoint import Endpoint
from baton.transport.parts.proof import Hello
from baton.transport.parts.tally import Tally
from baton.transport.parts.watcher import Watcher
from baton.transport.tcp.frames import PART_SPANS_MAX
from baton.transport.tcp.porch import Porch
from baton.transport.tcp.source import Source
from baton.transport.tcp.target import STREAMS_MAX, Writer


@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Where a target listens, and over how many streams a source sends."""

    host: str = "127.0.0.1"
    """The address of this machine that peers use; a target listens on it alone."""
    port: int = 0
    """0 takes any free one."""
    num_streams: int = 4

    def __post_init__(self) -> None:
        """Refuses what cannot be listened on or sent over."""
        if not 0 <= self.port < 65536:
            raise ConfigError(f"tcp port {self.port}: use 0 to 65535")
        if not 1 <= self.num_streams <= STREAMS_MAX:
            raise ConfigError(f"tcp num_streams {self.num_streams}: use 1 to {STREAMS_MAX}")
        if self.host in ("", "0.0.0.0", "::"):
            raise ConfigError(f"tcp host '{self.host}': give the address that peers reach this machine by")


class TcpTransport(Endpoint):
    """One opened tcp transport."""

    name = "tcp"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        batch_spans_max=PART_SPANS_MAX,
        can_refuse_strangers=True,
        can_enforce_grants=True,
        can_revoke=True,
        can_announce=True,
        needs_allocate=False,
    )

    def __init__(self, config: TcpConfig) -> None:
        super().__init__()
        self.config = config
        self.tally = Tally()
        self.watcher = Watcher(f"tcp-{self.incarnation}")
        self.porch: Porch | None = None

    def reach(self, peer: Peer, description: Description) -> Source:
        """Begins a connection."""
        source = Source(peer, self.tickets, self.watcher)
        source.open(description, self.config.num_streams)
        return source

    def admit(self, peer: Peer, secret: str) -> Writer:
        """Makes ready for one more writer."""
        if self.porch is None:
            listener = self._listen()
            self.porch = Porch(listener, self.watcher, self._find_writer, self.tally)
        return Writer(peer, secret, self.regions, self.mailbox, self.tally)

    def address(self) -> str:
        """Host and port."""
        assert self.porch is not None
        port = self.porch.listener.getsockname()[1]
        return f"{self.config.host}:{port}"

    def counters(self) -> Counters:
        """What was turned away so far."""
        return self.tally.counters()

    def stop(self) -> None:
        """Ends listening and the thread."""
        if self.porch is not None:
            self.watcher.call(self.porch.close)
        self.watcher.close()

    def _listen(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.config.host else socket.AF_INET
        try:
            return socket.create_server((self.config.host, self.config.port), family=family, backlog=128)
        except OSError as cause:
            raise TransportError(
                f"cannot listen on {self.config.host} port {self.config.port}: {cause}; "
                "choose another port, or an address of this machine"
            ) from None

    def _find_writer(self, hello: Hello) -> Writer | None:
        incarnation = hello.incarnation.decode("ascii", "replace")
        found = self.incoming.get(Peer(hello.peer, incarnation))
        return found if isinstance(found, Writer) else None


CONFIG = TcpConfig
TRANSPORT = TcpTransport
