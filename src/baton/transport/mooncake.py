"""Mooncake's transfer engine carries the bytes, over TCP or RDMA; for a trusted network.

Theory. See parts/foreign for what stands beside the library. Of Mooncake itself, seen with 0.3.13:

- A peer is "host:port" and a target is a raw address: whoever reaches the port may write whatever the engine
  behind it has registered. Hence an engine per peer, which registers what that peer was granted, and
  `can_refuse_strangers` is False all the same.
- Unregistering refuses writes that begin later; one whose header was accepted goes on to its end. Destroying
  the engine ends it. That takes the interpreter's lock for as long as the engine's handshake thread sleeps in
  accept(), a second at most, hence `_wake_handshake`.
- A call for many spans waits by spinning on their states, and returns at the first error while the others go
  on. Here every span is a transfer of its own that is looked at now and then: that leaves the processor to
  the library's threads, shows progress, and can be given up at any time.
- More than about 2,000 transfers in one peer's queue fail. At most 512 are in it here.
- The first transfer to a peer asks it for its ports and may wait for a minute; it is an empty one, and waits
  on a thread of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from baton.transport.parts.buffers import Memory
from baton.transport.parts.foreign.library import Limits
from baton.transport.parts.foreign.native import import_native
from baton.transport.parts.foreign.transport import ForeignTransport, Listening

_ADDRESS = struct.Struct("<Q")
_NO_DEVICE = "none"
"""A list of devices that names none: without one Mooncake prefers whatever RDMA device it finds."""
_QUIET = 3
_ACCEPT_S = struct.pack("@ll", 0, 1000)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Where a target listens, and by which of Mooncake's protocols the bytes go."""

    host: str = "127.0.0.1"
    """The one address of this machine that peers use."""
    port: int = 0
    """Where sources say who they are; 0 takes any free one. Mooncake takes its own from 15000 to 17000."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas; all that there are when empty."""

    def __post_init__(self) -> None:
        """Refuses what Mooncake cannot be opened with."""
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake protocol '{self.protocol}': use tcp or rdma")
        if self.devices and self.protocol == "tcp":
            raise ConfigError(f"mooncake devices '{self.devices}' are for protocol rdma; got tcp")
        if ":" in self.host:
            raise ConfigError(f"mooncake host '{self.host}': use a name or an IPv4 address")


class Mooncake:
    """The library, loaded."""

    can_bypass = False
    limits = Limits(piece_bytes=1 << 20, parcel_bytes=4 << 20, parcel_spans=64, num_parcels=8)

    def __init__(self, config: MooncakeConfig) -> None:
        self.config = config
        self.module = import_native(("mooncake.engine",))
        self.log_level = _find_log_level()

    def open_inlet(self, name: str) -> EngineInlet:
        """An engine to be written to."""
        return EngineInlet(self.config.host, self._open())

    def open_outlet(self, name: str) -> EngineOutlet:
        """An engine to write with."""
        return EngineOutlet(self._open(), needs_registration=self.config.protocol == "rdma")

    def _open(self) -> Any:
        engine = self.module.TransferEngine()
        devices = self.config.devices if self.config.protocol == "rdma" else _NO_DEVICE
        self._hush()
        code = engine.initialize(self.config.host, "P2PHANDSHAKE", self.config.protocol, devices)
        self._hush()
        if code:
            raise TransportError(f"mooncake cannot open {self.config.protocol} on {self.config.host}: {code}")
        return engine

    def _hush(self) -> None:
        """What matters comes back as a status; the library logs a page per engine, and undoes this once."""
        if self.log_level is not None:
            self.log_level.value = _QUIET


class EngineInlet:
    """An engine that one peer writes to."""

    def __init__(self, host: str, engine: Any) -> None:
        self.engine: Any | None = engine
        self.door = f"{host}:{engine.get_rpc_port()}".encode()
        self.registered: dict[int, Memory] = {}

    def expose(self, number: int, memory: Memory) -> bytes:
        """Registers a region, unless what is registered covers it."""
        assert self.engine is not None
        is_known = number in self.registered
        if not is_known and not any(_covers(one, memory) for one in self.registered.values()):
            code = self.engine.register_memory(memory.address, len(memory.bytes))
            if code:
                raise TransportError(f"mooncake cannot register region {number}: {code}")
            self.registered[number] = memory
        return _ADDRESS.pack(memory.address) + self.door

    def withdraw(self, number: int) -> None:
        """Unregisters a region."""
        memory = self.registered.pop(number, None)
        if memory is not None and self.engine is not None:
            self.engine.unregister_memory(memory.address)

    def close(self) -> None:
        """Destroys the engine, and with it the sockets that the peer writes to."""
        engine, self.engine = self.engine, None
        if engine is not None:
            _wake_handshake(engine)


@dataclass(slots=True, eq=False)
class Opening:
    """The first transfer to a target, which waits for that target's answer."""

    engine: Any
    door: str
    thread: threading.Thread | None = None
    is_open: bool = False

    def start(self) -> Opening:
        """Asks on a thread of its own, which may outlive everybody's interest in the answer."""
        self.thread = threading.Thread(target=self._run, name="mooncake-opening", daemon=True)
        self.thread.start()
        return self

    def _run(self) -> None:
        engine, self.engine = self.engine, None
        batch = engine.transfer_submit_write(self.door, 0, 0, 0)
        self.is_open = bool(batch) and engine.transfer_check_status(batch) == 1

    def is_done(self) -> bool:
        """Whether the target has answered."""
        if self.thread is None or self.thread.is_alive():
            return False
        if not self.is_open:
            raise TransportError(f"mooncake cannot reach {self.door}")
        return True


class EngineOutlet:
    """An engine that writes to one target."""

    def __init__(self, engine: Any, *, needs_registration: bool) -> None:
        self.engine: Any | None = engine
        self.needs_registration = needs_registration
        self.sources: dict[int, Memory] = {}
        self.targets: dict[int, int] = {}
        self.opening: Opening | None = None

    def load(self, number: int, memory: Memory) -> None:
        """Notes where a region is; only RDMA has to have it registered."""
        if number in self.sources:
            return
        if self.needs_registration and self.engine is not None:
            code = self.engine.register_memory(memory.address, len(memory.bytes))
            if code:
                raise TransportError(f"mooncake cannot register region {number}: {code}")
        self.sources[number] = memory

    def forget(self, number: int) -> None:
        """The opposite of `load`."""
        memory = self.sources.pop(number, None)
        if memory is not None and self.needs_registration and self.engine is not None:
            self.engine.unregister_memory(memory.address)

    def aim(self, number: int, access: bytes) -> Opening:
        """Notes where a region of the target is; the first one opens the way there."""
        (self.targets[number],) = _ADDRESS.unpack_from(access)
        if self.opening is None:
            self.opening = Opening(self.engine, access[_ADDRESS.size :].decode()).start()
        return self.opening

    def post(self, source: int, target: int, spans: Spans) -> deque[int]:
        """Begins a transfer for each span."""
        assert self.engine is not None
        assert self.opening is not None
        begin, door = self.engine.transfer_submit_write, self.opening.door
        reads = (spans.source + self.sources[source].address).tolist()
        writes = (spans.target + self.targets[target]).tolist()
        triples = zip(reads, writes, spans.length.tolist(), strict=True)
        batches = deque(begin(door, read, write, length) for read, write, length in triples)
        if 0 in batches:
            raise TransportError("mooncake did not take a transfer")
        return batches

    def is_done(self, token: object) -> bool:
        """Whether every transfer of a parcel is done; a transfer must not be asked again after that."""
        if isinstance(token, Opening):
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


def _covers(one: Memory, other: Memory) -> bool:
    end, other_end = one.address + len(one.bytes), other.address + len(other.bytes)
    return one.address <= other.address and other_end <= end


def _wake_handshake(engine: Any) -> None:
    """Makes the handshake thread of an engine that is to be destroyed look up every millisecond.

    It sleeps in accept() for a second at a time, and who destroys the engine waits for it with the
    interpreter's lock. A shorter time for that socket counts from the next accept(), which one connection
    brings about.
    """
    port = engine.get_rpc_port()
    found = _find_listener(port)
    if found is None:
        return
    with found, contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ACCEPT_S)
        with socket.create_connection(("127.0.0.1", port), 1.0):
            pass
    time.sleep(0.001)


def _find_listener(port: int) -> socket.socket | None:
    """A second handle on the socket of this process that listens on a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = _socket_of(os.dup(int(name)))
            if found is not None and _listens_on(found, port):
                return found
    return None


def _socket_of(fd: int) -> socket.socket | None:
    """A socket object for a descriptor, which another thread may have made something else meanwhile."""
    try:
        return socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None


def _listens_on(sock: socket.socket, port: int) -> bool:
    """Whether this is the socket sought; closed if not."""
    is_found = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port
    if is_found and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return True
    sock.close()
    return False


def _find_log_level() -> ctypes.c_int | None:
    """The variable by which the library's copy of glog is told what to print."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if "/libglog" in path:
            with contextlib.suppress(OSError, ValueError):
                return ctypes.c_int.in_dll(ctypes.CDLL(f"/{path}"), "_ZN3fLI17FLAGS_minloglevelE")
    return None


class MooncakeTransport(ForeignTransport):
    """One opened mooncake transport."""

    name = "mooncake"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        batch_spans_max=Mooncake.limits.parcel_spans * Mooncake.limits.num_parcels,
        can_refuse_strangers=False,
        can_enforce_grants=False,
        can_revoke=True,
        can_announce=True,
        needs_allocate=False,
    )

    def __init__(self, config: MooncakeConfig) -> None:
        super().__init__(Mooncake(config), Listening(config.host, config.port))


CONFIG = MooncakeConfig
TRANSPORT = MooncakeTransport
