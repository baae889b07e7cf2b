"""When something was computed: now on a host, when its stream has passed on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

import torch

from baton.transport import NOW, CudaFence, Fence


class Mark(Protocol):
    """A place in the order of this rank's computations."""

    @property
    def fence(self) -> Fence:
        """Ready when everything before the mark is computed."""


class Clock(Protocol):
    """Marks, and the times that they turned out to be at."""

    def mark(self) -> Mark:
        """A mark after everything that was begun so far."""

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """When the marks were passed, on the machine's monotonic clock; waits for the last one."""


@dataclass(frozen=True, slots=True)
class HostMark:
    """A moment."""

    at_s: float

    @property
    def fence(self) -> Fence:
        """Whatever was computed before is in memory."""
        return NOW


class HostClock:
    """Computing is over when the call returns."""

    def mark(self) -> HostMark:
        """This moment."""
        return HostMark(monotonic())

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """As they were taken."""
        return [mark.at_s for mark in marks if isinstance(mark, HostMark)]


@dataclass(frozen=True, slots=True)
class CudaMark:
    """An event on the compute stream."""

    event: torch.cuda.Event

    @property
    def fence(self) -> Fence:
        """When the stream has passed the event."""
        return CudaFence(self.event)


class CudaClock:
    """Events; the first of a series is tied to the host's clock by waiting for it once at the start."""

    def __init__(self) -> None:
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = monotonic()

    def mark(self) -> CudaMark:
        """An event after everything that was queued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return CudaMark(event)

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """By the device's own clock from the first event on."""
        events = [mark.event for mark in marks if isinstance(mark, CudaMark)]
        if events:
            events[-1].synchronize()
        return [self._zero_s + self._zero.elapsed_time(event) / 1e3 for event in events]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
