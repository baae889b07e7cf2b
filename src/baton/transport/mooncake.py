"""Mooncake's transfer engine carries the bytes, over TCP or RDMA; for a trusted network.

Theory. See baton.transport.library for what Baton adds to the library. Mooncake itself, seen with 0.3.13:

- A peer is "host:port" and a target is a raw address: any process that reaches the port can write everything
  that the engine behind it has registered. So each peer gets its own engine, which registers only what that
  peer was granted; `can_refuse_strangers` is still False.
- Unregistering refuses writes that start later; a write whose header was accepted runs to its end. Destroying
  the engine ends it. That holds the GIL for as long as the engine's handshake thread sleeps in accept(), up
  to a second; see `_wake_handshake`.
- A call for many spans spins until all are done, and returns at the first error while the others go on. Here
  every span is a transfer of its own that is polled: that leaves the CPU to the library's threads, shows
  progress, and can be given up at any time.
- More than about 2,000 transfers in one peer's queue fail. At most 512 are in it here.
- A build for CUDA copies device memory over TCP through the host; another one would read the address as if it
  were host memory. RDMA registers both. CUDA memory has not been tested.
- The first transfer to a peer asks it for its ports and may block for a minute; it is an empty one, on a
  thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, TransportError
from baton.plan.steps import Spans
from baton.transport.base import Capabilities, Place, Reach
from baton.transport.common.listener import check_address
from baton.transport.common.regions import Memory
from baton.transport.library import LibraryTransport
from baton.transport.library.base import Limits, check_installed, import_native

_ADDRESS = struct.Struct("<Q")
_NO_DEVICE = "none"
"""A device list that matches no device; with an empty list Mooncake prefers any RDMA device it finds."""
_LOG_FATAL = 3
HOST_BUILD = "mooncake-transfer-engine-non-cuda"
_ACCEPT_S = struct.pack("@ll", 0, 1000)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Where a target listens, and which of Mooncake's protocols carries the bytes."""

    host: str = "127.0.0.1"
    """The one address of this machine that peers use."""
    port: int = 0
    """The port of the handshake; 0 takes any free one. Mooncake takes its own from 15000 to 17000."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; empty for all."""

    def __post_init__(self) -> None:
        check_address("mooncake", self.host, self.port)
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake protocol '{self.protocol}': use tcp or rdma")
        if self.devices and self.protocol == "tcp":
            raise ConfigError(f"mooncake devices '{self.devices}' are for protocol rdma; got tcp")
        if ":" in self.host:
            raise ConfigError(f"mooncake host '{self.host}': use a name or an IPv4 address")


LIBRARY = ("mooncake.engine",)


def check_library() -> None:
    """Raises ConfigError if it is not installed."""
    check_installed(LIBRARY)


class Mooncake:
    """The imported library."""

    can_bypass = False
    limits = Limits(span_bytes_max=1 << 20, post_bytes_max=4 << 20, post_spans_max=64, num_posts_max=8)

    def __init__(self, config: MooncakeConfig) -> None:
        self.config = config
        self.module = import_native(LIBRARY)
        self.log_level = _find_log_level()

    def open_receiver(self, name: str) -> EngineReceiver:
        return EngineReceiver(self.config.host, self._open())

    def open_sender(self, name: str) -> EngineSender:
        return EngineSender(self._open(), needs_registration=self.config.protocol == "rdma")

    def _open(self) -> Any:
        engine = self.module.TransferEngine()
        devices = self.config.devices if self.config.protocol == "rdma" else _NO_DEVICE
        self._silence_log()
        code = engine.initialize(self.config.host, "P2PHANDSHAKE", self.config.protocol, devices)
        self._silence_log()
        if code:
            raise TransportError(f"mooncake cannot open {self.config.protocol} on {self.config.host}: {code}")
        return engine

    def _silence_log(self) -> None:
        """Errors are returned as a status; the library logs a page per engine, and resets this once."""
        if self.log_level is not None:
            self.log_level.value = _LOG_FATAL


class EngineReceiver:
    """An engine that one peer writes to."""

    def __init__(self, host: str, engine: Any) -> None:
        self.engine: Any | None = engine
        self.endpoint = f"{host}:{engine.get_rpc_port()}".encode()
        self.registered: dict[int, Memory] = {}

    def expose(self, number: int, memory: Memory) -> bytes:
        """Registers a region, unless a registered one covers it."""
        assert self.engine is not None
        is_known = number in self.registered
        if not is_known and not any(_covers(region, memory) for region in self.registered.values()):
            code = self.engine.register_memory(memory.address, len(memory.bytes))
            if code:
                raise TransportError(f"mooncake cannot register region {number}: {code}")
            self.registered[number] = memory
        return _ADDRESS.pack(memory.address) + self.endpoint

    def withdraw(self, number: int) -> None:
        memory = self.registered.pop(number, None)
        if memory is not None and self.engine is not None:
            self.engine.unregister_memory(memory.address)

    def close(self) -> None:
        """Destroys the engine, and with it the sockets that the peer writes to."""
        engine, self.engine = self.engine, None
        if engine is not None:
            _wake_handshake(engine)


@dataclass(slots=True, eq=False)
class FirstTransfer:
    """The first transfer to a target, which waits for that target's reply."""

    engine: Any
    endpoint: str
    thread: threading.Thread | None = None
    has_succeeded: bool = False

    def start(self) -> FirstTransfer:
        """Runs on a thread of its own, which may outlive the connection."""
        self.thread = threading.Thread(target=self._run, name="mooncake-connect", daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        engine, self.engine = self.engine, None
        batch = engine.transfer_submit_write(self.endpoint, 0, 0, 0)
        self.has_succeeded = bool(batch) and engine.transfer_check_status(batch) == 1

    def is_done(self) -> bool:
        if self.thread is None or self.thread.is_alive():
            return False
        if not self.has_succeeded:
            raise TransportError(f"mooncake cannot reach {self.endpoint}")
        return True


class EngineSender:
    """An engine that writes to one target."""

    def __init__(self, engine: Any, *, needs_registration: bool) -> None:
        self.engine: Any | None = engine
        self.needs_registration = needs_registration
        self.sources: dict[int, Memory] = {}
        self.targets: dict[int, int] = {}
        self.first_transfer: FirstTransfer | None = None

    def register(self, number: int, memory: Memory) -> None:
        """Records the address of a region; only RDMA needs it registered."""
        if number in self.sources:
            return
        if self.needs_registration and self.engine is not None:
            code = self.engine.register_memory(memory.address, len(memory.bytes))
            if code:
                raise TransportError(f"mooncake cannot register region {number}: {code}")
        self.sources[number] = memory

    def unregister(self, number: int) -> None:
        memory = self.sources.pop(number, None)
        if memory is not None and self.needs_registration and self.engine is not None:
            self.engine.unregister_memory(memory.address)

    def open_region(self, number: int, access: bytes) -> FirstTransfer:
        """Records the address of a target region; the first one also connects to the target."""
        (self.targets[number],) = _ADDRESS.unpack_from(access)
        if self.first_transfer is None:
            self.first_transfer = FirstTransfer(self.engine, access[_ADDRESS.size :].decode()).start()
        return self.first_transfer

    def post(self, source: int, target: int, spans: Spans) -> deque[int]:
        """Starts one transfer per span."""
        assert self.engine is not None
        assert self.first_transfer is not None
        submit, endpoint = self.engine.transfer_submit_write, self.first_transfer.endpoint
        reads = (spans.source + self.sources[source].address).tolist()
        writes = (spans.target + self.targets[target]).tolist()
        triples = zip(reads, writes, spans.length.tolist(), strict=True)
        transfers = deque(submit(endpoint, read, write, length) for read, write, length in triples)
        if 0 in transfers:
            raise TransportError("mooncake did not accept a transfer")
        return transfers

    def is_done(self, token: object) -> bool:
        """Whether every transfer of a post is done; the status of a done transfer must not be read again."""
        if isinstance(token, FirstTransfer):
            return token.is_done()
        assert isinstance(token, deque)
        assert self.engine is not None
        check = self.engine.transfer_check_status
        while token:
            status = check(token[0])
            if status == 0:
                return False
            if status < 0:
                raise TransportError(f"mooncake reports status {status} for a transfer")
            token.popleft()
        return True

    def close(self) -> None:
        """Destroys the engine, and with it the sockets that it writes to."""
        engine, self.engine = self.engine, None
        if engine is not None:
            _wake_handshake(engine)


def _covers(outer: Memory, inner: Memory) -> bool:
    outer_end, inner_end = outer.address + len(outer.bytes), inner.address + len(inner.bytes)
    return outer.address <= inner.address and inner_end <= outer_end


def _wake_handshake(engine: Any) -> None:
    """Makes the handshake thread of an engine that is about to be destroyed wake up every millisecond.

    It sleeps in accept() for a second at a time, and the engine's destructor waits for it with the GIL held.
    A shorter timeout of that socket applies from the next accept(); one connection makes the thread call it.
    """
    port = engine.get_rpc_port()
    listener = _find_listener(port)
    if listener is None:
        return
    with listener, contextlib.suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ACCEPT_S)
        with socket.create_connection(("127.0.0.1", port), 1.0):
            pass
    time.sleep(0.001)


def _find_listener(port: int) -> socket.socket | None:
    """A duplicate of the socket of this process that listens on a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            sock = _socket_of(os.dup(int(name)))
            if sock is not None and _listens_on(sock, port):
                return sock
    return None


def _socket_of(fd: int) -> socket.socket | None:
    """A socket object for a descriptor; None if it is no socket any more."""
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None


def _listens_on(sock: socket.socket, port: int) -> bool:
    """Whether this socket listens on the port; closes it if not."""
    has_port = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port
    if has_port and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return True
    sock.close()
    return False


def _find_log_level() -> ctypes.c_int | None:
    """The log level variable of the library's copy of glog."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "/libglog" in path:
            with contextlib.suppress(OSError, ValueError):
                return ctypes.c_int.in_dll(ctypes.CDLL(f"/{path}"), "_ZN3fLI17FLAGS_minloglevelE")
    return None


class MooncakeTransport(LibraryTransport):
    """One opened mooncake transport."""

    name = "mooncake"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST, Place.CUDA}),
        can_refuse_strangers=False,
        can_enforce_grants=False,
        can_revoke=True,
        needs_allocate=False,
    )

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(Mooncake(config), config.host, config.port)
        self.protocol = config.protocol

    def region_access(self, memory: Memory) -> str:
        if memory.place is Place.CUDA and self.protocol == "tcp" and not is_built_for_cuda():
            raise TransportError(
                f"this Mooncake ({HOST_BUILD}) cannot move cuda memory over TCP; install "
                "mooncake-transfer-engine in its place, or use protocol=rdma"
            )
        return ""


def is_built_for_cuda() -> bool:
    """Whether the installed library is not the build without CUDA."""
    try:
        importlib.metadata.version(HOST_BUILD)
    except importlib.metadata.PackageNotFoundError:
        return True
    return False


CONFIG = MooncakeConfig
TRANSPORT = MooncakeTransport
