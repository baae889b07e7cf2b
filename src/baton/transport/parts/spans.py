"""Span arrays checked, joined and cut."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.plan.tokens import Ints

_INT64 = np.dtype(np.int64)
FEW = 16
"""Below this many spans plain integers are faster than arrays."""


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
    if len(length) <= FEW:
        pairs = zip(start.tolist(), length.tolist(), strict=True)
        return all(first >= 0 and size >= 1 and first + size <= limit for first, size in pairs)
    # One of these four has its sign bit set when a range is outside; none can overflow unless another is set.
    room = limit - length
    sign = start | (length - 1) | room | (room - start)
    return int(sign.min()) >= 0


def coalesce(spans: Spans) -> Spans:
    """The same copy with neighbours joined where they adjoin at both ends."""
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


def join(start: Ints, length: Ints) -> tuple[Ints, Ints]:
    """Ranges in their order, with those joined that adjoin the one before."""
    if len(start) < 2:
        return start, length
    first = np.flatnonzero(np.append(True, start[1:] != start[:-1] + length[:-1]))
    if len(first) == len(start):
        return start, length
    return start[first], np.add.reduceat(length, first)


def cut(spans: Spans, length_max: int) -> Spans:
    """The same copy with no span longer than this."""
    if not len(spans) or int(spans.length.max()) <= length_max:
        return spans
    num_pieces = -(-spans.length // length_max)
    owner = np.repeat(np.arange(len(spans)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    offset = (np.arange(len(owner)) - first[owner]) * length_max
    length = np.minimum(spans.length[owner] - offset, length_max)
    return Spans(spans.source[owner] + offset, spans.target[owner] + offset, length)


def lots(spans: Spans, bytes_max: int, spans_max: int) -> Iterator[Spans]:
    """The same copy in lots of at most so many bytes and spans; what is longer is cut."""
    if spans.num_bytes <= bytes_max and len(spans) <= spans_max:
        return iter((spans,) if len(spans) else ())
    return split(cut(spans, bytes_max), bytes_max, spans_max)


def split(spans: Spans, bytes_max: int, spans_max: int) -> Iterator[Spans]:
    """The same copy in parts of at most so many bytes and spans; no span may be longer than a part."""
    ends = np.cumsum(spans.length)
    start = 0
    while start < len(spans):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + bytes_max, side="right"))
        stop = min(max(stop, start + 1), start + spans_max)
        yield Spans(spans.source[start:stop], spans.target[start:stop], spans.length[start:stop])
        start = stop
