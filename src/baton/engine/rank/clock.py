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

    @property
    def is_late(self) -> bool:
        """Whether marks are passed after they are made: the host may be ahead, or hold the device up."""

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

    is_late = False

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
    """Events, tied to the host's clock by one more event each time they are asked for.

    The two clocks drift apart by a millisecond within a minute or so, and elapsed times are single-precision
    numbers: so an event is read by its distance to one that has just passed.
    """

    is_late = True

    def __init__(self) -> None:
        self._now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def mark(self) -> CudaMark:
        """An event after everything that was queued."""
        # Blocking: a thread of each copy waits for it, and would keep a core busy otherwise.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return CudaMark(event)

    def times_s(self, marks: Sequence[Mark]) -> list[float]:
        """By the device's own clock, backwards from now; the stream is to be idle but for the marks."""
        events = [mark.event for mark in marks if isinstance(mark, CudaMark)]
        if not events:
            return []
        events[-1].synchronize()
        start_s = monotonic()
        self._now.record()
        self._now.synchronize()
        now_s = (start_s + monotonic()) / 2
        return [now_s - event.elapsed_time(self._now) / 1e3 for event in events]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
