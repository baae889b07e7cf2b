"""Rows of bytes from one buffer to another, unchanged, by the torch operation that fits their pattern.

A kernel of our own would be one more `Move` here, chosen in `make_move` by device and pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.plan.tokens import Ints
from baton.transport.packing.rows import ALIGNMENT_MAX, Level, alignment, common_step, nested

# complex128 is torch's only element of 16 bytes; nothing computes with it.
ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Uploads:
    """Index arrays on their way to a device, copied from pinned memory behind the stream that asked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._sent: list[Tensor] = []
        self._done: torch.cuda.Event | None = None

    def put(self, values: Ints) -> Tensor:
        """The values on the device; on the host nothing is copied."""
        host = torch.from_numpy(np.ascontiguousarray(values))
        if self._stream is None:
            return host
        found = host.pin_memory().to(self.device, non_blocking=True)
        self._sent.append(found)
        self._done = self._stream.record_event()
        return found

    def order(self) -> None:
        """Puts the current stream behind the uploads, and keeps their memory until it is through."""
        if self._stream is None or self._done is None:
            return
        current = torch.cuda.current_stream(self.device)
        if current == self._stream:
            return
        current.wait_event(self._done)
        for found in self._sent:
            found.record_stream(current)


class Move(Protocol):
    """Rows that can be moved between any two buffers that are long enough."""

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copies every row on the current stream."""


@dataclass(frozen=True, slots=True)
class Line:
    """Rows at equal distances: `count` of them, `step` bytes apart."""

    start: int
    step: int
    count: int

    def view(self, buffer: Tensor, row_bytes: int) -> Tensor:
        """The rows as a matrix, in elements as wide as those of `buffer`."""
        width = buffer.element_size()
        first = buffer.storage_offset() + self.start // width
        return buffer.as_strided((self.count, row_bytes // width), (self.step // width, 1), first)


@dataclass(frozen=True, slots=True)
class Nested:
    """Rows that lie in a nested pattern at both ends: one strided copy."""

    starts: tuple[int, int]
    levels: tuple[Level, ...]
    row_bytes: int
    width: int

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copies every row on the current stream."""
        source, target = widened(self.width, source, target)
        num_elements = self.row_bytes // source.element_size()
        read, written = nested_views(source, target, self.starts, self.levels, num_elements)
        written.copy_(read)


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows picked from the source into a line of the target."""

    source: Line
    picked: Tensor
    target: Line
    row_bytes: int
    width: int

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copies every row on the current stream."""
        source, target = widened(self.width, source, target)
        rows = self.target.view(target, self.row_bytes)
        torch.index_select(self.source.view(source, self.row_bytes), 0, self.picked, out=rows)


@dataclass(frozen=True, slots=True)
class Scatter:
    """A line of the source put to picked rows of the target."""

    source: Line
    target: Line
    picked: Tensor
    row_bytes: int
    width: int

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copies every row on the current stream."""
        source, target = widened(self.width, source, target)
        rows = self.source.view(source, self.row_bytes)
        self.target.view(target, self.row_bytes).index_copy_(0, self.picked, rows)


@dataclass(frozen=True, slots=True)
class Both:
    """Rows picked at both ends, through memory of their own."""

    gather: Gather
    scatter: Scatter
    num_bytes: int

    def run(self, source: Tensor, target: Tensor) -> None:
        """Copies every row on the current stream."""
        between = torch.empty(self.num_bytes, dtype=torch.uint8, device=source.device)
        self.gather.run(source, between)
        self.scatter.run(between, target)


def make_move(source: Ints, target: Ints, row_bytes: int, uploads: Uploads) -> Move:
    """The move of rows between these offsets, which may come in any order."""
    width = alignment(source, target, row_bytes)
    levels = nested(source, target)
    if levels is not None:
        return Nested((int(source[0]), int(target[0])), levels, row_bytes, width)
    order = np.argsort(target, kind="stable")
    step = common_step(target[order])
    if step:
        line, picked = _picked(source[order], uploads)
        return Gather(line, picked, Line(int(target[order[0]]), step, len(order)), row_bytes, width)
    order = np.argsort(source, kind="stable")
    step = common_step(source[order])
    if step:
        line, picked = _picked(target[order], uploads)
        return Scatter(Line(int(source[order[0]]), step, len(order)), line, picked, row_bytes, width)
    between = Line(0, row_bytes, len(order))
    gather = Gather(*_picked(source, uploads), between, row_bytes, alignment(source, row_bytes))
    scatter = Scatter(between, *_picked(target, uploads), row_bytes, alignment(target, row_bytes))
    return Both(gather, scatter, row_bytes * len(order))


def _picked(offsets: Ints, uploads: Uploads) -> tuple[Line, Tensor]:
    """The coarsest line that passes through all offsets, and which of its rows they are."""
    start = int(offsets.min())
    places = offsets - start
    step = int(np.gcd.reduce(places)) or ALIGNMENT_MAX
    return Line(start, step, int(places.max()) // step + 1), uploads.put(places // step)


def widened(width: int, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both buffers in elements of `width` bytes, or of fewer where a buffer itself begins between two."""
    width = min(width, buffer_alignment(source), buffer_alignment(target))
    return typed(source, ELEMENTS[width]), typed(target, ELEMENTS[width])


def buffer_alignment(buffer: Tensor) -> int:
    """What the first byte of a buffer is aligned to, in memory and in its storage."""
    return alignment(buffer.data_ptr(), int(buffer.storage_offset()))


def typed(buffer: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer of bytes as elements of `dtype`, less the bytes at the end that are no whole element."""
    return buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)


def nested_views(
    source: Tensor, target: Tensor, starts: tuple[int, int], levels: tuple[Level, ...], num_elements: int
) -> tuple[Tensor, Tensor]:
    """The rows of a nested pattern at both ends; `starts` and the levels' steps are in bytes."""
    counts = (*(level.count for level in levels), num_elements)
    steps = ([level.source_step for level in levels], [level.target_step for level in levels])
    views = []
    for buffer, start, apart in zip((source, target), starts, steps, strict=True):
        width = buffer.element_size()
        strides = (*(step // width for step in apart), 1)
        views.append(buffer.as_strided(counts, strides, buffer.storage_offset() + start // width))
    return views[0], views[1]
