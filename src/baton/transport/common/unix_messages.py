"""The messages between two processes of one host: one per packet of a unix socket, so without framing."""

from __future__ import annotations

import array
import os
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

from baton.errors import RemoteProtocolError

_MESSAGE = struct.Struct("<B7xQQQQ")
PACKET_BYTES_MAX = 4096


class MessageKind(IntEnum):
    """The sender of a message, and the meaning of its numbers."""

    MAP = 1  # source: region, whether it goes through a ring
    MAPPED = 2  # target: how to map it, in the transport's own numbers, with a descriptor or a text
    REFUSED = 3  # target: text
    LANDED = 4  # source: tag, number of bytes
    LEFT = 5  # source: it has unmapped everything
    STAGED = 6  # target: number and size of the ring's slots, the region's size; at first the ring's socket


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
