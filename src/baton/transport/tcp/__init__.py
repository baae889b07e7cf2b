"""TCP between any two machines: several streams per peer, in place at both ends.

Theory. A batch is cut into parts, and each free stream takes the next one: header, table of target ranges,
bytes. The target checks the table against its regions and this peer's grants before it receives the bytes
into place, and then acknowledges the part. A ticket is Done when all its parts are acknowledged, so Done
means that the bytes are in memory. A stream must finish a part that it began, so only parts that were not
begun can be cancelled, and a deadline that passes breaks the connection. Connections are never
re-established: a successor at the same address has another incarnation and other secrets, and refuses peers
that its predecessor invited.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError
from baton.transport.base import Capabilities, Description, Peer, Place, Reach
from baton.transport.common.listener import TcpListeningTransport, check_address
from baton.transport.tcp.source import TcpConnection
from baton.transport.tcp.target import STREAMS_MAX, TcpWriter


@dataclass(frozen=True, slots=True)
class TcpConfig:
    """Where a target listens, and over how many streams a source sends."""

    host: str = "127.0.0.1"
    """The address of this machine that peers use; a target listens on it alone."""
    port: int = 0
    """0 takes any free one."""
    num_streams: int = 4

    def __post_init__(self) -> None:
        check_address("tcp", self.host, self.port)
        if not 1 <= self.num_streams <= STREAMS_MAX:
            raise ConfigError(f"tcp num_streams {self.num_streams}: use 1 to {STREAMS_MAX}")


class TcpTransport(TcpListeningTransport[TcpConnection, TcpWriter]):
    """One opened tcp transport."""

    name = "tcp"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        can_refuse_strangers=True,
        can_enforce_grants=True,
        can_revoke=True,
        needs_allocate=False,
    )

    def __init__(self, config: TcpConfig) -> None:
        super().__init__(config.host, config.port)
        self.config = config

    def open_connection(self, peer: Peer, description: Description) -> TcpConnection:
        connection = TcpConnection(peer, self.tickets, self.watcher)
        connection.open(description, self.config.num_streams)
        return connection

    def open_writer(self, peer: Peer, secret: str) -> TcpWriter:
        self.listen()
        return TcpWriter(secret, self.regions)


CONFIG = TcpConfig
TRANSPORT = TcpTransport
