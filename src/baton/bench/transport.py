"""Throughput and latency of every transport, beside memcpy and beside its own library called bare.

A batch of equal spans, none adjacent to another, goes from this process into another; the time is from submit
to Done. Each baseline moves the same spans in turns with the transport, so that other load falls on both.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from rich.table import Table

from baton.bench.baselines import BASELINES
from baton.bench.record import seconds, side_by_side
from baton.bench.target_process import TargetProcess, TransferTarget, random_bytes, registered
from baton.errors import ConfigError, TransportError
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
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
BATCH_BYTES_MAX = 2 << 30
_SIZE = re.compile(r"([1-9][0-9]{0,9})(B|KiB|MiB|GiB)x([1-9][0-9]{0,6})")


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """(bytes of a span, number of spans) of a comma-separated list like `4KiBx256,1MiBx64`."""
    sizes = []
    for part in text.split(","):
        match = _SIZE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"size {part!r} cannot be read; write sizes like 4KiBx256,64KiBx256")
        span_bytes, num_spans = int(match[1]) * UNITS[match[2]], int(match[3])
        if span_bytes * num_spans > BATCH_BYTES_MAX:
            raise ConfigError(
                f"size {part!r} is more than {BATCH_BYTES_MAX >> 30} GiB in one batch; use less"
            )
        sizes.append((span_bytes, num_spans))
    return sizes


def size_text(span_bytes: int, num_spans: int) -> str:
    """One size, as `parse_sizes` reads it."""
    for unit in ("GiB", "MiB", "KiB"):
        if span_bytes % UNITS[unit] == 0:
            return f"{span_bytes // UNITS[unit]}{unit}x{num_spans}"
    return f"{span_bytes}Bx{num_spans}"


@dataclass(frozen=True, slots=True)
class Throughput:
    """One transport and size of batch; `figures` by who moved the bytes."""

    transport: str
    span_bytes: int
    num_spans: int
    figures: dict[str, Any]

    @property
    def bytes_per_s(self) -> float:
        """Throughput by the median."""
        return self.span_bytes * self.num_spans / float(self.figures["transport"]["median_s"])

    def ratio(self, peer: str) -> float | None:
        """Speed over that of a baseline in the same run: above 1 is faster."""
        if peer not in self.figures:
            return None
        return float(self.figures[peer]["median_s"] / self.figures["transport"]["median_s"])


@dataclass(frozen=True, slots=True)
class Latency:
    """Times of single small writes and of a large submit."""

    transport: str
    figures: dict[str, Any]


def spans_of(span_bytes: int, num_spans: int) -> Spans:
    """Equal spans with a gap after each, dealt to the target in another order."""
    at = np.arange(num_spans, dtype=np.int64) * 2 * span_bytes
    order = np.random.default_rng(1).permutation(num_spans)
    return Spans(at, at[order], np.full(num_spans, span_bytes, dtype=np.int64))


class BenchLink:
    """A transport here, connected to one in a target process, or to itself where it reaches no further."""

    def __init__(self, name: str, num_bytes: int, stack: ExitStack) -> None:
        name, options = parse_transport(name)
        self.transport: Transport = open_transport(name, **options)
        stack.callback(self.transport.close)
        self.target: TransferTarget | TargetProcess = (
            TransferTarget(self.transport, num_bytes)
            if self.transport.capabilities.reach is Reach.PROCESS
            else stack.enter_context(TargetProcess(name, options, num_bytes))
        )
        invitation = self.target.invite()
        self.region = RemoteRegion.from_bytes(invitation["region"].encode())
        self.content = random_bytes(num_bytes, os.getpid())
        self.source: Region = registered(self.transport, self.content)
        description = Description.from_bytes(invitation["description"].encode())
        self.peer: Peer = self.transport.connect(description)

    def send(self, spans: Spans) -> None:
        """One batch, from submit to Done."""
        self.transport.submit(self.peer, Batch(self.source, self.region, spans), NOW)
        self.await_done(1)

    def await_done(self, count: int) -> None:
        """Waits for completions; raises on one that is not Done."""
        limit = perf_counter() + DONE_S_MAX
        while count:
            for event in wait_for_events(self.transport, limit - perf_counter()):
                if isinstance(event, Done):
                    count -= 1
                else:
                    raise TransportError(event.cause)
            if perf_counter() > limit:
                raise TransportError(f"no completion within {DONE_S_MAX:.0f} s")


def throughput(name: str, span_bytes: int, num_spans: int, repeats: int) -> Throughput:
    """The transport, memcpy and the transport's own baseline, in turns."""
    spans = spans_of(span_bytes, num_spans)
    num_bytes = 2 * span_bytes * num_spans
    with ExitStack() as stack:
        link = BenchLink(name, num_bytes, stack)
        works = {"transport": lambda: link.send(spans)}
        for label, baseline in (("memcpy", "memcpy"), ("bare", name)):
            if baseline in BASELINES:
                works[label] = stack.enter_context(BASELINES[baseline](spans, num_bytes)).once
        for work in works.values():
            work()
        taken = side_by_side(list(works.values()), repeats)
    return Throughput(name, span_bytes, num_spans, dict(zip(works, taken, strict=True)))


def latency(name: str) -> Latency:
    """One small write at a time, and what a large submit costs its caller."""
    small = spans_of(SMALL_BYTES, 1)
    many = spans_of(SMALL_BYTES, SUBMIT_SPANS)
    with ExitStack() as stack:
        link = BenchLink(name, 2 * SMALL_BYTES * SUBMIT_SPANS, stack)
        link.send(small)
        figures: dict[str, Any] = {"small_write": seconds(lambda: link.send(small), NUM_SMALL)}
        times = []
        for _ in range(20):
            start = perf_counter()
            link.transport.submit(link.peer, Batch(link.source, link.region, many), NOW)
            times.append(perf_counter() - start)
            link.await_done(1)
        figures["submit_10000"] = {"best_s": min(times), "median_s": float(np.median(times))}
    return Latency(name, figures)


def run(
    names: Sequence[str], sizes: Sequence[tuple[int, int]], repeats: int
) -> Iterator[Throughput | Latency]:
    """Every measurement in turn."""
    for name in names:
        yield latency(name)
        for span_bytes, num_spans in sizes:
            yield throughput(name, span_bytes, num_spans, repeats)


def throughput_table(throughputs: list[Throughput]) -> Table:
    table = Table("transport", "spans", "GB/s", "of memcpy", "of its library, bare", title="throughput")
    for result in throughputs:
        ratios = (result.ratio("memcpy"), result.ratio("bare"))
        texts = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        size = size_text(result.span_bytes, result.num_spans)
        table.add_row(result.transport, size, f"{result.bytes_per_s / 1e9:.2f}", *texts)
    return table


def latency_table(latencies: list[Latency]) -> Table:
    table = Table("transport", "64 B to Done", "submit of 10,000 spans", title="latency, medians")
    for latency in latencies:
        keys = ("small_write", "submit_10000")
        texts = (f"{latency.figures[key]['median_s'] * 1e6:.0f} us" for key in keys)
        table.add_row(latency.transport, *texts)
    return table


def record(throughputs: list[Throughput], latencies: list[Latency]) -> dict[str, dict[str, object]]:
    sizes = {f"{r.transport} {size_text(r.span_bytes, r.num_spans)}": r for r in throughputs}
    return {
        "throughput": {
            name: {
                **result.figures,
                "bytes_per_s": result.bytes_per_s,
                "of_memcpy": result.ratio("memcpy"),
                "of_bare": result.ratio("bare"),
            }
            for name, result in sizes.items()
        },
        "latency": {latency.transport: latency.figures for latency in latencies},
    }


def paint(pyplot: Any, results: Sequence[Throughput]) -> Any:
    """Bars of GB/s by size, one colour a transport, memcpy as lines."""
    names = list(dict.fromkeys(result.transport for result in results))
    sizes = list(dict.fromkeys((result.span_bytes, result.num_spans) for result in results))
    figure, axes = pyplot.subplots(figsize=(1.8 + 1.9 * len(sizes), 4.2), layout="constrained")
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        mine = {(r.span_bytes, r.num_spans): r for r in results if r.transport == name}
        at = [index + (place - (len(names) - 1) / 2) * width for index in range(len(sizes))]
        axes.bar(at, [mine[size].bytes_per_s / 1e9 for size in sizes], width * 0.92, label=name)
        # Each transport took turns with a memcpy of its own: other load was not the same for all.
        edges = ([x - width * 0.46 for x in at], [x + width * 0.46 for x in at])
        axes.hlines([_memcpy_speed(mine[size]) for size in sizes], *edges, colors="black", linewidth=1)
    axes.set_xticks(range(len(sizes)), [size_text(*size) for size in sizes])
    axes.set_ylabel("GB/s (black: memcpy in the same run)")
    figure.legend(frameon=False, ncols=min(len(names), 6), loc="outside upper center")
    return figure


def _memcpy_speed(result: Throughput) -> float:
    return result.span_bytes * result.num_spans / float(result.figures["memcpy"]["median_s"]) / 1e9
