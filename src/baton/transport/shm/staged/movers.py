"""What moves spans between a slot of the ring and a region, off the caller's thread."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from baton.plan.steps import Spans
from baton.transport.base import Batch, Place
from baton.transport.parts.buffers import Memory
from baton.transport.parts.copying import copy_spans
from baton.transport.parts.lanes import Lane
from baton.transport.shm.staged.ring import Ring, RingShape, Slot

CUDA = "cuda"
"""How a description says that a region is on a device."""

Then: TypeAlias = Callable[[str], None]
"""What is done when a move is complete; its word is why the move failed, or nothing."""


class Event(Protocol):
    """What a stream can wait for, as torch.cuda.Event is."""

    def query(self) -> bool:
        """Whether it happened."""

    def synchronize(self) -> None:
        """Waits for it with the GIL released."""


@dataclass(frozen=True, slots=True)
class Move:
    """Spans between a region and a slot; they are as the batch has them, with the slot at one end."""

    spans: Spans
    region: Memory
    fence: Event | None = None


class Mover(Protocol):
    """Takes moves for one device and one ring; calls back in their order, from a thread of its own."""

    def fill(self, move: Move, slot: Slot, then: Then) -> None:
        """From the region into the slot, once the fence has come."""

    def drain(self, move: Move, slot: Slot, then: Then) -> None:
        """From the slot into the region."""

    def after(self, then: Then) -> None:
        """Calls back when everything before is complete."""

    def close(self) -> None:
        """Completes what it was given and lets go of the ring."""


@dataclass(frozen=True, slots=True)
class Staging:
    """How a transport stages: the rings it makes, which batches go through one, and what moves them."""

    shape: RingShape
    is_needed: Callable[[Batch], bool]
    open_mover: Callable[[Memory, Ring], Mover]


class HostMover:
    """Moves host memory, with one thread."""

    def __init__(self) -> None:
        self._lane = Lane("shm-staged-host")

    def fill(self, move: Move, slot: Slot, then: Then) -> None:
        """From the region into the slot."""

        def run() -> None:
            if move.fence is not None:
                move.fence.synchronize()
            copy_spans(move.spans, move.region.bytes, slot.bytes, lambda: False)
            then("")

        self._lane.put(run)

    def drain(self, move: Move, slot: Slot, then: Then) -> None:
        """From the slot into the region."""

        def run() -> None:
            copy_spans(move.spans, slot.bytes, move.region.bytes, lambda: False)
            then("")

        self._lane.put(run)

    def after(self, then: Then) -> None:
        """Calls back when everything before is complete."""
        self._lane.put(lambda: then(""))

    def close(self) -> None:
        """Completes what it was given."""
        self._lane.close()


def place_of(memory: Memory) -> str:
    """Which device a region is on: regions of one device share a mover."""
    return str(getattr(memory.owner, "device", "")) if memory.place is Place.CUDA else Place.HOST.value


def open_mover(memory: Memory, ring: Ring) -> Mover:
    """What moves regions that are where this one is."""
    if memory.place is Place.HOST:
        return HostMover()
    # torch is an optional extra: who has a region on a device has it.
    opened: Mover = importlib.import_module("baton.transport.shm.staged.cuda").open_cuda_mover(memory, ring)
    return opened


def is_staging_needed(batch: Batch) -> bool:
    """Whether one end of a batch is on a device."""
    return batch.source.place is Place.CUDA or batch.target.access == CUDA
