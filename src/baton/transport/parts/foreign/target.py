"""The target's half: a library instance for each peer, and the thread that listens to that peer."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import Landed, Peer, Quiet, Stillness, Unknown
from baton.transport.parts.buffers import Memory
from baton.transport.parts.foreign.frames import HEADER_BYTES, Header, Kind, frame
from baton.transport.parts.foreign.kernels import is_this_kernel
from baton.transport.parts.foreign.library import Inlet, Library
from baton.transport.parts.grants import Granted, Grants
from baton.transport.parts.mailbox import Mailbox
from baton.transport.parts.regions import Regions
from baton.transport.parts.tally import Tally
from baton.transport.tcp.wire import receive_exactly

_at_large: list[Memory] = []
"""Memory that a peer can write which was never heard to be quiet: it lives as long as this process."""


@dataclass(frozen=True, slots=True)
class House:
    """What the writers of one target have in common."""

    library: Library
    regions: Regions
    mailbox: Mailbox
    tally: Tally


@dataclass(slots=True, eq=False)
class Line:
    """The socket of a writer and the thread that listens to it."""

    sock: socket.socket
    thread: threading.Thread


@dataclass(slots=True, eq=False)
class Writer:
    """One invited peer."""

    peer: Peer
    secret: str
    house: House
    grants: Grants = field(default_factory=Grants)
    lock: threading.Lock = field(default_factory=threading.Lock)
    line: Line | None = None
    inlet: Inlet | None = None
    lent: dict[int, Memory] = field(default_factory=dict)
    is_near: bool = False
    is_gone: bool = False
    is_revoked: bool = False

    def is_still(self, granted: Granted) -> Stillness:
        """Not while this peer knows the region: no library here tells what is under way."""
        with self.lock:
            if granted.region not in self.lent:
                return Quiet()
        return Unknown("the peer knows the region, and whether it writes there cannot be seen from here")

    def revoke(self, cause: str) -> Stillness:
        """Closes the peer's library instance; where the peer can do without it, asks the peer to leave."""
        with self.lock:
            self.is_revoked = True
            self._shut_inlet()
            line, can_write = self.line, self._can_write()
            if line is not None:
                with suppress(OSError):
                    line.sock.shutdown(socket.SHUT_WR if can_write else socket.SHUT_RDWR)
        if can_write:
            return Unknown("the peer runs on this machine and can write until it hangs up")
        if line is not None:
            line.thread.join()
        self.lent.clear()
        return Quiet()

    def withdraw(self, number: int) -> None:
        """Refuses this peer's writes to a region that begin from now on."""
        with self.lock:
            if self.inlet is not None and number in self.lent:
                self.inlet.withdraw(number)

    def abandon(self) -> None:
        """Gives up on a peer that may still write: the memory that it knows must never be anything else."""
        _at_large.extend(self.lent.values())
        if self.line is not None:
            with suppress(OSError):
                self.line.sock.shutdown(socket.SHUT_RDWR)
            self.line.thread.join()

    def attach(self, stream: int, sock: socket.socket) -> Line | None:
        """Takes the peer's connection on, the current thread with it; there is one."""
        with self.lock:
            if self.is_revoked or self.line is not None or stream:
                return None
            self.line = Line(sock, threading.current_thread())
            return self.line

    def receive(self, stream: int, line: Line) -> None:
        """Listens until the peer hangs up; what is no frame of ours ends its writing, not the listening."""
        try:
            while (header := _receive_header(line.sock)) is not None:
                payload = receive_exactly(line.sock, header.payload_bytes)
                if payload is not None:
                    self._obey(line.sock, header, bytes(payload))
        except RemoteProtocolError:
            with self.lock:
                self.is_revoked = True
                self._shut_inlet()
            _drain(line.sock)
        except OSError:
            pass
        with self.lock:
            self.is_gone = True
            self._shut_inlet()
            self.lent.clear()
            line.sock.close()

    def _obey(self, sock: socket.socket, header: Header, payload: bytes) -> None:
        match header.kind:
            case Kind.LANDED:
                self.house.mailbox.put(Landed(self.peer, header.first, header.second))
            case Kind.ASK:
                sock.sendall(self._answer(header.first, payload))
            case _:
                raise RemoteProtocolError(f"a source does not say {header.kind.name}")

    def _answer(self, number: int, kernel: bytes) -> bytes:
        with self.lock:
            memory = self.house.regions.memory(number)
            if self.is_revoked or memory is None or not self.grants.mention(number):
                self.house.tally.add_refused_write()
                return frame(Kind.REFUSED, number, payload=b"nothing of it was granted to this peer")
            try:
                if self.inlet is None:
                    self.inlet = self.house.library.open_inlet(
                        f"target-{self.peer.incarnation}-{self.peer.number}"
                    )
                access = self.inlet.expose(number, memory)
            except TransportError as cause:
                return frame(Kind.REFUSED, number, payload=str(cause).encode())
            self.is_near = is_this_kernel(kernel)
            self.lent[number] = memory
        return frame(Kind.GIVEN, number, len(memory.bytes), access)

    def _can_write(self) -> bool:
        """Whether a peer without an inlet can write: if it reaches this memory itself, and is there."""
        is_able = self.house.library.can_bypass and self.is_near and bool(self.lent)
        return is_able and not self.is_gone and self.line is not None and not _is_hung_up(self.line.sock)

    def _shut_inlet(self) -> None:
        if self.inlet is not None:
            self.inlet.close()
            self.inlet = None


def _receive_header(sock: socket.socket) -> Header | None:
    raw = receive_exactly(sock, HEADER_BYTES)
    return Header.from_bytes(raw) if raw is not None else None


def _drain(sock: socket.socket) -> None:
    with suppress(OSError):
        while sock.recv(1 << 16):
            pass


def _is_hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
