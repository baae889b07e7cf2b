"""Spans as rows of one length, and the torch operation that moves such rows from one buffer to another.

Theory. The spans of a step nearly always have one length, so they are a matrix of rows at one set of offsets
in the source and another in the target. Two patterns are distinguished:

- nested: at both ends the offsets are an outer sum of the same few arithmetic sequences (layers x pages x
  tokens with pages in order); the whole step is then one strided copy;
- any other (pages in the order of the allocator): one end, mostly staging, is still an arithmetic sequence
  once the rows are sorted by it, and the other end is picked by an index.

Lengths differ if neighbouring pages happened to be joined or the last page is not full. Rows are then cut to
a common divisor, unless that is so small that its index would cost more than it saves.

A kernel of our own would be another `Move` here, chosen in `make_move` by device and pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.plan.steps import Spans
from baton.plan.tokens import Ints

ALIGNMENT_MAX = 16
"""The widest element that is moved at once."""
CUT_BYTES_MIN = 256
CUT_ROWS_MAX = 1 << 16
LENGTHS_MAX = 8
LEVELS_MAX = 6
# complex128 is torch's only element of 16 bytes; nothing computes with it.
ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of `source_bytes` that become `target_bytes`: their offsets at both ends."""

    source: Ints
    target: Ints
    source_bytes: int
    target_bytes: int

    def __len__(self) -> int:
        return len(self.source)


@dataclass(frozen=True, slots=True)
class Level:
    """One arithmetic sequence of a nested pattern, with its step in bytes at either end."""

    count: int
    source_step: int
    target_step: int


def equal_rows(spans: Spans, items: tuple[int, int] = (1, 1)) -> list[Rows]:
    """The spans as few sets of rows, each of one length; `items` are the element sizes at either end."""
    chosen = np.arange(len(spans), dtype=np.int64)
    # Nearly always the case, and much cheaper to check than to sort by length.
    if len(spans) and spans.length[0] and (spans.length == spans.length[0]).all():
        return [_cut(spans, chosen, int(spans.length[0]), items)]
    chosen = np.flatnonzero(spans.length)
    lengths = np.unique(spans.length[chosen])
    if len(lengths) > 1:
        unit = int(np.gcd.reduce(lengths))
        num_rows = spans.num_bytes // unit
        is_fine = unit >= CUT_BYTES_MIN and num_rows <= max(CUT_ROWS_MAX, 4 * len(spans))
        if is_fine or len(lengths) > LENGTHS_MAX:
            return [_cut(spans, chosen, unit, items)]
    return [_cut(spans, chosen[spans.length[chosen] == length], int(length), items) for length in lengths]


def _cut(spans: Spans, chosen: Ints, source_bytes: int, items: tuple[int, int]) -> Rows:
    """Rows of `source_bytes` from the spans that `chosen` names, in their order."""
    target_bytes = source_bytes // items[0] * items[1]
    counts = spans.length[chosen] // source_bytes
    if (counts == 1).all():
        return Rows(spans.source[chosen], spans.target[chosen], source_bytes, target_bytes)
    span = np.repeat(chosen, counts)
    nth = np.arange(len(span), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    source = spans.source[span] + nth * source_bytes
    target = spans.target[span] + nth * target_bytes
    return Rows(source, target, source_bytes, target_bytes)


def blocks(rows: Rows, bytes_max: int) -> list[Rows]:
    """The rows in order, in parts of at most `bytes_max` at their wider end, or of one row."""
    count = max(1, bytes_max // max(rows.source_bytes, rows.target_bytes))
    ends = (rows.source_bytes, rows.target_bytes)
    parts = [slice(first, first + count) for first in range(0, len(rows), count)]
    return [Rows(rows.source[part], rows.target[part], *ends) for part in parts]


def nested(source: Ints, target: Ints) -> tuple[Level, ...] | None:
    """The levels, outermost first, whose sums are the offsets at both ends in this order, or None.

    Found from the inside out: the first run of equal steps is as long as the innermost level, or goes on
    through outer levels that continue it, and those continue it everywhere or nowhere.
    """
    levels: list[Level] = []
    while len(source) > 1:
        steps = (int(source[1] - source[0]), int(target[1] - target[0]))
        count = min(_run_length(source, steps[0]), _run_length(target, steps[1]))
        # torch has no negative strides, and a target step of 0 would write one place twice.
        if steps[0] < 0 or steps[1] <= 0 or len(source) % count or len(levels) == LEVELS_MAX:
            return None
        nth = np.arange(count, dtype=np.int64)
        source, target = source.reshape(-1, count), target.reshape(-1, count)
        is_source, is_target = (
            bool((offsets == offsets[:, :1] + nth * step).all())
            for offsets, step in zip((source, target), steps, strict=True)
        )
        if not (is_source and is_target):
            return None
        levels.append(Level(count, *steps))
        source, target = source[:, 0], target[:, 0]
    return tuple(reversed(levels))


def _run_length(offsets: Ints, step: int) -> int:
    """How many offsets from the first on are `step` apart."""
    breaks = np.diff(offsets) != step
    return int(breaks.argmax()) + 1 if breaks.any() else len(offsets)


def common_step(offsets: Ints) -> int:
    """The distance between ascending offsets where it is the same everywhere, else 0."""
    step = int(offsets[1] - offsets[0])
    return step if step > 0 and _run_length(offsets, step) == len(offsets) else 0


def alignment(*offsets: Ints | int) -> int:
    """The largest power of two, at most ALIGNMENT_MAX, that divides every offset."""
    bits = ALIGNMENT_MAX
    for values in offsets:
        bits |= values if isinstance(values, int) else int(np.bitwise_or.reduce(values, initial=0))
    return bits & -bits


class Uploads:
    """Index arrays uploaded to a device from pinned memory, on the stream that was current at the start."""

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
        uploaded = host.pin_memory().to(self.device, non_blocking=True)
        self._sent.append(uploaded)
        self._done = self._stream.record_event()
        return uploaded

    def order(self) -> None:
        """Makes the current stream wait for the uploads, and keeps their memory until it has used them."""
        if self._stream is None or self._done is None:
            return
        current = torch.cuda.current_stream(self.device)
        if current == self._stream:
            return
        current.wait_event(self._done)
        for uploaded in self._sent:
            uploaded.record_stream(current)


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
    """The coarsest line that passes through all offsets, and the indexes of their rows on it."""
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
