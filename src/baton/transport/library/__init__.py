"""What the transports share whose bytes an external library moves (mooncake, nixl).

Theory. Such a library writes into a peer's registered memory and reports when it is done. It does not
authenticate peers, keeps running after the peer that it was opened for, reports an error while other
transfers of the same call go on, and applies a deregistration only to later writes. Baton adds what is
missing:

- *One library instance per connection, at both ends.* The target's instance is opened for one invited peer
  and holds only the regions granted to that peer. Closing it stops that peer and no other: bytes in flight to
  it have nowhere to go.
- *One socket per connection.* On it both ends authenticate, the source asks for the regions that it wants to
  write and gets their addresses. The socket is the connection: the source checks it before each post, and
  closes its library instance when it breaks. The source closes the socket after its own library instance, so
  a hang-up, of a living or a dead source, means that it writes no more.

So nothing is written to the successor of a dead target: the successor cannot authenticate, it has other
library instances, and every source of the dead one has closed its own.

If a source can write without the target's instance (NIXL copies with process_vm_writev between processes of
one kernel), closing that instance is not enough, and only the hang-up makes the peer quiet. Memory that such
a peer has access to is kept until then.
"""

from __future__ import annotations

from baton.transport.base import Description, Peer, Region
from baton.transport.common.listener import ListeningTransport
from baton.transport.library.base import Library
from baton.transport.library.source import LibraryConnection
from baton.transport.library.target import LibraryWriter


class LibraryTransport(ListeningTransport[LibraryConnection, LibraryWriter]):
    """One opened transport over an external library."""

    def __init__(self, library: Library, host: str, port: int) -> None:
        super().__init__(host, port)
        self.library = library

    def open_connection(self, peer: Peer, description: Description) -> LibraryConnection:
        connection = LibraryConnection(peer, self.tickets, self.watcher, self.library)
        connection.open(description)
        return connection

    def open_writer(self, peer: Peer, secret: str) -> LibraryWriter:
        self.listen()
        return LibraryWriter(peer, secret, self.library, self.regions, self.refusals)

    def unregister(self, region: Region) -> None:
        """Removes a region, here and from every library instance that knows it."""
        super().unregister(region)
        for writer in list(self.writers.values()):
            writer.withdraw(region.number)
        for connection in list(self.connections.values()):
            connection.unregister(region.number)

    def stop(self) -> None:
        if self.listener is not None:
            self.watcher.call(self.listener.close)
        for writer in list(self.writers.values()):
            writer.abandon()  # those that could not be made quiet
        self.watcher.close()
