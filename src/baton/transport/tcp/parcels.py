"""Batches cut into parts, the queue from which streams take them, and how a part is sent."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from baton.plan.steps import Spans
from baton.transport.base import Bytes
from baton.transport.parts.copying import copy_spans
from baton.transport.parts.spans import coalesce, join, lots
from baton.transport.parts.tickets import Job
from baton.transport.tcp.frames import PART_SPANS_MAX, PartHeader
from baton.transport.tcp.wire import is_scattered, send_all, windows

PART_BYTES_MIN = 1 << 20
PART_BYTES_MAX = 16 << 20


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch that was taken up, and how many of its parts are not accounted for."""

    job: Job
    num_parts: int
    num_left: int
    is_on_wire: bool = False
    is_cut_short: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one stream sends at a time."""

    delivery: Delivery
    spans: Spans


def make_parts(job: Job, num_streams: int) -> list[Part]:
    """A batch in parts that keep all streams busy; an empty one is a part too, so that it is announced."""
    spans = coalesce(job.batch.spans)
    share = -(-spans.num_bytes // num_streams)
    part_bytes = min(max(share, PART_BYTES_MIN), PART_BYTES_MAX)
    found = list(lots(spans, part_bytes, PART_SPANS_MAX)) or [spans]
    delivery = Delivery(job, len(found), len(found))
    return [Part(delivery, lot) for lot in found]


def send_part(sock: socket.socket, part: Part) -> None:
    """Sends a part from where it lies."""
    batch, spans = part.delivery.job.batch, part.spans
    table = np.stack(join(spans.target, spans.length), axis=1).astype("<i8", copy=False)
    header = PartHeader(
        region=batch.target.number,
        ticket=part.delivery.job.ticket.number,
        tag=batch.tag,
        num_parts=part.delivery.num_parts,
        num_spans=len(table),
        num_bytes=spans.num_bytes,
    )
    front = [memoryview(header.to_bytes()), memoryview(table.tobytes())]
    for views in _payload(spans, part.delivery.job.source):
        send_all(sock, front + views)
        front = []
    if front:
        send_all(sock, front)


def _payload(spans: Spans, source: Bytes) -> Iterator[list[memoryview]]:
    """The bytes of a part in lots for one system call each; crumbs are swept together first."""
    start, length = join(spans.source, spans.length)
    if is_scattered(length):
        swept = np.empty(int(length.sum()), dtype=np.uint8)
        copy_spans(Spans(start, np.cumsum(length) - length, length), source, swept, lambda: False)
        source, start, length = swept, start[:1] * 0, np.array([len(swept)])
    yield from windows(source, start, length)


@dataclass(slots=True)
class Parcels:
    """Jobs and parts in the order in which they are to be sent."""

    _items: deque[Job | Part] = field(default_factory=deque)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _is_open: bool = True

    def put(self, job: Job) -> None:
        """Appends a batch."""
        with self._news:
            self._items.append(job)
            self._news.notify()

    def put_first(self, parts: list[Part]) -> None:
        """Puts parts before everything else."""
        with self._news:
            self._items.extendleft(reversed(parts))
            self._news.notify(len(parts))

    def take(self) -> Job | Part | None:
        """The next item, when there is one; None once closed."""
        with self._news:
            while self._is_open and not self._items:
                self._news.wait()
            return self._items.popleft() if self._is_open else None

    def close(self) -> None:
        """Lets every taker go."""
        with self._news:
            self._is_open = False
            self._items.clear()
            self._news.notify_all()
