"""What a library has to offer to carry a transport's bytes, how it is imported, and the control frames.

Frames on the socket of a connection:

source -> target    ask: a region's number, and the identity of the kernel that the source runs on
target -> source    given: a region's number and size, and what the library needs to write it
                    refused: a region's number and why
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import struct
import sys
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Protocol

from baton.errors import ConfigError, RemoteProtocolError
from baton.plan.steps import Spans
from baton.transport.common.regions import Memory

REMEDIES = {
    "mooncake": "pip install --no-deps mooncake-transfer-engine-non-cuda, and the system's libibverbs1, "
    "libnuma1 and libcurl4",
    "nixl_cu13": "pip install --no-deps nixl-cu13",
}
"""By package: how to install it. Without what it depends on, which may be torch for CUDA."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_FRAME = struct.Struct("<B3xIQQ")
HEADER_BYTES = _FRAME.size
PAYLOAD_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """How a batch is split for a library.

    A post is what the library is given at once; progress shows when a post is done.
    """

    span_bytes_max: int
    post_bytes_max: int
    post_spans_max: int
    num_posts_max: int
    """The most posts in flight."""


class LibraryReceiver(Protocol):
    """An instance of the library at the target, opened for one peer."""

    def expose(self, number: int, memory: Memory) -> bytes:
        """Lets the peer write a region; returns what the peer's sender needs for that."""

    def withdraw(self, number: int) -> None:
        """Refuses writes to a region that start from now on."""

    def close(self) -> None:
        """Ends the instance; nothing is written through it after this returns."""


class LibrarySender(Protocol):
    """An instance of the library at the source, opened for one target and used by one thread."""

    def register(self, number: int, memory: Memory) -> None:
        """Registers a region of the source, if it is not."""

    def unregister(self, number: int) -> None:
        """Unregisters a region of the source, if it is registered."""

    def open_region(self, number: int, access: bytes) -> object:
        """Opens a region of the target; it can be written once the returned token `is_done`."""

    def post(self, source: int, target: int, spans: Spans) -> object:
        """Starts to write spans; they have landed once the returned token `is_done`."""

    def is_done(self, token: object) -> bool:
        """Whether an operation is done; raises TransportError if it failed. Not called again after true."""

    def close(self) -> None:
        """Ends the instance, whatever is in flight; no source memory is read after this returns."""


class Library(Protocol):
    """A library that was found and imported."""

    @property
    def limits(self) -> Limits: ...

    @property
    def can_bypass(self) -> bool:
        """Whether a source on the target's kernel may write without the target's instance."""

    def open_receiver(self, name: str) -> LibraryReceiver:
        """Opens an instance to be written to; raises TransportError."""

    def open_sender(self, name: str) -> LibrarySender:
        """Opens an instance to write with; raises TransportError."""


def import_native(names: tuple[str, ...]) -> ModuleType:
    """The first of these modules that can be imported.

    `tools/native.sh` unpacks system libraries that a module needs and the system lacks beside the virtual
    environment. They are loaded by path before the import, with local symbols: the program may have loaded
    another copy of the same library.
    """
    causes = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            causes.append(f"{name} is not installed")
        except ImportError as cause:
            if _load_unpacked(Path(sys.prefix) / "native"):
                return import_native((name,))
            causes.append(f"{name}: {cause}")
    raise _missing(names, causes)


def check_installed(names: tuple[str, ...]) -> None:
    """Raises ConfigError if none of these modules is installed; imports nothing."""
    if not any(importlib.util.find_spec(name.partition(".")[0]) for name in names):
        raise _missing(names, [f"{name} is not installed" for name in names])


def _missing(names: tuple[str, ...], causes: list[str]) -> ConfigError:
    remedy = REMEDIES.get(names[0].partition(".")[0])
    return ConfigError(", ".join(causes) + (f"; install it with: {remedy}" if remedy else ""))


_loaded: dict[Path, ctypes.CDLL] = {}


def _load_unpacked(folder: Path) -> bool:
    """Loads the libraries in a folder, each after those that it needs; whether any was new."""
    waiting = [path for path in sorted(folder.glob("**/lib*.so.*")) if path not in _loaded]
    num_before = len(_loaded)
    while waiting:
        left = [path for path in waiting if not _load(path)]
        if len(left) == len(waiting):
            break
        waiting = left
    return len(_loaded) > num_before


def _load(path: Path) -> bool:
    try:
        _loaded[path] = ctypes.CDLL(str(path), ctypes.RTLD_LOCAL)
    except OSError:
        return False
    return True


def this_kernel() -> bytes:
    """The identity of the running kernel; empty if it cannot be read."""
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b""


def is_this_kernel(other: bytes) -> bool:
    """Whether a process with this kernel identity may run on this kernel, and so may reach our memory."""
    mine = this_kernel()
    return not mine or not other or mine == other


class FrameKind(IntEnum):
    """The sender of a frame, and the meaning of its two numbers."""

    ASK = 1  # source: region
    GIVEN = 2  # target: region, its size
    REFUSED = 3  # target: region


@dataclass(frozen=True, slots=True)
class FrameHeader:
    kind: FrameKind
    payload_bytes: int
    first: int
    second: int

    @staticmethod
    def from_bytes(raw: bytes | bytearray) -> FrameHeader:
        kind, payload_bytes, first, second = _FRAME.unpack(raw)
        if kind not in FrameKind.__members__.values() or payload_bytes > PAYLOAD_BYTES_MAX:
            raise RemoteProtocolError(f"not a frame: {bytes(raw)!r}")
        return FrameHeader(FrameKind(kind), payload_bytes, first, second)


def encode_frame(kind: FrameKind, first: int, second: int = 0, payload: bytes = b"") -> bytes:
    return _FRAME.pack(kind, len(payload), first, second) + payload
