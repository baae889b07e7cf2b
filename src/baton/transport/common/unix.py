"""What transports between processes of one host share, whose sources map the target's memory.

A source connects to a unix socket with an abstract name, authenticates once, and asks for each region that it
writes. The subclass hands the region out. From then on the target cannot see what the source stores there:
the source is quiet when it has said that it left, or when its process has ended (by pidfd). One thread for
each target connects, asks for regions and starts copies, in the order of the batches. A target that hangs up
wants the source to leave: it then stops copying, unmaps everything, and says so.

Messages are one per packet of the socket, so without framing. Only the watcher's thread touches the state of
the target's half, except `grants`, which has its own lock; other threads only look at `mapped`.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TypeVar

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import (
    Batch,
    Description,
    Fence,
    Peer,
    Place,
    Region,
    RevokedQuiet,
    RevokedUnknown,
    RevokeResult,
)
from baton.transport.common.connection import WorkerConnection
from baton.transport.common.handshake import introduce
from baton.transport.common.listener import HANDSHAKES_MAX, ListeningTransport
from baton.transport.common.regions import Grants, RegionGrant
from baton.transport.common.threads import Watcher, has_events
from baton.transport.common.tickets import SubmittedBatch, Tickets
from baton.transport.fences import CudaFence

_MESSAGE = struct.Struct("<B7xQQQQ")
PACKET_BYTES_MAX = 4096


class MessageKind(IntEnum):
    """The sender of a message, and the meaning of its numbers."""

    MAP = 1  # source: region, whether it goes through a ring
    MAPPED = 2  # target: how to map it, in the transport's own numbers, with a descriptor or a text
    REFUSED = 3  # target: text
    LEFT = 4  # source: it has unmapped everything
    STAGED = 5  # target: number and size of the ring's slots, the region's size; at first the ring's socket


@dataclass(frozen=True, slots=True)
class UnixMessage:
    """One packet."""

    kind: MessageKind
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    text: str = ""


def send_message(sock: socket.socket, message: UnixMessage, fd: int | None = None) -> None:
    """Sends one packet, with a descriptor if given."""
    raw = _MESSAGE.pack(message.kind, *message.numbers) + message.text.encode()
    if fd is None:
        sock.send(raw)
    else:
        sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def receive_message(sock: socket.socket) -> tuple[UnixMessage | None, int | None]:
    """The next packet and its descriptor; no message once the other side has hung up."""
    raw, ancillary, _, _ = sock.recvmsg(PACKET_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    for extra in fds[1:]:
        os.close(extra)
    return (_parse_message(raw) if raw else None), (fds[0] if fds else None)


def _parse_message(raw: bytes) -> UnixMessage:
    try:
        kind, first, second, third, fourth = _MESSAGE.unpack_from(raw)
        text = raw[_MESSAGE.size :].decode()
        return UnixMessage(MessageKind(kind), (first, second, third, fourth), text)
    except (struct.error, ValueError) as cause:
        raise RemoteProtocolError(f"not a message of this transport: {raw[:40]!r} ({cause})") from None


class UnixConnection(WorkerConnection):
    """The connection to one target."""

    def __init__(self, peer: Peer, description: Description, tickets: Tickets, watcher: Watcher) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(peer, description, tickets, watcher, sock)  # starts the worker

    @abstractmethod
    def unmap(self) -> bool:
        """On the worker: stops the copies and unmaps all memory; whether nothing can be written any more."""

    def connect(self, description: Description) -> None:
        self.retry(partial(self.sock.connect, f"\0{description.address}"), select.POLLOUT)
        introduce(description, 0, self.sock.send, self._receive)

    def leave(self) -> None:
        if self.unmap():
            with suppress(OSError):
                send_message(self.sock, UnixMessage(MessageKind.LEFT))

    def ask(
        self, number: int, deadline_s: float, *, is_staged: bool = False
    ) -> tuple[UnixMessage, int | None]:
        """Asks the target for a region; its answer, with a descriptor if there is one."""
        send_message(self.sock, UnixMessage(MessageKind.MAP, (number, int(is_staged), 0, 0)))
        try:
            message, fd = self.retry(partial(receive_message, self.sock), select.POLLIN, deadline_s)
        except TimeoutError as cause:
            # A late reply to this request would be taken for the reply to the next.
            self.lose(str(cause))
            raise
        if message is None:
            raise ConnectionResetError("it hung up")
        if message.kind is MessageKind.REFUSED:
            raise TransportError(f"region {number} was refused: {message.text}")
        return message, fd

    def _receive(self, num_bytes: int) -> bytes:
        return self.retry(partial(self.sock.recv, num_bytes), select.POLLIN)


_SO_PEERPIDFD = 77


class UnixWriter(ABC):
    """One invited peer."""

    def __init__(self, peer: Peer, secret: str, watcher: Watcher) -> None:
        self.peer = peer
        self.secret = secret
        self.watcher = watcher
        self.grants = Grants()
        self.sock: socket.socket | None = None
        self.pidfd: int | None = None
        self.mapped: set[int] = set()
        """Regions that were handed out: the target cannot see what is stored there."""
        self.has_left = False
        self.is_revoked = False

    @abstractmethod
    def hand_out(self, sock: socket.socket, number: int, *, is_staged: bool) -> None:
        """Answers a request for a region of which something is granted; adds it to `mapped`, or refuses."""

    def check_quiet(self, grant: RegionGrant) -> RevokeResult:
        """RevokedUnknown while a peer that mapped a region lives: the target cannot see its stores."""
        return self.settle(self.watcher.call(self.check_mapped))

    def revoke(self, cause: str) -> RevokeResult:
        """Asks a living writer to leave, which a stopped one cannot."""
        result = self.settle(self.watcher.call(self.shut_out))
        if isinstance(result, RevokedQuiet):
            self.end()
        return result

    def end(self) -> None:
        """Releases the socket and the pidfd."""
        self.watcher.call(self._release)

    def attach(self, stream: int, sock: socket.socket) -> bool:
        """On the watcher's thread: takes over the socket on which the peer authenticated, once."""
        if self.is_revoked or self.sock is not None or self.mapped:
            return False
        self.sock = sock
        self.pidfd = _open_pidfd(sock)
        self.watcher.watch(sock.fileno(), select.EPOLLIN, lambda mask: self._receive(sock))
        return True

    def shut_out(self) -> RevokeResult:
        """On the watcher's thread: hands out nothing more, and asks the peer to leave."""
        self.is_revoked = True
        result = self.check_mapped()
        if self.sock is not None:
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)
        return result

    def settle(self, result: RevokeResult) -> RevokeResult:
        """Not on the watcher's thread: what else has to stop before the peer is quiet."""
        return result

    def refuse(self, sock: socket.socket, cause: str) -> None:
        send_message(sock, UnixMessage(MessageKind.REFUSED, text=cause))

    def check_mapped(self) -> RevokeResult:
        """On the watcher's thread: whether nothing can be stored into what was handed out."""
        if not self.mapped or self.has_left:
            return RevokedQuiet()
        if self.pidfd is None:
            return RevokedUnknown(
                "the writer's process cannot be watched from here; it has the memory mapped"
            )
        if has_events(self.pidfd, select.POLLIN):
            return RevokedQuiet()
        return RevokedUnknown("the writer's process is alive and has the memory mapped")

    def _hang_up(self) -> None:
        """Closes the socket; the pidfd still shows whether the writer's process lives."""
        if self.sock is not None:
            self.watcher.unwatch(self.sock.fileno())
            self.sock.close()
            self.sock = None

    def _release(self) -> None:
        self._hang_up()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _receive(self, sock: socket.socket) -> None:
        if self.sock is not sock:
            return
        try:
            message, fd = receive_message(sock)
            if fd is not None:
                os.close(fd)
            if message is None:
                self._hang_up()
            else:
                self._on_message(sock, message)
        except BlockingIOError:
            return
        except (OSError, RemoteProtocolError):
            self._hang_up()

    def _on_message(self, sock: socket.socket, message: UnixMessage) -> None:
        match message.kind:
            case MessageKind.MAP:
                number, is_staged, _, _ = message.numbers
                if self.is_revoked or not self.grants.has_region(number):
                    self.refuse(sock, f"nothing of region {number} was granted to this peer")
                else:
                    self.hand_out(sock, number, is_staged=bool(is_staged))
            case MessageKind.LEFT:
                self.has_left = True
                self._hang_up()
            case _:
                raise RemoteProtocolError(f"a source does not send {message.kind.name}")


def _open_pidfd(sock: socket.socket) -> int | None:
    """A handle on the process at the other end, or None if it cannot be seen from here."""
    with suppress(OSError):
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    with suppress(OSError):
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        pidfd = os.pidfd_open(pid)
        # If the process ended before pidfd_open, its pid may be another's now; then the socket hung up first.
        if not has_events(sock.fileno(), select.POLLRDHUP):
            return pidfd
        os.close(pidfd)
    return None


UnixConnectionT = TypeVar("UnixConnectionT", bound=UnixConnection)
UnixWriterT = TypeVar("UnixWriterT", bound=UnixWriter)


class UnixTransport(ListeningTransport[UnixConnectionT, UnixWriterT]):
    """One opened transport, whose targets listen on a unix socket."""

    def open_server(self) -> socket.socket:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server.bind(f"\0{self.address()}")  # an abstract name: it is in no file system
        server.listen(HANDSHAKES_MAX)
        return server

    def start(self, connection: UnixConnectionT, job: SubmittedBatch, fence: Fence) -> None:
        """Makes the stream that reads a device wait for a CUDA event; other fences call back."""
        if isinstance(fence, CudaFence) and self.can_stream_wait(job.batch):
            connection.put_behind(job, fence.event)
        else:
            super().start(connection, job, fence)

    def can_stream_wait(self, batch: Batch) -> bool:
        """Whether a stream reads the source of this batch."""
        return batch.source.place is Place.CUDA

    def is_unchecked(self, peer: Peer, region: Region) -> bool:
        """Whether a peer has a region mapped."""
        writer = self.writers.get(peer)
        return writer is not None and region.number in writer.mapped

    def address(self) -> str:
        """The abstract name of the socket."""
        return f"baton-{self.name}-{self.incarnation}"

    def end_writer(self, writer: UnixWriterT) -> None:
        """Closes its descriptors."""
        writer.end()
