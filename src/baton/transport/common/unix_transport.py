"""What transports between processes of one host share, whose sources map the target's memory."""

from __future__ import annotations

from typing import TypeVar

from baton.transport.base import Peer, Region
from baton.transport.common.handshake import Hello
from baton.transport.common.threads import Watcher
from baton.transport.common.transport import BaseTransport
from baton.transport.common.unix_source import UnixConnection
from baton.transport.common.unix_target import UnixListener, UnixWriter

UnixConnectionT = TypeVar("UnixConnectionT", bound=UnixConnection)
UnixWriterT = TypeVar("UnixWriterT", bound=UnixWriter)


class UnixTransport(BaseTransport[UnixConnectionT, UnixWriterT]):
    """One opened transport, with the thread that watches its sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.watcher = Watcher(f"{self.name}-{self.incarnation}")
        self.listener: UnixListener | None = None

    def listen(self) -> None:
        """Starts to accept peers, when the first is invited."""
        if self.listener is None:
            self.listener = self.watcher.call(
                lambda: UnixListener(self.address(), self.watcher, self._find_writer, self.refusals)
            )

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether a peer has a region mapped."""
        writer = self.writers.get(peer)
        return writer is not None and region.number in writer.mapped

    def address(self) -> str:
        """The abstract name of the socket."""
        return f"baton-{self.name}-{self.incarnation}"

    def stop(self) -> None:
        """Ends the thread and closes the descriptors."""
        if self.listener is not None:
            self.watcher.call(self.listener.close)
        for writer in list(self.writers.values()):
            writer.end()
        self.watcher.close()

    def _find_writer(self, hello: Hello) -> UnixWriter | None:
        return self.writers.get(Peer(hello.peer, hello.incarnation.decode("ascii", "replace")))
