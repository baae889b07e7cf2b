"""The listening socket of a target, shared by the transports whose peers connect over TCP."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

from baton.errors import ConfigError, TransportError
from baton.transport.base import DEADLINE_S, Peer
from baton.transport.common.handshake import (
    CONNECT_PROBE,
    HELLO_BYTES,
    Hello,
    make_welcome,
    new_challenge,
    read_hello,
    verify_hello,
)
from baton.transport.common.threads import Watcher
from baton.transport.common.transport import BaseTransport, ConnectionT, PeerWriter

HANDSHAKES_MAX = 128


class StreamWriter(PeerWriter, Protocol):
    """A writer whose peer connects over TCP."""

    @property
    def secret(self) -> str: ...

    def attach(self, stream: int, sock: socket.socket) -> Callable[[], None] | None:
        """Takes over a stream that has proven itself; returns its receive loop, or None to refuse it.

        The loop runs on the thread that calls `attach`.
        """


class Listener:
    """Accepts connections and gives those with a valid hello to their writer, one thread for each."""

    def __init__(
        self,
        server: socket.socket,
        watcher: Watcher,
        find_writer: Callable[[Hello], StreamWriter | None],
    ) -> None:
        self.server = server
        self.watcher = watcher
        self.find_writer = find_writer
        self.lock = threading.Lock()
        self.handshakes: dict[socket.socket, threading.Thread] = {}
        server.setblocking(False)
        watcher.watch(server.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """On the watcher's thread: stops listening and ends unfinished handshakes."""
        self.watcher.unwatch(self.server.fileno())
        self.server.close()
        with self.lock:
            handshakes = dict(self.handshakes)
            for sock in handshakes:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in handshakes.values():
            thread.join()

    def _accept(self, mask: int) -> None:
        with suppress(OSError):
            sock, _ = self.server.accept()
            if len(self.handshakes) >= HANDSHAKES_MAX:
                sock.close()
                return
            thread = threading.Thread(target=self._run, args=(sock,), name="tcp-receiver", daemon=True)
            with self.lock:
                self.handshakes[sock] = thread
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        """The thread of a stream: first its handshake, then its receive loop."""
        challenge = new_challenge()
        try:
            hello = _receive_hello(sock, challenge)
        except OSError:
            hello = None
        writer = self.find_writer(hello) if hello else None
        receive, welcome = None, b""
        if hello and writer and verify_hello(hello, writer.secret, challenge):
            welcome = make_welcome(hello, writer.secret, challenge)
            receive = writer.attach(hello.stream, sock)
        with self.lock:
            del self.handshakes[sock]
            if receive is None:
                sock.close()
        if receive is not None:
            with suppress(OSError):
                sock.sendall(welcome)
            receive()


def _receive_hello(sock: socket.socket, challenge: bytes) -> Hello | None:
    sock.settimeout(DEADLINE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(challenge)
    raw = receive_exactly(sock, len(CONNECT_PROBE) + HELLO_BYTES)
    sock.settimeout(None)
    return read_hello(bytes(raw[len(CONNECT_PROBE) :])) if raw and raw.startswith(CONNECT_PROBE) else None


StreamWriterT = TypeVar("StreamWriterT", bound=StreamWriter)


class ListeningTransport(BaseTransport[ConnectionT, StreamWriterT]):
    """A transport whose targets listen on a TCP port, from the first invitation on."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.host = host
        self.port = port
        self.watcher = Watcher(f"{self.name}-{self.incarnation}")
        self.listener: Listener | None = None

    def listen(self) -> None:
        if self.listener is not None:
            return
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            server = socket.create_server((self.host, self.port), family=family, backlog=128)
        except OSError as cause:
            raise TransportError(
                f"cannot listen on {self.host} port {self.port}: {cause}; "
                "choose another port, or an address of this machine"
            ) from None
        self.listener = Listener(server, self.watcher, self._find_writer)

    def address(self) -> str:
        assert self.listener is not None, "an invitation starts the listener"
        return f"{self.host}:{self.listener.server.getsockname()[1]}"

    def stop(self) -> None:
        if self.listener is not None:
            self.watcher.call(self.listener.close)
        self.watcher.close()

    def _find_writer(self, hello: Hello) -> StreamWriterT | None:
        return self.writers.get(Peer(hello.peer, hello.incarnation.decode("ascii", "replace")))


def check_address(transport: str, host: str, port: int) -> None:
    """Raises ConfigError unless a target can listen on this address and give it to its peers."""
    if not 0 <= port < 65536:
        raise ConfigError(f"{transport} port {port}: use 0 to 65535")
    if host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"{transport} host '{host}': give the address at which peers reach this machine")


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
