"""The target's half: who may map the segments, and whether a writer can still write.

Everything here but `grants` is touched by the watcher's thread alone; others only look at `mapped`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from baton.errors import RemoteProtocolError
from baton.transport.base import Landed, Peer, Quiet, Stillness, Unknown
from baton.transport.parts.grants import Granted, Grants
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.proof import (
    HELLO_BYTES,
    Hello,
    is_proven,
    make_welcome,
    new_challenge,
    read_hello,
)
from baton.transport.parts.watcher import Watcher
from baton.transport.shm.messages import Kind, Message, receive_message, send_message
from baton.transport.shm.staged.target import Drainer, Shore

_SO_PEERPIDFD = 77
_HANDSHAKES_MAX = 128


@dataclass(frozen=True, slots=True)
class Located:
    """A region inside a segment, ready to be handed out."""

    segment: int
    segment_bytes: int
    offset: int
    num_bytes: int
    fd: int


@dataclass(frozen=True, slots=True)
class Staged:
    """A region that is reached through a ring."""

    num_bytes: int


class Locate(Protocol):
    """How a writer finds the segment of a region."""

    def __call__(self, number: int) -> Located | str:
        """Where the region is, or why a peer cannot write it."""


@dataclass(slots=True, eq=False)
class Writer:
    """One invited peer."""

    peer: Peer
    secret: str
    watcher: Watcher
    grants: Grants = field(default_factory=Grants)
    sock: socket.socket | None = None
    pidfd: int | None = None
    mapped: set[int] = field(default_factory=set)
    """Regions that were handed out: from then on nothing here sees what is written there."""
    has_left: bool = False
    is_revoked: bool = False
    drainer: Drainer | None = None

    @property
    def has_mapped(self) -> bool:
        """Whether it was handed out any."""
        return bool(self.mapped)

    def is_still(self, granted: Granted) -> Stillness:
        """Not before a writer that mapped a region is gone: nothing here sees its stores."""
        return self._settled(self.watcher.call(self._stillness))

    def revoke(self, cause: str) -> Stillness:
        """Asks a living writer to leave, which a stopped one cannot hear, and takes nothing from its ring."""
        stillness = self._settled(self.watcher.call(self._revoke))
        if isinstance(stillness, Quiet):
            self.end()
        return stillness

    def end(self) -> None:
        """Gives everything back."""
        self.watcher.call(self._release)
        if self.drainer is not None:
            self.drainer.close()

    def _settled(self, stillness: Stillness) -> Stillness:
        drainer = self.drainer
        return drainer.settle() if drainer and isinstance(stillness, Quiet) else stillness

    def _revoke(self) -> Stillness:
        self.is_revoked = True
        if self.drainer is not None:
            self.drainer.bar()
        stillness = self._stillness()
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return stillness

    def _stillness(self) -> Stillness:
        if not self.has_mapped or self.has_left:
            return Quiet()
        if self.pidfd is None:
            return Unknown("the writer's process cannot be watched from here; it has the memory mapped")
        if _is_readable(self.pidfd):
            return Quiet()
        return Unknown("the writer's process is alive and has the memory mapped")

    def attach(self, sock: socket.socket) -> None:
        """Takes over the socket on which the writer proved itself."""
        self.sock = sock
        self.pidfd = _open_pidfd(sock)

    def hang_up(self) -> None:
        """Gives the socket back; what the writer's process is up to is for the pidfd."""
        if self.sock is not None:
            self.watcher.unwatch(self.sock.fileno())
            self.sock.close()
            self.sock = None

    def _release(self) -> None:
        self.hang_up()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


@dataclass(slots=True)
class Porch:
    """The listening socket, and those who connected and have not proven themselves."""

    address: str
    watcher: Watcher
    mailbox: Mailbox
    locate: Locate
    find_writer: Callable[[int], Writer | None]
    shore: Shore
    listener: socket.socket = field(init=False)
    challenges: dict[socket.socket, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Opens the socket; its name lives in no file system and dies with this process."""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"\0{self.address}")
        self.listener.listen(_HANDSHAKES_MAX)
        self.listener.setblocking(False)
        self.watcher.watch(self.listener.fileno(), select.EPOLLIN, self._accept)

    def close(self) -> None:
        """Ends listening, and who has not proven himself."""
        self.watcher.unwatch(self.listener.fileno())
        self.listener.close()
        for sock in list(self.challenges):
            self._turn_away(sock)

    def _accept(self, mask: int) -> None:
        with suppress(OSError):
            sock, _ = self.listener.accept()
            if len(self.challenges) >= _HANDSHAKES_MAX:
                self._turn_away(next(iter(self.challenges)))
            sock.setblocking(False)
            self.challenges[sock] = new_challenge()
            self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._greet(sock))
            sock.send(self.challenges[sock])

    def _greet(self, sock: socket.socket) -> None:
        """Reads a hello; who holds the secret of a live invitation becomes its writer, once."""
        challenge = self.challenges.get(sock)
        if challenge is None:
            return
        try:
            hello = read_hello(sock.recv(HELLO_BYTES + 1))
        except BlockingIOError:
            return
        except OSError:
            hello = None
        writer = self._writer_of(hello, challenge) if hello else None
        if hello is None or writer is None:
            self.shore.tally.add_stranger()
            self._turn_away(sock)
            return
        del self.challenges[sock]
        self.watcher.unwatch(sock.fileno())
        writer.attach(sock)
        self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._hear(writer, sock))
        with suppress(OSError):
            sock.send(make_welcome(hello, writer.secret, challenge))

    def _writer_of(self, hello: Hello, challenge: bytes) -> Writer | None:
        writer = self.find_writer(hello.peer)
        if writer is None or writer.is_revoked or writer.sock is not None or writer.has_mapped:
            return None
        is_meant = hello.incarnation.decode("ascii", "replace") == writer.peer.incarnation
        return writer if is_meant and is_proven(hello, writer.secret, challenge) else None

    def _turn_away(self, sock: socket.socket) -> None:
        del self.challenges[sock]
        self.watcher.unwatch(sock.fileno())
        sock.close()

    def _hear(self, writer: Writer, sock: socket.socket) -> None:
        if writer.sock is not sock:
            return
        try:
            message, fd = receive_message(sock)
            if fd is not None:
                os.close(fd)
            if message is None:
                writer.hang_up()
            else:
                self._obey(writer, sock, message)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError):
            writer.hang_up()

    def _obey(self, writer: Writer, sock: socket.socket, message: Message) -> None:
        match message.kind:
            case Kind.LANDED:
                tag, num_bytes, _, _ = message.numbers
                self.mailbox.put(Landed(writer.peer, tag, num_bytes))
            case Kind.MAP:
                number, is_staged, _, _ = message.numbers
                found = self._reached(number) if is_staged else self.locate(number)
                if writer.is_revoked or not writer.grants.mention(number):
                    found = f"nothing of region {number} was granted to this peer"
                if isinstance(found, Located):
                    writer.mapped.add(number)
                self._hand_out(writer, sock, found)
            case Kind.LEFT:
                writer.has_left = True
                writer.hang_up()
            case _:
                raise RemoteProtocolError(f"a source does not say {message.kind.name}")

    def _reached(self, number: int) -> Staged | str:
        memory = self.shore.regions.memory(number)
        return f"region {number} is not registered" if memory is None else Staged(len(memory.bytes))

    def _hand_out(self, writer: Writer, sock: socket.socket, found: Located | Staged | str) -> None:
        if isinstance(found, str):
            self.shore.tally.add_refused_write()
            send_message(sock, Message(Kind.REFUSED, text=found))
            return
        if isinstance(found, Staged):
            if writer.drainer is None:
                writer.drainer = Drainer(writer.peer, writer.grants, self.shore)
            writer.drainer.hand_out(sock, found.num_bytes)
            return
        numbers = (found.segment, found.segment_bytes, found.offset, found.num_bytes)
        send_message(sock, Message(Kind.MAPPED, numbers), found.fd)


def _open_pidfd(sock: socket.socket) -> int | None:
    """A handle on the process at the other end, or None where it cannot be seen from here."""
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        # Had the process ended before it was opened, its number could be another's: then it hung up first.
        if not _is_hung_up(sock):
            return pidfd
        os.close(pidfd)
    return None


def _is_hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))


def _is_readable(fd: int) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))
