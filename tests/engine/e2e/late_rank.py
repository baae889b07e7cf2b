"""A rank process whose clock is that of a device: what is computed is known to be some milliseconds later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from time import monotonic

import torch

from baton.engine.rank import parts, process
from baton.engine.rank.clock import Mark
from baton.engine.rank.pipeline import Pipeline
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

    is_late = True

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
    """The whole life of a rank whose link always has time, or never, by its name."""
    parts.clock_of = late
    Pipeline._slack_s = lambda self: SLACK_S[name]
    process.main(connection)
