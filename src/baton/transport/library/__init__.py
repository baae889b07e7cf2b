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

import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import Description, Peer, Region, RevokedQuiet, RevokedUnknown, RevokeResult
from baton.transport.common.listener import TcpListeningTransport, receive_exactly
from baton.transport.common.regions import Grants, Memory, RegionGrant, Regions
from baton.transport.common.threads import has_events
from baton.transport.library.base import (
    HEADER_BYTES,
    FrameHeader,
    FrameKind,
    Library,
    LibraryReceiver,
    encode_frame,
    is_this_kernel,
)
from baton.transport.library.source import LibraryConnection

_leaked: list[Memory] = []
"""Memory that a peer can write and that was never known to be quiet: it is kept as long as this process."""


@dataclass(slots=True, eq=False)
class LibraryWriter:
    """One invited peer."""

    peer: Peer
    secret: str
    library: Library
    regions: Regions
    grants: Grants = field(default_factory=Grants)
    lock: threading.Lock = field(default_factory=threading.Lock)
    sock: socket.socket | None = None
    thread: threading.Thread | None = None
    """Reads the socket."""
    receiver: LibraryReceiver | None = None
    exposed: dict[int, Memory] = field(default_factory=dict)
    """Regions whose addresses the peer knows."""
    is_on_this_kernel: bool = False
    is_gone: bool = False
    is_revoked: bool = False

    def check_quiet(self, grant: RegionGrant) -> RevokeResult:
        """Unknown while the peer has access to the region: no library reports what is in flight to it."""
        with self.lock:
            if grant.region not in self.exposed:
                return RevokedQuiet()
        return RevokedUnknown(
            "the peer has access to the region, and its writes cannot be observed from here"
        )

    def revoke(self, cause: str) -> RevokeResult:
        """Closes the peer's library instance; if the peer can write without it, asks the peer to leave."""
        with self.lock:
            self.is_revoked = True
            self._close_receiver()
            can_write = self._can_write()
            if self.sock is not None:
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_WR if can_write else socket.SHUT_RDWR)
        if can_write:
            return RevokedUnknown("the peer runs on this machine and can write until it hangs up")
        if self.thread is not None:
            self.thread.join()
        self.exposed.clear()
        return RevokedQuiet()

    def withdraw(self, number: int) -> None:
        """Refuses this peer's writes to a region that start from now on."""
        with self.lock:
            if self.receiver is not None and number in self.exposed:
                self.receiver.withdraw(number)

    def abandon(self) -> None:
        """Gives up on a peer that may still write: the memory that it has access to is never reused."""
        _leaked.extend(self.exposed.values())
        if self.sock is not None and self.thread is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.thread.join()

    def attach(self, stream: int, sock: socket.socket) -> bool:
        """Takes over the peer's only stream with a thread of its own."""
        with self.lock:
            if self.is_revoked or self.sock is not None or stream:
                return False
            sock.setblocking(True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock = sock
            self.thread = threading.Thread(
                target=self._receive, args=(sock,), name=f"library-{self.peer.number}", daemon=True
            )
            self.thread.start()
            return True

    def _receive(self, sock: socket.socket) -> None:
        """Reads frames until the peer hangs up; an invalid frame ends its writing but not the reading."""
        try:
            while (raw := receive_exactly(sock, HEADER_BYTES)) is not None:
                header = FrameHeader.from_bytes(raw)
                payload = receive_exactly(sock, header.payload_bytes)
                if payload is not None:
                    self._on_frame(sock, header, bytes(payload))
        except RemoteProtocolError:
            with self.lock:
                self.is_revoked = True
                self._close_receiver()
            with suppress(OSError):
                while sock.recv(1 << 16):
                    pass
        except OSError:
            pass
        with self.lock:
            self.is_gone = True
            self._close_receiver()
            self.exposed.clear()
            sock.close()

    def _on_frame(self, sock: socket.socket, header: FrameHeader, payload: bytes) -> None:
        if header.kind is not FrameKind.ASK:
            raise RemoteProtocolError(f"a source does not send {header.kind.name}")
        sock.sendall(self._expose(header.first, payload))

    def _expose(self, number: int, kernel: bytes) -> bytes:
        """The reply to a source that asks for a region."""
        with self.lock:
            memory = self.regions.find(number)
            if self.is_revoked or memory is None or not self.grants.has_region(number):
                return encode_frame(
                    FrameKind.REFUSED, number, payload=b"nothing of it was granted to this peer"
                )
            try:
                if self.receiver is None:
                    name = f"target-{self.peer.incarnation}-{self.peer.number}"
                    self.receiver = self.library.open_receiver(name)
                access = self.receiver.expose(number, memory)
            except TransportError as cause:
                return encode_frame(FrameKind.REFUSED, number, payload=str(cause).encode())
            self.is_on_this_kernel = is_this_kernel(kernel)
            self.exposed[number] = memory
        return encode_frame(FrameKind.GIVEN, number, len(memory.bytes), access)

    def _can_write(self) -> bool:
        """Whether a peer can write without our receiver: it reaches this memory by itself, and is alive."""
        is_able = self.library.can_bypass and self.is_on_this_kernel and bool(self.exposed)
        if not is_able or self.is_gone or self.sock is None:
            return False
        return not has_events(self.sock.fileno(), select.POLLRDHUP)

    def _close_receiver(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None


class LibraryTransport(TcpListeningTransport[LibraryConnection, LibraryWriter]):
    """One opened transport over an external library."""

    def __init__(self, library: Library, host: str, port: int) -> None:
        super().__init__(host, port)
        self.library = library

    def open_connection(self, peer: Peer, description: Description) -> LibraryConnection:
        return LibraryConnection(peer, description, self.tickets, self.watcher, self.library)

    def open_writer(self, peer: Peer, secret: str) -> LibraryWriter:
        self.listen()
        return LibraryWriter(peer, secret, self.library, self.regions)

    def unregister(self, region: Region) -> None:
        """Removes a region, here and from every library instance that knows it."""
        super().unregister(region)
        for writer in list(self.writers.values()):
            writer.withdraw(region.number)
        for connection in list(self.connections.values()):
            connection.unregister(region.number)

    def end_writer(self, writer: LibraryWriter) -> None:
        """Keeps the memory that its peer can write."""
        writer.abandon()
