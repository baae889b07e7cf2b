"""NIXL's own transfer of one list of spans, as its users make it."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.bench.baselines.child import Baseline, Child, offer
from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport.library.base import import_native

_kept: list[Any] = []
"""Agents and memory of the child, which must outlive the call that made them."""


def _agent(name: str, *, has_thread: bool) -> tuple[Any, Any]:
    bindings: Any = import_native(("nixl_cu13._bindings", "nixl_cu12._bindings"))
    config = bindings.nixlAgentConfig()
    config.useProgThread = has_thread
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = 100_000
    agent = bindings.nixlAgent(name, config)
    agent.createBackend("UCX", {})
    return bindings, agent


def _register(bindings: Any, agent: Any, memory: np.ndarray) -> Any:
    ranges = bindings.nixlRegDList(bindings.DRAM_SEG, [(memory.ctypes.data, len(memory), 0, "")])
    agent.registerMem(ranges, [])
    return ranges


class Bare(Baseline):
    """createXferReq once, then post and ask until it is done."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.child = Child(__name__, str(num_bytes))
        said = self.child.told()
        self.bindings, self.agent = _agent("bare-source", has_thread=False)
        self.memory = np.ones(num_bytes, dtype=np.uint8)
        _register(self.bindings, self.agent, self.memory)
        remote = self.agent.loadRemoteMD(bytes.fromhex(said["metadata"]))
        reads = self._list(spans.source + self.memory.ctypes.data, spans)
        writes = self._list(spans.target + said["address"], spans)
        self.transfer = self.agent.createXferReq(self.bindings.NIXL_WRITE, reads, writes, remote, b"", [])

    def _list(self, start: np.ndarray, spans: Spans) -> Any:
        rows = np.zeros((len(spans), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1] = start, spans.length
        return self.bindings.nixlXferDList(self.bindings.DRAM_SEG, rows)

    def once(self) -> None:
        """Posts the prepared transfer and waits for it."""
        self.agent.postXferReq(self.transfer, b"")
        while (status := self.agent.getXferStatus(self.transfer)) == self.bindings.NIXL_IN_PROG:
            pass
        if status != self.bindings.NIXL_SUCCESS:
            raise TransportError(f"nixl returned {status}")


def _describe(num_bytes: int) -> dict[str, Any]:
    bindings, agent = _agent("bare-target", has_thread=True)
    memory = np.zeros(num_bytes, dtype=np.uint8)
    ranges = _register(bindings, agent, memory)
    metadata = agent.getLocalPartialMD(ranges, True, [])
    _kept.extend((agent, memory))
    return {"metadata": bytes(metadata).hex(), "address": memory.ctypes.data}


if __name__ == "__main__":
    offer(_describe)
