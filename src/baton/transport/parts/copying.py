"""Span arrays copied between host buffers of one process.

Theory. Python pays about a quarter of a microsecond per copy, which is the time of 2 to 4 KiB; and a thread
that lets go of the interpreter's lock (the GIL) for each copy queues for it each time, behind whatever else
is written in Python here: 2,048 copies of 4 KiB take 3 ms alone and 2.7 s beside one busy thread. So

- equal short spans are copied by one indexing operation per half MiB. An array of items of `length` bytes
  with a stride of 1 byte has an item at every offset, hence any set of equal spans is an index into it;
- other short spans are copied one by one with the lock held, which is let go of once per burst, so that other
  threads wait for two or three milliseconds and this one queues once per 16 MiB;
- spans of 4 MiB or more are copied with the lock released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from baton.plan.steps import Spans
from baton.plan.tokens import Ints
from baton.transport.base import Bytes
from baton.transport.parts.spans import coalesce, lots

BURST_BYTES = 16 << 20
RELEASED_LENGTH_MIN = 4 << 20
WINDOW_BYTES = 512 << 10
WINDOWED_LENGTH_MAX = 16 << 10
"""Spans below this length gain from indexing: it copies twice, through the cache."""
WINDOWED_SPANS_MIN = 8
SPANS_MAX = 1 << 16


def copy_spans(spans: Spans, source: Bytes, target: Bytes, is_stopped: Callable[[], bool]) -> bool:
    """Copies until all is copied or, asked between bursts, `is_stopped`; answers whether all was."""
    for index, (burst, is_windowed) in enumerate(_bursts(spans)):
        if index:
            time.sleep(0)  # some 60 microseconds, by the kernel's timer slack: others get in
        if is_stopped():
            return False
        if is_windowed:
            _copy_windowed(burst, source, target)
        else:
            _copy_each(burst, source, target)
    return True


def _bursts(spans: Spans) -> Iterator[tuple[Spans, bool]]:
    """What is copied without letting others in, and whether by indexing."""
    if not len(spans):
        return
    if len(spans) < WINDOWED_SPANS_MIN and sum(spans.length.tolist()) < BURST_BYTES:
        yield spans, False
        return
    for group, is_windowed in _groups(coalesce(spans)):
        for burst in lots(group, BURST_BYTES, SPANS_MAX):
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
