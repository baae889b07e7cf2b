"""Span arrays: checked, joined, split, and copied between host buffers of one process.

Theory of the copy. Python spends about a quarter of a microsecond on each copy, the time of 2 to 4 KiB. A
thread that releases the GIL for each copy queues for it again each time, behind any other Python thread:
2,048 copies of 4 KiB take 3 ms alone and 2.7 s beside one busy thread. Therefore

- equal short spans are copied by one indexing operation per half MiB. An array of items of `length` bytes
  with a stride of 1 byte has an item at every offset, so any set of equal spans is an index into it;
- other short spans are copied one by one with the GIL held. It is released once per burst, so other threads
  wait two or three milliseconds at most, and this thread queues for the GIL once per 16 MiB;
- spans of 4 MiB or more are copied with the GIL released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.plan.tokens import Ints
from baton.transport.base import Bytes

_INT64 = np.dtype(np.int64)
FEW_SPANS = 16
"""Up to this many spans, plain integers are faster than arrays."""
BURST_BYTES = 16 << 20
RELEASED_LENGTH_MIN = 4 << 20
WINDOW_BYTES = 512 << 10
WINDOWED_LENGTH_MAX = 16 << 10
"""Spans below this length gain from indexing, which copies twice, through the cache."""
WINDOWED_SPANS_MIN = 8
BURST_SPANS_MAX = 1 << 16


def check_spans(spans: Spans, source_bytes: int, target_bytes: int) -> None:
    """Raises unless these are int64 arrays of one length whose ranges lie inside both regions."""
    for name, values in (("source", spans.source), ("target", spans.target), ("length", spans.length)):
        if values.dtype != _INT64 or values.shape != (len(spans),):
            raise TransportError(
                f"span {name} has to be {len(spans)} flat int64; got {values.dtype} {values.shape}"
            )
    ends = (("source", spans.source, source_bytes), ("target", spans.target, target_bytes))
    for name, start, limit in ends:
        if not are_inside(start, spans.length, limit):
            raise TransportError(f"a span lies outside of its {name} region of {limit} bytes")


def are_inside(start: Ints, length: Ints, limit: int) -> bool:
    """Whether every range is positive and inside [0, limit)."""
    if len(length) <= FEW_SPANS:
        pairs = zip(start.tolist(), length.tolist(), strict=True)
        return all(first >= 0 and size >= 1 and first + size <= limit for first, size in pairs)
    # If a range is outside, one of these four has its sign bit set; none can overflow unless another is set.
    room = limit - length
    sign = start | (length - 1) | room | (room - start)
    return int(sign.min()) >= 0


def coalesce(spans: Spans) -> Spans:
    """The same copy, with neighbours joined where they adjoin at both ends."""
    if len(spans) < 2:
        return spans
    ends_source, ends_target = spans.source + spans.length, spans.target + spans.length
    is_first = np.empty(len(spans), dtype=np.bool_)
    is_first[0] = True
    is_first[1:] = (ends_source[:-1] != spans.source[1:]) | (ends_target[:-1] != spans.target[1:])
    if is_first.all():
        return spans
    first = np.flatnonzero(is_first)
    return Spans(spans.source[first], spans.target[first], np.add.reduceat(spans.length, first))


def join_ranges(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """The ranges in their order, each joined to the one before if they adjoin."""
    if len(start) < 2:
        return start, length
    first = np.flatnonzero(np.append(True, start[1:] != start[:-1] + length[:-1]))
    if len(first) == len(start):
        return start, length
    return start[first], np.add.reduceat(length, first)


def cut(spans: Spans, length_max: int) -> Spans:
    """The same copy with no span longer than `length_max`."""
    if not len(spans) or int(spans.length.max()) <= length_max:
        return spans
    num_pieces = -(-spans.length // length_max)
    owner = np.repeat(np.arange(len(spans)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    offset = (np.arange(len(owner)) - first[owner]) * length_max
    length = np.minimum(spans.length[owner] - offset, length_max)
    return Spans(spans.source[owner] + offset, spans.target[owner] + offset, length)


def split(spans: Spans, bytes_max: int, spans_max: int) -> Iterator[Spans]:
    """The same copy in parts of at most so many bytes and spans; longer spans are cut."""
    if spans.num_bytes <= bytes_max and len(spans) <= spans_max:
        return iter((spans,) if len(spans) else ())
    return _split(cut(spans, bytes_max), bytes_max, spans_max)


def _split(spans: Spans, bytes_max: int, spans_max: int) -> Iterator[Spans]:
    ends = np.cumsum(spans.length)
    start = 0
    while start < len(spans):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bytes_max, side="right"))
        stop = min(max(stop, start + 1), start + spans_max)
        yield Spans(spans.source[start:stop], spans.target[start:stop], spans.length[start:stop])
        start = stop


def copy_spans(spans: Spans, source: Bytes, target: Bytes, is_stopped: Callable[[], bool]) -> bool:
    """Copies burst by burst until `is_stopped`; returns whether everything was copied."""
    for index, (burst, is_windowed) in enumerate(_bursts(spans)):
        if index:
            time.sleep(0)  # about 60 microseconds, the kernel's timer slack: other threads get the GIL
        if is_stopped():
            return False
        if is_windowed:
            _copy_windowed(burst, source, target)
        else:
            _copy_each(burst, source, target)
    return True


def _bursts(spans: Spans) -> Iterator[tuple[Spans, bool]]:
    """What is copied without releasing the GIL in between, and whether by indexing."""
    if not len(spans):
        return
    if len(spans) < WINDOWED_SPANS_MIN and sum(spans.length.tolist()) < BURST_BYTES:
        yield spans, False
        return
    for group, is_windowed in _groups(coalesce(spans)):
        for burst in split(group, BURST_BYTES, BURST_SPANS_MAX):
            yield burst, is_windowed


def _groups(spans: Spans) -> Iterator[tuple[Spans, bool]]:
    """Equal short spans together, to be copied by indexing, and the rest."""
    shortest, longest = int(spans.length.min()), int(spans.length.max())
    if shortest == longest or shortest >= WINDOWED_LENGTH_MAX:
        yield spans, longest < WINDOWED_LENGTH_MAX and len(spans) >= WINDOWED_SPANS_MIN
        return
    lengths, counts = np.unique(spans.length, return_counts=True)
    windowed = lengths[(counts >= WINDOWED_SPANS_MIN) & (lengths < WINDOWED_LENGTH_MAX)]
    for length in windowed:
        yield _select(spans, np.flatnonzero(spans.length == length)), True
    rest = np.flatnonzero(~np.isin(spans.length, windowed))
    if len(rest):
        yield _select(spans, rest), False


def _select(spans: Spans, index: Ints) -> Spans:
    return Spans(spans.source[index], spans.target[index], spans.length[index])


def _copy_windowed(spans: Spans, source: Bytes, target: Bytes) -> None:
    length = int(spans.length[0])
    source_items, target_items = _items(source, length), _items(target, length)
    step = max(1, WINDOW_BYTES // length)
    for start in range(0, len(spans), step):
        stop = start + step
        target_items[spans.target[start:stop]] = source_items[spans.source[start:stop]]


def _items(buffer: Bytes, length: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    return np.ndarray((len(buffer) - length + 1,), f"V{length}", buffer, 0, (1,))


def _copy_each(spans: Spans, source: Bytes, target: Bytes) -> None:
    source_view, target_view = memoryview(source), memoryview(target)  # type: ignore[arg-type]
    triples = zip(spans.source.tolist(), spans.target.tolist(), spans.length.tolist(), strict=True)
    for read, write, length in triples:
        if length >= RELEASED_LENGTH_MIN:
            np.copyto(target[write : write + length], source[read : read + length])
        else:
            target_view[write : write + length] = source_view[read : read + length]
