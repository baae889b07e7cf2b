"""A worker process whose clock is that of a device: a mark is passed some milliseconds after it is made."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import monotonic

import torch

from baton.engine import worker
from baton.engine.layer_pipeline import LayerPipeline, Mark
from baton.transport import HostFence

LATE_S = 0.003
SLACK_S = {"hurried": -1.0, "unhurried": 1000.0}


@dataclass(eq=False)
class LateMark:
    """A moment, and a fence that is ready later."""

    at_s: float = field(default_factory=lambda: monotonic() + LATE_S)
    fence: HostFence = field(default_factory=HostFence)


class LateClock:
    """A device that is always the same time behind its host."""

    is_async = True

    def mark(self) -> LateMark:
        """Passed a little later."""
        found = LateMark()
        threading.Timer(LATE_S, found.fence.set).start()
        return found

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """Waits for the last one."""
        found = [mark for mark in marks if isinstance(mark, LateMark)]
        passed = threading.Event()
        if found:
            found[-1].fence.call_when_ready(passed.set)
            passed.wait()
        return [mark.at_s for mark in found]


def late(device: torch.device) -> LateClock:
    """Whatever the device is."""
    return LateClock()


def main(connection: Connection, name: str) -> None:
    """Runs a worker whose link always has time, or never, by its name."""
    worker.clock_of = late
    LayerPipeline._slack_s = lambda self: SLACK_S[name]
    worker.main(connection)
