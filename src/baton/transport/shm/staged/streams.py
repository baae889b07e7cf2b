"""Moves between a pinned ring and the memory of a device, on two streams that take turns.

Long spans are copied one by one by the copy engines, all of a slot by one call: that takes nothing from the
multiprocessors, which compute, and does not make two processes on one device wait for each other. Of short
ones a stream gathers a slotful into staging of its own on the device and copies that in one piece, or the
other way round. While one is on the bus, the other stream gathers or scatters. Nothing is waited for: a
thread sleeps in the event that a slot's work ends with, and calls back. Where the copy engines have few bytes
to copy, it sleeps until these are computed and not again: to be woken takes as long as they are on the bus.

What is a device here is a `Device`, so that all of this also runs with tensors of the host in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.plan.steps import Pack, Spans
from baton.plan.tokens import Ints
from baton.transport.base import Bytes
from baton.transport.packing import prepare
from baton.transport.packing.moves import ELEMENTS
from baton.transport.packing.rows import alignment
from baton.transport.parts.buffers import Memory
from baton.transport.parts.lanes import Lane
from baton.transport.shm.staged.movers import Event, Move, Then
from baton.transport.shm.staged.ring import TABLE_SPANS, Ring, Slot, are_long

NUM_STREAMS = 2
SHORT_BYTES = 16 << 20
"""So much is on a bus of 50 GB/s for a third of a millisecond."""
DIRECT_SPANS_MAX = 8
"""Up to so many spans are copied one by one: that costs less than a kernel and a second pass."""


class Stream(Protocol):
    """Work in order."""

    def enter(self) -> None:
        """Sends torch's work of this thread here from now on: it is a thread of ours."""

    def wait(self, event: Event) -> None:
        """Lets what follows wait for an event."""

    def copy(self, spans: Spans, source: int, target: int) -> bool:
        """Copies spans by one call and without a kernel; False, and nothing done, where that cannot be."""

    def record(self, *, is_slept_for: bool) -> Event:
        """An event that comes when all of this is done; who waits for it sleeps, or spins."""


class Device(Protocol):
    """Where regions and staging are."""

    @property
    def device(self) -> torch.device:
        """As torch names it."""

    def tensor(self, memory: Memory) -> Tensor:
        """The bytes of a region."""

    def open_stream(self) -> Stream:
        """A new stream."""

    def pinned(self, num_elements: int) -> Tensor:
        """Integers on the host that can be copied to the device without waiting."""

    def pin(self, buffer: Bytes) -> None:
        """Makes host memory such that copies with the device do not wait; raises TransportError."""

    def unpin(self, buffer: Bytes) -> None:
        """The opposite, when nothing copies any more."""


class StreamMover:
    """Moves for one device and one ring."""

    def __init__(self, device: Device, ring: Ring) -> None:
        self._device = device
        self._ring = ring.bytes
        device.pin(ring.bytes)
        self._slots = [torch.from_numpy(slot.bytes) for slot in ring.slots]
        self._ways = [_Way(device, ring) for _ in range(NUM_STREAMS)]
        self._turns = cycle(self._ways)
        self._lane = Lane(f"shm-staged-{device.device}")

    def fill(self, move: Move, slot: Slot, then: Then) -> None:
        """From the region into the slot, once the fence has come."""
        way = next(self._turns)
        self._start(way, partial(way.fill, move, slot.index, self._slots[slot.index]), move, then)

    def drain(self, move: Move, slot: Slot, then: Then) -> None:
        """From the slot into the region."""
        way = next(self._turns)
        self._start(way, partial(way.drain, move, slot.index, self._slots[slot.index]), move, then)

    def after(self, then: Then) -> None:
        """Calls back when everything before is complete."""
        self._lane.put(partial(then, ""))

    def close(self) -> None:
        """Completes what it was given, and gives staging and the pinning back."""
        self._lane.close()
        self._slots.clear()
        self._ways.clear()
        self._turns = cycle(())
        self._device.unpin(self._ring)
        self._ring = np.zeros(0, dtype=np.uint8)

    def _start(self, way: _Way, work: partial[bool], move: Move, then: Then) -> None:
        try:
            way.stream.enter()
            is_short = work() and move.spans.num_bytes <= SHORT_BYTES
            event = way.stream.record(is_slept_for=not is_short)
        except RuntimeError as error:  # what torch raises where the device or its memory fails
            self._lane.put(partial(then, f"{self._device.device}: {error}"))
            return
        events = (move.fence, event) if is_short and move.fence is not None else (event,)
        self._lane.put(partial(self._complete, events, move.region, then))

    def _complete(self, events: Sequence[Event], region: Memory, then: Then) -> None:
        """Waits until a slot is through; the region is held as long."""
        try:
            for event in events:
                event.synchronize()
        except RuntimeError as error:
            then(f"{self._device.device}: {error}")
            return
        then("")


class _Way:
    """One stream, with its staging and the indexes of the slots that pass through it."""

    def __init__(self, device: Device, ring: Ring) -> None:
        self.stream = device.open_stream()
        self._device = device
        self.stream.enter()
        shape = (ring.shape.num_slots, TABLE_SPANS)
        self._staging = torch.empty(ring.shape.slot_bytes, dtype=torch.uint8, device=device.device)
        self._index = torch.empty(shape, dtype=torch.int64, device=device.device)
        # One row for each slot: it is free again when its slot is, and no stream has to be waited for.
        self._index_host = device.pinned(ring.shape.num_slots * TABLE_SPANS).view(shape)

    def fill(self, move: Move, index: int, slot: Tensor) -> bool:
        """Copies spans to the slot, or gathers them into staging and copies that; whether without kernels."""
        if move.fence is not None:
            self.stream.wait(move.fence)
        if are_long(move.spans) and self.stream.copy(move.spans, move.region.address, slot.data_ptr()):
            return True
        with torch.inference_mode():  # pools made under it may be written only under it
            self._gather(move, index, slot)
        return False

    def drain(self, move: Move, index: int, slot: Tensor) -> bool:
        """Copies spans from the slot, or the slot to staging and scatters that; whether without kernels."""
        if are_long(move.spans) and self.stream.copy(move.spans, slot.data_ptr(), move.region.address):
            return True
        with torch.inference_mode():
            self._scatter(move, index, slot)
        return False

    def _gather(self, move: Move, index: int, slot: Tensor) -> None:
        region, spans = self._device.tensor(move.region), move.spans
        if len(spans) <= DIRECT_SPANS_MAX:
            _copy_each(spans, region, slot)
            return
        num_bytes, row_bytes = spans.num_bytes, _common_length(spans)
        if row_bytes:
            rows = _Rows.of(spans.source, row_bytes, region)
            picked, staged = self._upload(rows.picked, index), rows.staged(self._staging)
            torch.index_select(rows.view(region), 0, picked, out=staged)
        else:
            prepare(_as_step(spans), self._device.device).run(region, self._staging)
        slot[:num_bytes].copy_(self._staging[:num_bytes], non_blocking=True)

    def _scatter(self, move: Move, index: int, slot: Tensor) -> None:
        region, spans = self._device.tensor(move.region), move.spans
        if len(spans) <= DIRECT_SPANS_MAX:
            _copy_each(spans, slot, region)
            return
        num_bytes, row_bytes = spans.num_bytes, _common_length(spans)
        self._staging[:num_bytes].copy_(slot[:num_bytes], non_blocking=True)
        if row_bytes:
            rows = _Rows.of(spans.target, row_bytes, region)
            picked, staged = self._upload(rows.picked, index), rows.staged(self._staging)
            rows.view(region).index_copy_(0, picked, staged)
        else:
            prepare(_as_step(spans), self._device.device).run(self._staging, region)

    def _upload(self, picked: Ints, index: int) -> Tensor:
        host, found = self._index_host[index, : len(picked)], self._index[index, : len(picked)]
        host.numpy()[:] = picked
        return found.copy_(host, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Spans of one length as rows of the whole region, at multiples of what divides all of their offsets.

    This is packing's index for the common case, without what costs it a hundred microseconds a slot.
    """

    picked: Ints
    step: int
    row_bytes: int
    width: int

    @staticmethod
    def of(offsets: Ints, row_bytes: int, region: Tensor) -> _Rows:
        step = int(np.gcd.reduce(offsets)) or row_bytes
        width = alignment(step, row_bytes, region.data_ptr(), int(region.storage_offset()))
        return _Rows(offsets // step, step, row_bytes, width)

    def view(self, region: Tensor) -> Tensor:
        """The region as overlapping rows."""
        count = (len(region) - self.row_bytes) // self.step + 1
        typed = region[: len(region) // self.width * self.width].view(ELEMENTS[self.width])
        shape = (count, self.row_bytes // self.width)
        return typed.as_strided(shape, (self.step // self.width, 1), typed.storage_offset())

    def staged(self, staging: Tensor) -> Tensor:
        """Staging as one row after the other."""
        num_rows = len(self.picked)
        return staging[: num_rows * self.row_bytes].view(ELEMENTS[self.width]).view(num_rows, -1)


def _common_length(spans: Spans) -> int:
    """The length of every span where they have one, else 0."""
    first = int(spans.length[0])
    return first if bool((spans.length == first).all()) else 0


def _as_step(spans: Spans) -> Pack:
    return Pack(0, 0, "", "", spans)


def _copy_each(spans: Spans, source: Tensor, target: Tensor) -> None:
    triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    for read, write, length in triples:
        target[write : write + length].copy_(source[read : read + length], non_blocking=True)
