"""Mooncake's own batch call, as its users make it."""

from __future__ import annotations

from typing import Any

import numpy as np

from baton.bench.baselines.child import Baseline, Child, offer
from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport.library.base import import_native

HOST = "127.0.0.1"
_kept: list[Any] = []
"""Engines and memory of the child, which must outlive the call that made them."""


def _engine() -> Any:
    engine = import_native(("mooncake.engine",)).TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "none"):
        raise TransportError("mooncake cannot be initialised over tcp")
    return engine


class Bare(Baseline):
    """batch_transfer_sync_write of all spans at once."""

    def __init__(self, spans: Spans, num_bytes: int) -> None:
        self.child = Child(__name__, str(num_bytes))
        said = self.child.told()
        self.engine, self.door = _engine(), said["door"]
        self.memory = np.ones(num_bytes, dtype=np.uint8)
        self.engine.register_memory(self.memory.ctypes.data, num_bytes)
        self.reads = (spans.source + self.memory.ctypes.data).tolist()
        self.writes = (spans.target + said["address"]).tolist()
        self.lengths = spans.length.tolist()

    def once(self) -> None:
        """One batch, done when the call returns."""
        code = self.engine.batch_transfer_sync_write(self.door, self.reads, self.writes, self.lengths)
        if code:
            raise TransportError(f"mooncake returned {code}")


def _describe(num_bytes: int) -> dict[str, Any]:
    engine, memory = _engine(), np.zeros(num_bytes, dtype=np.uint8)
    engine.register_memory(memory.ctypes.data, num_bytes)
    _kept.extend((engine, memory))
    return {"door": f"{HOST}:{engine.get_rpc_port()}", "address": memory.ctypes.data}


if __name__ == "__main__":
    offer(_describe)
