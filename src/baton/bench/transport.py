"""Throughput and latency of every transport, beside memcpy and beside its own library called bare.

A batch of equal spans, none next to another, goes from this process into another; the time is from submit to
Done. Each baseline moves the same spans and takes turns with the transport, so that other load falls on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from time import monotonic_ns, perf_counter
from typing import Any

import numpy as np

from baton.bench.baselines import baseline
from baton.bench.far_end import FarEnd, Target, random_bytes
from baton.bench.record import seconds, side_by_side
from baton.errors import TransportError
from baton.plan.steps import Spans
from baton.transport import (
    NOW,
    Batch,
    Description,
    Done,
    Peer,
    Reach,
    Region,
    RemoteRegion,
    Transport,
    open_transport,
    parse_transport,
    wait_for_events,
)

NUM_SMALL = 200
SUBMIT_SPANS = 10_000
SMALL_BYTES = 64
DONE_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """One transport, span size and batch."""

    transport: str
    span_bytes: int
    num_spans: int
    figures: dict[str, Any]

    @property
    def bytes_per_s(self) -> float:
        """Throughput by the median."""
        return self.span_bytes * self.num_spans / float(self.figures["transport"]["median_s"])

    def ratio(self, peer: str) -> float | None:
        """How this compares with a peer of the same run: above 1 is faster than it."""
        if peer not in self.figures:
            return None
        return float(self.figures[peer]["median_s"] / self.figures["transport"]["median_s"])


@dataclass(frozen=True, slots=True)
class Latency:
    """One small write: when the source knew, and when the other side did."""

    transport: str
    figures: dict[str, Any]


def spans_of(span_bytes: int, num_spans: int) -> Spans:
    """Equal spans with a gap after each, dealt to the target in another order."""
    at = np.arange(num_spans, dtype=np.int64) * 2 * span_bytes
    order = np.random.default_rng(1).permutation(num_spans)
    return Spans(at, at[order], np.full(num_spans, span_bytes, dtype=np.int64))


class Link:
    """A transport here and one at the far end, connected."""

    def __init__(self, name: str, num_bytes: int, stack: ExitStack) -> None:
        name, options = parse_transport(name)
        self.transport: Transport = open_transport(name, **options)
        stack.callback(self.transport.close)
        self.far: FarEnd | None = None
        if self.transport.capabilities.reach is Reach.PROCESS:
            found = Target(self.transport, num_bytes).invite()
            ends = (Description.from_json(found["description"]), RemoteRegion.from_json(found["region"]))
        else:
            self.far = stack.enter_context(FarEnd(name, options, num_bytes))
            ends = self.far.invite()
        self.region: RemoteRegion = ends[1]
        self.source: Region = self.transport.register(random_bytes(num_bytes, 2))
        self.peer: Peer = self.transport.connect(ends[0])

    def send(self, spans: Spans) -> None:
        """One batch, from submit to Done."""
        self.transport.submit(self.peer, Batch(self.source, self.region, spans), NOW)
        self.await_done(1)

    def await_done(self, count: int) -> None:
        """Waits for completions and raises where one is not Done."""
        limit = perf_counter() + DONE_S_MAX
        while count:
            for event in wait_for_events(self.transport, limit - perf_counter()):
                if isinstance(event, Done):
                    count -= 1
                elif hasattr(event, "cause"):
                    raise TransportError(f"{self.transport.name}: {event.cause}")
            if perf_counter() > limit:
                raise TransportError(f"{self.transport.name}: no completion within {DONE_S_MAX:.0f} s")


def throughput(name: str, span_bytes: int, num_spans: int, repeats: int) -> Result:
    """The transport, memcpy and the transport's own baseline, taking turns."""
    spans = spans_of(span_bytes, num_spans)
    num_bytes = 2 * span_bytes * num_spans
    with ExitStack() as stack:
        link = Link(name, num_bytes, stack)
        works = {"transport": lambda: link.send(spans)}
        own = () if ":" in name else (("bare", name),)
        for label, peer in (("memcpy", "memcpy"), *own):
            found: AbstractContextManager[Any] | None = baseline(peer, spans, num_bytes)
            if found is not None:
                works[label] = stack.enter_context(found).once
        for work in works.values():
            work()
        taken = side_by_side(list(works.values()), repeats)
    return Result(name, span_bytes, num_spans, dict(zip(works, taken, strict=True)))


def latency(name: str) -> Latency:
    """One small write at a time, and what a large submit costs its caller."""
    small = spans_of(SMALL_BYTES, 1)
    many = spans_of(SMALL_BYTES, SUBMIT_SPANS)
    with ExitStack() as stack:
        link = Link(name, 2 * SMALL_BYTES * SUBMIT_SPANS, stack)
        link.send(small)
        figures: dict[str, Any] = {"small_write": seconds(lambda: link.send(small), NUM_SMALL)}
        if link.far is not None and link.transport.capabilities.can_announce:
            figures["seen_by_target"] = _seen_by_target(link, small)
        times = []
        for _ in range(20):
            start = perf_counter()
            link.transport.submit(link.peer, Batch(link.source, link.region, many), NOW)
            times.append(perf_counter() - start)
            link.await_done(1)
        figures["submit_10000"] = {"best_s": min(times), "median_s": float(np.median(times))}
    return Latency(name, figures)


def _seen_by_target(link: Link, spans: Spans) -> dict[str, float]:
    """From submit here to Landed there, on the clock that both processes share."""
    assert link.far is not None
    times = []
    for tag in range(1, NUM_SMALL + 1):
        link.far.ask("landed_at", tag)
        start = monotonic_ns()
        link.transport.submit(link.peer, Batch(link.source, link.region, spans, tag), NOW)
        times.append((link.far.answer() - start) / 1e9)
        link.await_done(1)
    return {"best_s": min(times), "median_s": float(np.median(times))}


def run(names: Sequence[str], sizes: Sequence[tuple[int, int]], repeats: int) -> Iterator[Result | Latency]:
    """Every measurement in turn."""
    for name in names:
        yield latency(name)
        for span_bytes, num_spans in sizes:
            yield throughput(name, span_bytes, num_spans, repeats)
