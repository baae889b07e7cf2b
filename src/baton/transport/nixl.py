"""NIXL carries the bytes, by default with UCX; for a trusted network.

Theory. See parts/foreign for what stands beside the library. Of NIXL itself, seen with 1.5.1 and UCX:

- Between processes of one kernel UCX copies with process_vm_writev: the target's agent has no part in it, and
  the copy goes on after that agent deregistered the memory, and after it was destroyed. Over TCP a write to
  deregistered memory is carried out too; destroying the agent refuses it. Hence `can_bypass`: such a source
  is quiet when it has hung up, and not before.
- A target has to progress its agent to be written to over TCP, and to be connected to at all. The library's
  progress thread does that, and sleeps in between if it is given a time to sleep for; the library's own
  Python layer gives it none, so that it spins. This is why the bindings are used here without that layer.
- A source progresses its agent by asking for the state of a transfer, so it needs no such thread.
- A connection that broke is not made again by the library: its transfers fail.
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
from baton.transport.parts.buffers import Memory
from baton.transport.parts.foreign.library import Limits
from baton.transport.parts.foreign.native import import_native
from baton.transport.parts.foreign.transport import ForeignTransport, Listening

_ADDRESS = struct.Struct("<Q")
_SLEEP_US = 100_000
"""How long a progress thread may sleep without looking; what happens on its sockets wakes it before."""


@dataclass(frozen=True, slots=True)
class NixlConfig:
    """Where a target listens, and what UCX is told."""

    host: str = "127.0.0.1"
    """The one address of this machine that peers use."""
    port: int = 0
    """Where sources say who they are; 0 takes any free one. UCX chooses its own ports and devices."""
    ucx: str = ""
    """Settings of UCX without their UCX_, such as TLS=tcp or NET_DEVICES=eth0, separated by commas."""


class Nixl:
    """The library, loaded."""

    can_bypass = True
    limits = Limits(piece_bytes=16 << 20, parcel_bytes=16 << 20, parcel_spans=4096, num_parcels=2)

    def __init__(self, config: NixlConfig) -> None:
        self.config = config
        self.bindings: Any = import_native(("nixl_cu13._bindings", "nixl_cu12._bindings"))
        found = vars(self.bindings).items()
        self.errors: tuple[type[Exception], ...] = tuple(
            value for name, value in found if name.startswith("nixl") and name.endswith("Error")
        )

    def open_inlet(self, name: str) -> AgentInlet:
        """An agent to be written to."""
        return AgentInlet(self, self._open(name, has_thread=True))

    def open_outlet(self, name: str) -> AgentOutlet:
        """An agent to write with."""
        return AgentOutlet(self, self._open(name, has_thread=False))

    def ranges(self, memory: Memory) -> Any:
        """A region in the library's terms."""
        return self.bindings.nixlRegDList(
            self.bindings.DRAM_SEG, [(memory.address, len(memory.bytes), 0, "")]
        )

    def error(self, what: str, cause: Exception) -> TransportError:
        """An error of the library as one of ours."""
        return TransportError(f"nixl {what}: {cause}")

    def _open(self, name: str, *, has_thread: bool) -> Any:
        config = self.bindings.nixlAgentConfig()
        config.useProgThread = has_thread
        config.useListenThread = False
        config.syncMode = self.bindings.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _SLEEP_US
        try:
            agent = self.bindings.nixlAgent(name, config)
            agent.createBackend("UCX", {"engine_config": self.config.ucx} if self.config.ucx else {})
        except self.errors as cause:
            raise self.error(f"cannot open UCX with '{self.config.ucx}'", cause) from None
        return agent


class AgentInlet:
    """An agent that one peer writes to."""

    def __init__(self, library: Nixl, agent: Any) -> None:
        self.library = library
        self.agent: Any | None = agent
        self.registered: dict[int, Memory] = {}

    def expose(self, number: int, memory: Memory) -> bytes:
        """Registers a region; the answer holds its address and the agent's metadata."""
        assert self.agent is not None
        ranges = self.library.ranges(memory)
        try:
            if number not in self.registered:
                self.agent.registerMem(ranges, [])
                self.registered[number] = memory
            metadata: bytes = self.agent.getLocalPartialMD(ranges, True, [])
        except self.library.errors as cause:
            raise self.library.error(f"cannot register region {number}", cause) from None
        return _ADDRESS.pack(memory.address) + metadata

    def withdraw(self, number: int) -> None:
        """Deregisters a region, which hardware respects and software may not."""
        memory = self.registered.pop(number, None)
        if memory is not None and self.agent is not None:
            with contextlib.suppress(*self.library.errors):
                self.agent.deregisterMem(self.library.ranges(memory), [])

    def close(self) -> None:
        """Destroys the agent, and with it what the peer is connected to."""
        for number in list(self.registered):
            self.withdraw(number)
        self.agent = None


class AgentOutlet:
    """An agent that writes to one target."""

    def __init__(self, library: Nixl, agent: Any) -> None:
        self.library = library
        self.agent: Any | None = agent
        self.remote: Any = None
        self.sources: dict[int, Memory] = {}
        self.targets: dict[int, int] = {}
        self.transfers: set[int] = set()

    def load(self, number: int, memory: Memory) -> None:
        """Registers a region."""
        if number in self.sources:
            return
        assert self.agent is not None
        try:
            self.agent.registerMem(self.library.ranges(memory), [])
        except self.library.errors as cause:
            raise self.library.error(f"cannot register region {number}", cause) from None
        self.sources[number] = memory

    def forget(self, number: int) -> None:
        """The opposite of `load`."""
        memory = self.sources.pop(number, None)
        if memory is not None and self.agent is not None:
            with contextlib.suppress(*self.library.errors):
                self.agent.deregisterMem(self.library.ranges(memory), [])

    def aim(self, number: int, access: bytes) -> None:
        """Takes the target's metadata in; the library connects with the first transfer."""
        assert self.agent is not None
        (self.targets[number],) = _ADDRESS.unpack_from(access)
        try:
            self.remote = self.agent.loadRemoteMD(access[_ADDRESS.size :])
        except self.library.errors as cause:
            raise self.library.error("cannot read the target's metadata", cause) from None

    def post(self, source: int, target: int, spans: Spans) -> int:
        """Begins one transfer of all spans; on one kernel it is over when this returns."""
        assert self.agent is not None
        bindings = self.library.bindings
        reads = self._list(spans.source + self.sources[source].address, spans.length)
        writes = self._list(spans.target + self.targets[target], spans.length)
        try:
            transfer: int = self.agent.createXferReq(bindings.NIXL_WRITE, reads, writes, self.remote, b"", [])
            self.transfers.add(transfer)
            self.agent.postXferReq(transfer, b"")
        except self.library.errors as cause:
            raise self.library.error("cannot begin a transfer", cause) from None
        return transfer

    def is_done(self, token: object) -> bool:
        """Whether a transfer is done; it is released then."""
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
        """Gives up what is under way and destroys the agent."""
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

    def _list(self, start: Ints, length: Ints) -> Any:
        rows: NDArray[np.uint64] = np.zeros((len(start), 3), dtype=np.uint64)
        rows[:, 0] = start
        rows[:, 1] = length
        return self.library.bindings.nixlXferDList(self.library.bindings.DRAM_SEG, rows)


class NixlTransport(ForeignTransport):
    """One opened nixl transport."""

    name = "nixl"
    capabilities = Capabilities(
        reach=Reach.ANYWHERE,
        places=frozenset({Place.HOST}),
        batch_spans_max=Nixl.limits.parcel_spans,
        can_refuse_strangers=False,
        can_enforce_grants=False,
        can_revoke=False,
        can_announce=True,
        needs_allocate=False,
    )

    def __init__(self, config: NixlConfig) -> None:
        super().__init__(Nixl(config), Listening(config.host, config.port))


CONFIG = NixlConfig
TRANSPORT = NixlTransport
