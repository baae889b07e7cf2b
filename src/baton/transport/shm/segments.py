"""Shared memory without a name: a memfd, mapped by its owner and by each process that gets its descriptor."""

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
