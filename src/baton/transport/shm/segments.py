"""Shared memory without a name: a memfd, mapped by its owner and by whoever it hands the descriptor to."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from baton.errors import TransportError
from baton.transport.base import Bytes

POPULATE_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Mapping:
    """A segment as this process sees it."""

    map: mmap.mmap
    bytes: Bytes
    address: int

    def holds(self, address: int, num_bytes: int) -> bool:
        """Whether a buffer lies inside."""
        return self.address <= address and address + num_bytes <= self.address + len(self.bytes)


def create_segment(name: str, num_bytes: int) -> int:
    """A descriptor of zeroed memory whose size nobody can change any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    # A peer that could shrink the segment could kill its owner with SIGBUS.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def map_segment(fd: int, num_bytes: int, is_stopped: Callable[[], bool]) -> Mapping:
    """Maps a segment and touches its pages, so that no copy pays for the first touch."""
    found = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    # A child must not inherit what its parent was allowed to write: quiet means the parent's death.
    found.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel may be built without them, or set to never use them
        found.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(found, dtype=np.uint8)
    mapping = Mapping(found, flat, flat.ctypes.data)
    for start in range(0, num_bytes, POPULATE_BYTES):
        if is_stopped():
            break
        length = min(POPULATE_BYTES, num_bytes - start)
        if _madvise(mapping.address + start, length, _MADV_POPULATE_WRITE):
            _check_populated(ctypes.get_errno(), num_bytes)
            break
    return mapping


def _check_populated(errno: int, num_bytes: int) -> None:
    """An old kernel does without; a machine without the memory must say so now, not by SIGBUS later."""
    if errno not in (0, 22):  # EINVAL: before Linux 5.14
        raise TransportError(f"no memory for a segment of {num_bytes} bytes: {os.strerror(errno)}")
