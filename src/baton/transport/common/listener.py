"""The listening socket of a target, and how a source that connects to it gets its writer.

Handshakes run on the watcher's thread: strangers cost no threads. A source that holds the secret of a valid
invitation gets its writer, which takes over the socket.
"""

from __future__ import annotations

import select
import socket
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from baton.errors import ConfigError, TransportError
from baton.transport.base import HANDSHAKE_S, Peer
from baton.transport.common.handshake import (
    CONNECT_PROBE,
    HELLO_BYTES,
    SourceHello,
    make_welcome,
    new_challenge,
    read_hello,
    verify_hello,
)
from baton.transport.common.threads import Watcher
from baton.transport.common.transport import BaseTransport, ConnectionT, PeerWriter

HANDSHAKES_MAX = 128


class ListeningWriter(PeerWriter, Protocol):
    """A writer whose peer connects to a socket."""

    @property
    def secret(self) -> str: ...

    def attach(self, stream: int, sock: socket.socket) -> bool:
        """On the watcher's thread: takes over a socket whose source has proven itself, unless it may not."""


@dataclass(slots=True)
class PendingConnection:
    """A connection that has not proven anything yet."""

    limit_s: float
    challenge: bytes = field(default_factory=new_challenge)
    received: bytes = b""


class Listener:
    """The listening socket, and the connections that have not authenticated yet."""

    def __init__(
        self,
        server: socket.socket,
        watcher: Watcher,
        find_writer: Callable[[SourceHello], ListeningWriter | None],
    ) -> None:
        self.server = server
        self.watcher = watcher
        self.find_writer = find_writer
        self.probe = b"" if server.family == socket.AF_UNIX else CONNECT_PROBE
        self.handshakes: dict[socket.socket, PendingConnection] = {}
        server.setblocking(False)
        watcher.watch(server.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """On the watcher's thread: stops listening and ends unfinished handshakes."""
        self.watcher.unwatch(self.server.fileno())
        self.server.close()
        for sock in list(self.handshakes):
            self._reject(sock)
        self.watcher.stop_timer(self._expire)

    def _accept(self, mask: int) -> None:
        with suppress(OSError):
            sock, _ = self.server.accept()
            if len(self.handshakes) >= HANDSHAKES_MAX:
                self._reject(next(iter(self.handshakes)))
            sock.setblocking(False)
            handshake = self.handshakes[sock] = PendingConnection(time.monotonic() + HANDSHAKE_S)
            self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._receive(sock))
            self.watcher.start_timer(self._expire)
            sock.send(handshake.challenge)

    def _receive(self, sock: socket.socket) -> None:
        handshake = self.handshakes.get(sock)
        if handshake is None:
            return
        num_bytes = len(self.probe) + HELLO_BYTES
        try:
            raw = sock.recv(num_bytes + 1 - len(handshake.received))
        except BlockingIOError:
            return
        except OSError:
            raw = b""
        handshake.received += raw
        if raw and len(handshake.received) < num_bytes:
            return
        try:
            welcome = self._attach(sock, handshake)
        except OSError:  # its source is gone again
            welcome = b""
        if not welcome:
            self._reject(sock)
            return
        with suppress(OSError):
            sock.send(welcome)

    def _attach(self, sock: socket.socket, handshake: PendingConnection) -> bytes:
        """Gives the socket to the writer of a valid hello; returns the welcome, or nothing."""
        received = handshake.received
        hello = read_hello(received[len(self.probe) :]) if received.startswith(self.probe) else None
        writer = self.find_writer(hello) if hello else None
        if not hello or not writer or not verify_hello(hello, writer.secret, handshake.challenge):
            return b""
        self.watcher.unwatch(sock.fileno())
        if not writer.attach(hello.stream, sock):
            return b""
        del self.handshakes[sock]
        return make_welcome(hello, writer.secret, handshake.challenge)

    def _reject(self, sock: socket.socket) -> None:
        del self.handshakes[sock]
        self.watcher.unwatch(sock.fileno())
        sock.close()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for sock in [sock for sock, handshake in self.handshakes.items() if handshake.limit_s < now_s]:
            self._reject(sock)
        if not self.handshakes:
            self.watcher.stop_timer(self._expire)


WriterT = TypeVar("WriterT", bound=ListeningWriter)


class ListeningTransport(BaseTransport[ConnectionT, WriterT]):
    """A transport whose targets listen, from the first invitation on; a thread watches its sockets."""

    def __init__(self) -> None:
        super().__init__()
        self.watcher = Watcher(f"{self.name}-{self.incarnation}")
        self.listener: Listener | None = None

    @abstractmethod
    def open_server(self) -> socket.socket:
        """The socket that it listens on."""

    def listen(self) -> None:
        if self.listener is None:
            self.listener = Listener(self.open_server(), self.watcher, self._find_writer)

    def end_writer(self, writer: WriterT) -> None:
        """The transport closes, and this writer could not be made quiet."""
        return

    def stop(self) -> None:
        if self.listener is not None:
            self.watcher.call(self.listener.close)
        for writer in list(self.writers.values()):
            self.end_writer(writer)
        self.watcher.close()

    def _find_writer(self, hello: SourceHello) -> WriterT | None:
        return self.writers.get(Peer(hello.peer, hello.incarnation.decode("ascii", "replace")))


class TcpListeningTransport(ListeningTransport[ConnectionT, WriterT]):
    """A transport whose targets listen on a TCP port."""

    def __init__(self, host: str, port: int) -> None:
        """Raises TransportError if the host is not an address of this machine."""
        self.host = host
        self.port = port
        # It listens from the first invitation on, and a wrong address should not wait until then.
        open_server(host, 0).close()
        super().__init__()

    def open_server(self) -> socket.socket:
        return open_server(self.host, self.port)

    def address(self) -> str:
        assert self.listener is not None, "an invitation starts the listener"
        return f"{self.host}:{self.listener.server.getsockname()[1]}"


def open_server(host: str, port: int) -> socket.socket:
    """A socket that listens; raises TransportError where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as cause:
        raise TransportError(
            f"cannot listen on {host} port {port}: {cause}; "
            "choose another port, or an address of this machine"
        ) from None


def check_address(transport: str, host: str, port: int) -> None:
    """Raises ConfigError unless a target can listen on this address and give it to its peers."""
    if not 0 <= port < 65536:
        raise ConfigError(f"{transport} port {port}: use 0 to 65535")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"{transport} host '{host}': give the address at which peers reach this machine")


def stream_socket(address: str) -> tuple[socket.socket, tuple[str, int]]:
    """A socket to connect to host:port with, and where; raises TransportError on another address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise TransportError(f"'{address}' is not host:port")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.socket(family, socket.SOCK_STREAM), (host.strip("[]"), int(port))


def receive_all(sock: socket.socket, views: list[memoryview]) -> bool:
    """Fills every view; false if the stream ends first."""
    while views:
        num_bytes = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            return False
        views = drop_front(views, num_bytes)
    return True


def receive_exactly(sock: socket.socket, num_bytes: int) -> bytearray | None:
    """So many bytes; None if the stream ends first."""
    raw = bytearray(num_bytes)
    return raw if not num_bytes or receive_all(sock, [memoryview(raw)]) else None


def drop_front(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of the views after so many bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
