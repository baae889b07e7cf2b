"""Shared memory without a name, and the messages that hand it out.

A segment is a memfd, mapped by its owner and by each process that gets its descriptor. Messages cross the
unix socket of a pair, one per packet, so they need no framing.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from baton.errors import RemoteProtocolError, TransportError
from baton.transport.base import Bytes

POPULATE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MESSAGE = struct.Struct("<B7xQQQQ")
PACKET_BYTES_MAX = 4096


@dataclass(frozen=True, slots=True)
class Mapping:
    """A segment as this process has it mapped."""

    map: mmap.mmap
    bytes: Bytes
    address: int


def create_segment(name: str, num_bytes: int) -> int:
    """A descriptor of zeroed memory with a sealed size."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    # A peer that could shrink the segment could kill its owner with SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def map_segment(fd: int, num_bytes: int, is_stopped: Callable[[], bool]) -> Mapping:
    """Maps a segment and populates its pages, so that copies do not pay for page faults."""
    mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # A child must not inherit the mapping: `revoke` takes the death of this process for quiet.
    mapped.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel may be built without huge pages, or set to never use them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(mapped, dtype=np.uint8)
    mapping = Mapping(mapped, flat, flat.ctypes.data)
    for start in range(0, num_bytes, POPULATE_BYTES):
        if is_stopped():
            break
        length = min(POPULATE_BYTES, num_bytes - start)
        if _madvise(mapping.address + start, length, _MADV_POPULATE_WRITE):
            error = ctypes.get_errno()
            if error not in (0, 22):  # EINVAL: before Linux 5.14, which goes without
                # Fail now: without the memory, a later store would raise SIGBUS.
                raise TransportError(f"no memory for a segment of {num_bytes} bytes: {os.strerror(error)}")
            break
    return mapping


class MessageKind(IntEnum):
    """The sender of a message, and the meaning of its numbers."""

    MAP = 1  # source: region, whether it goes through a ring
    MAPPED = 2  # target: segment, its size, the region's offset in it, the region's size; a descriptor
    REFUSED = 3  # target: text
    LANDED = 4  # source: tag, number of bytes
    LEFT = 5  # source: it has unmapped everything
    STAGED = 6  # target: number and size of the ring's slots, the region's size; at first the ring's socket


@dataclass(frozen=True, slots=True)
class ShmMessage:
    """One packet."""

    kind: MessageKind
    numbers: tuple[int, int, int, int] = (0, 0, 0, 0)
    text: str = ""


def send_message(sock: socket.socket, message: ShmMessage, fd: int | None = None) -> None:
    """Sends one packet, with a descriptor if given."""
    raw = _MESSAGE.pack(message.kind, *message.numbers) + message.text.encode()
    if fd is None:
        sock.send(raw)
    else:
        sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])


def receive_message(sock: socket.socket) -> tuple[ShmMessage | None, int | None]:
    """The next packet and its descriptor; no message once the other side has hung up."""
    raw, ancillary, _, _ = sock.recvmsg(PACKET_BYTES_MAX, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    for extra in fds[1:]:
        os.close(extra)
    return (_parse_message(raw) if raw else None), (fds[0] if fds else None)


def _parse_message(raw: bytes) -> ShmMessage:
    try:
        kind, first, second, third, fourth = _MESSAGE.unpack_from(raw)
        text = raw[_MESSAGE.size :].decode()
        return ShmMessage(MessageKind(kind), (first, second, third, fourth), text)
    except (struct.error, ValueError) as cause:
        raise RemoteProtocolError(f"not a message of shm: {raw[:40]!r} ({cause})") from None
