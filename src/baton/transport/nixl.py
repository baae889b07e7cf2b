"""NIXL carries the bytes, by default with UCX; for a trusted network.

Theory. See baton.transport.library for what Baton adds to the library. NIXL itself, seen with 1.5.1 and UCX:

- Between processes of one kernel UCX copies with process_vm_writev: the target's agent is not involved, and
  the copy goes on after that agent deregistered the memory or was destroyed. Over TCP a write to deregistered
  memory succeeds too; destroying the agent refuses it. Therefore `can_bypass`: such a source is quiet once it
  has hung up, and not before.
- A target has to progress its agent to accept connections, and writes over TCP. The library's progress thread
  does that, and sleeps in between if it is given a delay; the library's own Python layer sets none, so the
  thread spins. The bindings are therefore used without that layer.
- A source progresses its agent by reading the status of a transfer, so it needs no such thread.
- The library does not re-establish a broken connection: its transfers fail.
- A killed source that had mapped a target's CUDA memory (UCX's cuda_ipc) could write after its socket closed:
  the device ends on its own. So UCX gets every transport but that one.
- CUDA memory is refused until it passes the contract: on an H200 `quiet_failure_is_quiet` failed with it, and
  why is not known yet. The contract suite goes on testing it where there is a GPU.
"""

from __future__ import annotations

import contextlib
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.plan.tokens import Ints
from baton.transport.base import Capabilities, Place, Reach
from baton.transport.common.listener import check_address
from baton.transport.common.regions import Memory
from baton.transport.library import LibraryTransport
from baton.transport.library.base import Limits, check_installed, import_native

_TARGET = struct.Struct("<Q?I")
"""An address, whether it is CUDA memory, and the device."""
LIBRARY = ("nixl_cu13._bindings", "nixl_cu12._bindings")
_SAFE_TLS = "TLS=^cuda_ipc"
_SLEEP_US = 100_000
"""How long the progress thread may sleep; events on its sockets wake it earlier."""


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """Where a target listens, and the settings of UCX."""

    host: str = "127.0.0.1"
    """The one address of this machine that peers use."""
    port: int = 0
    """The port of the handshake; 0 takes any free one. UCX chooses its own ports and devices."""
    ucx: str = ""
    """Settings of UCX without their UCX_, such as TLS=tcp or NET_DEVICES=eth0, separated by commas. TLS is
    everything but cuda_ipc, unless it is here."""

    def __post_init__(self) -> None:
        check_address("nixl", self.host, self.port)


def check_library() -> None:
    """Raises ConfigError if it is not installed."""
    check_installed(LIBRARY)


class Nixl:
    """The imported library."""

    can_bypass = True
    limits = Limits(span_bytes_max=16 << 20, post_bytes_max=16 << 20, post_spans_max=4096, num_posts_max=2)

    def __init__(self, config: NixlConfig) -> None:
        self.config = config
        self.bindings: Any = import_native(LIBRARY)
        names = vars(self.bindings).items()
        self.errors: tuple[type[Exception], ...] = tuple(
            value for name, value in names if name.startswith("nixl") and name.endswith("Error")
        )

    def open_receiver(self, name: str) -> AgentReceiver:
        return AgentReceiver(self, self._open(name, has_thread=True))

    def open_sender(self, name: str) -> AgentSender:
        return AgentSender(self, self._open(name, has_thread=False))

    def ranges(self, memory: Memory) -> Any:
        """A registration list with one region."""
        is_cuda, device = place_of(memory)
        return self.bindings.nixlRegDList(
            self.segment(is_cuda), [(memory.address, len(memory.bytes), device, "")]
        )

    def segment(self, is_cuda: bool) -> Any:
        """The library's name of a kind of memory."""
        return self.bindings.VRAM_SEG if is_cuda else self.bindings.DRAM_SEG

    def error(self, action: str, cause: Exception) -> TransportError:
        return TransportError(f"nixl {action}: {cause}")

    def _open(self, name: str, *, has_thread: bool) -> Any:
        config = self.bindings.nixlAgentConfig()
        config.useProgThread = has_thread
        config.useListenThread = False
        config.syncMode = self.bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _SLEEP_US
        ucx = self.config.ucx
        if "TLS=" not in ucx:
            ucx = f"{ucx},{_SAFE_TLS}" if ucx else _SAFE_TLS
        try:
            agent = self.bindings.nixlAgent(name, config)
            agent.createBackend("UCX", {"engine_config": ucx})
        except self.errors as cause:
            raise self.error(f"cannot open UCX with '{ucx}'", cause) from None
        return agent


class AgentReceiver:
    """An agent that one peer writes to."""

    def __init__(self, library: Nixl, agent: Any) -> None:
        self.library = library
        self.agent: Any | None = agent
        self.registered: dict[int, Memory] = {}

    def expose(self, number: int, memory: Memory) -> bytes:
        """Registers a region; returns its address and the agent's metadata."""
        assert self.agent is not None
        ranges = self.library.ranges(memory)
        try:
            if number not in self.registered:
                self.agent.registerMem(ranges, [])
                self.registered[number] = memory
            metadata: bytes = self.agent.getLocalPartialMD(ranges, True, [])
        except self.library.errors as cause:
            raise self.library.error(f"cannot register region {number}", cause) from None
        return _TARGET.pack(memory.address, *place_of(memory)) + metadata

    def withdraw(self, number: int) -> None:
        """Deregisters a region; hardware enforces that, software paths may not."""
        memory = self.registered.pop(number, None)
        if memory is not None and self.agent is not None:
            with contextlib.suppress(*self.library.errors):
                self.agent.deregisterMem(self.library.ranges(memory), [])

    def close(self) -> None:
        """Destroys the agent, and with it the peer's connection."""
        for number in list(self.registered):
            self.withdraw(number)
        self.agent = None


class AgentSender:
    """An agent that writes to one target."""

    def __init__(self, library: Nixl, agent: Any) -> None:
        self.library = library
        self.agent: Any | None = agent
        self.remote: Any = None
        self.sources: dict[int, Memory] = {}
        self.targets: dict[int, tuple[int, bool, int]] = {}
        self.transfers: set[int] = set()

    def register(self, number: int, memory: Memory) -> None:
        if number in self.sources:
            return
        assert self.agent is not None
        try:
            self.agent.registerMem(self.library.ranges(memory), [])
        except self.library.errors as cause:
            raise self.library.error(f"cannot register region {number}", cause) from None
        self.sources[number] = memory

    def unregister(self, number: int) -> None:
        memory = self.sources.pop(number, None)
        if memory is not None and self.agent is not None:
            with contextlib.suppress(*self.library.errors):
                self.agent.deregisterMem(self.library.ranges(memory), [])

    def open_region(self, number: int, access: bytes) -> None:
        """Loads the target's metadata; the library connects with the first transfer."""
        assert self.agent is not None
        self.targets[number] = _TARGET.unpack_from(access)
        try:
            self.remote = self.agent.loadRemoteMD(access[_TARGET.size :])
        except self.library.errors as cause:
            raise self.library.error("cannot read the target's metadata", cause) from None

    def post(self, source: int, target: int, spans: Spans) -> int:
        """Starts one transfer of all spans; on one kernel it is done when this returns."""
        assert self.agent is not None
        bindings = self.library.bindings
        memory, (address, is_cuda, device) = self.sources[source], self.targets[target]
        reads = self._list(spans.source + memory.address, spans.length, *place_of(memory))
        writes = self._list(spans.target + address, spans.length, is_cuda, device)
        try:
            transfer: int = self.agent.createXferReq(bindings.NIXL_WRITE, reads, writes, self.remote, b"", [])
            self.transfers.add(transfer)
            self.agent.postXferReq(transfer, b"")
        except self.library.errors as cause:
            raise self.library.error("cannot start a transfer", cause) from None
        return transfer

    def is_done(self, token: object) -> bool:
        """Whether a transfer is done; a done transfer is released."""
        if token is None:
            return True
        assert isinstance(token, int)
        assert self.agent is not None
        bindings = self.library.bindings
        try:
            status = self.agent.getXferStatus(token)
            if status == bindings.NIXL_IN_PROG:
                return False
            if status != bindings.NIXL_SUCCESS:
                raise TransportError(f"nixl reports {status} for a transfer")
            self.agent.releaseXferReq(token)
        except self.library.errors as cause:
            raise self.library.error("transfer", cause) from None
        self.transfers.discard(token)
        return True

    def close(self) -> None:
        """Gives up what is in flight and destroys the agent."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        for transfer in self.transfers:
            with contextlib.suppress(*self.library.errors):
                agent.releaseXferReq(transfer)
        if self.remote is not None:
            with contextlib.suppress(*self.library.errors):
                agent.invalidateRemoteMD(self.remote)
        for memory in self.sources.values():
            with contextlib.suppress(*self.library.errors):
                agent.deregisterMem(self.library.ranges(memory), [])
        self.sources.clear()

    def _list(self, start: Ints, length: Ints, is_cuda: bool, device: int) -> Any:
        rows: NDArray[np.uint64] = np.zeros((len(start), 3), dtype=np.uint64)
        rows[:, 0] = start
        rows[:, 1] = length
        rows[:, 2] = device
        return self.library.bindings.nixlXferDList(self.library.segment(is_cuda), rows)


def place_of(memory: Memory) -> tuple[bool, int]:
    """Whether it is CUDA memory, and the device."""
    if memory.place is Place.HOST:
        return False, 0
    tensor: Any = memory.owner
    return True, tensor.device.index or 0


class NixlTransport(LibraryTransport):
    """One opened nixl transport."""

    name = "nixl"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        can_refuse_strangers=False,
        can_enforce_grants=False,
        can_revoke=False,
        needs_allocate=False,
    )

    def __init__(self, config: NixlConfig) -> None:
        super().__init__(Nixl(config), config.host, config.port)


CONFIG = NixlConfig
TRANSPORT = NixlTransport
