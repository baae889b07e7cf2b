"""What crosses the unix socket of a pair: one message per packet, so there is nothing to frame."""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from baton.errors import RemoteProtocolError

_FORM = struct.Struct("<B7xQQQQ")
PACKET_BYTES_MAX = 4096


class Kind(IntEnum):
    """Who says it, and what the numbers of the message mean."""

    MAP = 1  # source: region, whether it is to be reached through a ring
    MAPPED = 2  # target: segment, its size, the region's offset in it, the region's size; a descriptor
    REFUSED = 3  # target: text
    LANDED = 4  # source: tag, number of bytes
    LEFT = 5  # source: it has unmapped everything
    STAGED = 6  # target: number and size of the ring's slots, the region's size; the ring's socket at first


@dataclass(frozen=True, slots=True)
class Message:
    """One packet."""

    kind: Kind
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    text: str = ""


def send_message(sock: socket.socket, message: Message, fd: int | None = None) -> None:
    """Sends one packet, with a descriptor if there is one."""
    raw = _FORM.pack(message.kind, *message.numbers) + message.text.encode()
    if fd is None:
        sock.send(raw)
    else:
        sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def receive_message(sock: socket.socket) -> tuple[Message | None, int | None]:
    """The next packet and its descriptor; no message once the other side has hung up."""
    raw, ancillary, _, _ = sock.recvmsg(PACKET_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = [fd for level, kind, data in ancillary for fd in _descriptors(level, kind, data)]
    for extra in fds[1:]:
        os.close(extra)
    return (_read(raw) if raw else None), (fds[0] if fds else None)


def _descriptors(level: int, kind: int, data: bytes) -> list[int]:
    if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
        return []
    found = array.array("i")
    found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
    return list(found)


def _read(raw: bytes) -> Message:
    try:
        kind, *numbers = _FORM.unpack_from(raw)
        one, two, three, four = numbers
        return Message(Kind(kind), (one, two, three, four), raw[_FORM.size :].decode())
    except (struct.error, ValueError) as cause:
        raise RemoteProtocolError(f"not a message of shm: {raw[:40]!r} ({cause})") from None
