"""The listening socket, and those who connected and have not proven themselves."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from baton.transport.base import DEADLINE_S
from baton.transport.parts.proof import (
    HELLO_BYTES,
    KNOCK,
    Hello,
    is_proven,
    make_welcome,
    new_challenge,
    read_hello,
)
from baton.transport.parts.tally import Tally
from baton.transport.parts.watcher import Watcher
from baton.transport.tcp.target import Writer
from baton.transport.tcp.wire import receive_exactly

HANDSHAKES_MAX = 128


class Porch:
    """Accepts connections and hands those that hold a live invitation to its writer."""

    def __init__(
        self,
        listener: socket.socket,
        watcher: Watcher,
        find_writer: Callable[[Hello], Writer | None],
        tally: Tally,
    ) -> None:
        self.listener = listener
        self.watcher = watcher
        self.find_writer = find_writer
        self.tally = tally
        self.lock = threading.Lock()
        self.waiting: dict[socket.socket, threading.Thread] = {}
        listener.setblocking(False)
        watcher.watch(listener.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """On the watcher's thread: ends listening, and turns away who is at the door."""
        self.watcher.unwatch(self.listener.fileno())
        self.listener.close()
        with self.lock:
            waiting = dict(self.waiting)
            for sock in waiting:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        for thread in waiting.values():
            thread.join()

    def _accept(self, mask: int) -> None:
        with suppress(OSError):
            sock, _ = self.listener.accept()
            if len(self.waiting) >= HANDSHAKES_MAX:
                sock.close()
                return
            thread = threading.Thread(target=self._run, args=(sock,), name="tcp-receiver", daemon=True)
            with self.lock:
                self.waiting[sock] = thread
            thread.start()

    def _run(self, sock: socket.socket) -> None:
        """The thread of a stream: first its handshake, then its parts."""
        challenge = new_challenge()
        try:
            hello = self._hear(sock, challenge)
        except OSError:
            hello = None
        writer = self.find_writer(hello) if hello else None
        is_stranger = hello is None or writer is None or not is_proven(hello, writer.secret, challenge)
        receiver = None if is_stranger or not writer or not hello else writer.attach(hello.stream, sock)
        if is_stranger:
            self.tally.add_stranger()
        with self.lock:
            del self.waiting[sock]
            if receiver is None:
                sock.close()
        if receiver is not None and writer is not None and hello is not None:
            with suppress(OSError):
                sock.sendall(make_welcome(hello, writer.secret, challenge))
            writer.receive(hello.stream, receiver)

    def _hear(self, sock: socket.socket, challenge: bytes) -> Hello | None:
        sock.settimeout(DEADLINE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(challenge)
        raw = receive_exactly(sock, len(KNOCK) + HELLO_BYTES)
        sock.settimeout(None)
        return read_hello(bytes(raw[len(KNOCK) :])) if raw and raw.startswith(KNOCK) else None
