"""What rank processes record of a hand-over, its figures, and its timeline.

Times are on the clock that all processes of a host share.

tth          request in to ready at the target
compute      request in to the end of the last layer, as measured
exposed      end of compute to the last byte in the target's pool
T            serial transfer time: the whole prompt ready at once, first submit to last Done, busiest rank
efficiency   1 - exposed / T
bound        the efficiency of one-layer groups without overhead, from the measured layer times: per rank
             F = max(F, R) + t over its layers, R when the layer was computed, t its share of the rank's T
control      the part of tth in which no rank computed and no copy ran. A copy runs from its submit to the
             poll that returns its end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

from baton.bench.handoff.workload import PrefillStep
from baton.engine.trace import REQUEST, across_s
from baton.observe import Interval, Timeline, Track, covered_s
from baton.transport import DEADLINE_S, Batch, Completion, Done, Fence, Peer, Ticket, Transport


@dataclass(frozen=True, slots=True)
class BatchTiming:
    """One batch: its target incarnation, and the time from submit to the poll that returned its end."""

    target: str
    submitted_s: float
    ended_s: float
    num_bytes: int
    num_spans: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """One transfer for a rank to run."""

    transfer: str
    slot: int = 0
    start_s: float = 0.0
    salt: int = 0
    is_verified: bool = False
    timeout_s: float = 120.0
    steps: tuple[PrefillStep, ...] = ()
    """At a source: what to send and when."""
    is_sampler: bool = False
    """At a source: whether this rank sends the aux record."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A source rank's part."""

    rank: int
    called_s: float
    layer_ends_s: tuple[float, ...]
    """One for each step of the order."""
    committed_s: float
    settled_s: float
    outcome: str
    copies: tuple[BatchTiming, ...] = ()
    inner_copies: tuple[BatchTiming, ...] = ()
    """Below the throttled link, if there is one."""


@dataclass(frozen=True, slots=True)
class Received:
    """The target's part."""

    rank: int
    called_s: float
    settled_s: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Handoff:
    """One transfer as all ranks saw it."""

    transfer: str
    start_s: float
    steps: dict[int, tuple[PrefillStep, ...]]
    sent: dict[int, Sent]
    received: Received
    target_ranks: dict[str, int] = field(default_factory=dict)
    """Target ranks by the incarnation of their transport."""

    @property
    def is_ready(self) -> bool:
        """Whether the target may decode."""
        return self.received.outcome == "ready"


class RecordingTransport:
    """Wraps a transport and records when each batch was submitted and when it ended."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._open: dict[Ticket, tuple[float, Batch]] = {}
        self._ended: list[BatchTiming] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, peer: Peer, batch: Batch, fence: Fence, deadline_s: float = DEADLINE_S) -> Ticket:
        """Submits a batch and records the time."""
        with self._lock:  # its end must not be polled before it is recorded
            submitted_s = monotonic()
            ticket = self._inner.submit(peer, batch, fence, deadline_s)
            self._open[ticket] = (submitted_s, batch)
        return ticket

    def poll(self) -> list[Completion]:
        """Polls, and records the batches that ended."""
        events = self._inner.poll()
        now_s = monotonic()
        with self._lock:
            for event in events:
                self._note(event.ticket, now_s, isinstance(event, Done))
        return events

    def take(self) -> list[BatchTiming]:
        """The batches that ended since the last call, in order of their end."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def _note(self, ticket: Ticket, ended_s: float, is_done: bool) -> None:
        submitted_s, batch = self._open.pop(ticket)
        spans, target = batch.spans, batch.target.incarnation
        self._ended.append(BatchTiming(target, submitted_s, ended_s, spans.num_bytes, len(spans), is_done))


@dataclass(frozen=True, slots=True)
class SerialTransfer:
    """Measured serial transfer times by source rank, and the link's time per group."""

    transfer_s: Mapping[int, float]
    overhead_s: float = 0.0

    @property
    def busiest_s(self) -> float:
        """T, the time of the busiest rank."""
        return max(self.transfer_s.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class HandoffFigures:
    """One hand-over in numbers; see the head of this file."""

    tth_s: float
    compute_s: float
    exposed_s: float
    transfer_s: float
    efficiency: float
    bound: float
    control_s: float
    late_s: float
    """The worst delay of the stand-in for compute against its schedule."""
    num_groups: int
    num_copies: int
    num_spans: int
    num_bytes: int


def serial_of(whole: Sequence[Handoff], layered: Sequence[Handoff]) -> SerialTransfer:
    """From hand-overs with the whole prompt ready: in one group, and in groups of one layer."""
    by_rank: dict[int, list[float]] = {}
    for handoff in whole:
        for rank, seconds in _transfers_s(handoff).items():
            by_rank.setdefault(rank, []).append(seconds)
    transfer_s = {rank: median(seconds) for rank, seconds in by_rank.items()}
    group_s = []
    for handoff in layered:
        for rank, seconds in _transfers_s(handoff).items():
            num_groups = sum(step.sends[0] < step.sends[1] for step in handoff.steps[rank])
            if num_groups > 1:
                group_s.append((seconds - transfer_s.get(rank, seconds)) / (num_groups - 1))
    return SerialTransfer(transfer_s, max(0.0, median(group_s)) if group_s else 0.0)


def _transfers_s(handoff: Handoff) -> dict[int, float]:
    """From the first submit to the last Done of every rank that sent something."""
    return {
        rank: max(copy.ended_s for copy in sent.copies) - min(copy.submitted_s for copy in sent.copies)
        for rank, sent in handoff.sent.items()
        if sent.copies
    }


def compute_end_s(handoff: Handoff) -> float:
    """When the last layer was computed; the start of the request if nothing is computed."""
    ends = [sent.layer_ends_s[-1] for sent in handoff.sent.values() if sent.layer_ends_s]
    return max(ends, default=handoff.start_s)


def last_byte_s(handoff: Handoff) -> float:
    """When the last copy was done; the end of compute if there was none."""
    ends = [copy.ended_s for sent in handoff.sent.values() for copy in sent.copies]
    return max([compute_end_s(handoff), *ends])


def figures(handoff: Handoff, serial: SerialTransfer) -> HandoffFigures:
    """The figures of one hand-over that succeeded."""
    copies = [copy for sent in handoff.sent.values() for copy in sent.copies]
    exposed_s = last_byte_s(handoff) - compute_end_s(handoff)
    total_s = serial.busiest_s
    tth_s = handoff.received.settled_s - handoff.start_s
    return HandoffFigures(
        tth_s=tth_s,
        compute_s=compute_end_s(handoff) - handoff.start_s,
        exposed_s=exposed_s,
        transfer_s=total_s,
        efficiency=1 - exposed_s / total_s if total_s else 1.0,
        bound=bound(handoff, serial),
        control_s=tth_s - covered_s(busy(handoff)),
        late_s=_late_s(handoff),
        num_groups=sum(s.sends[0] < s.sends[1] for steps in handoff.steps.values() for s in steps),
        num_copies=len(copies),
        num_spans=sum(copy.num_spans for copy in copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
    )


def busy(handoff: Handoff) -> list[tuple[float, float]]:
    """When a rank computed or a copy ran, within the request."""
    first, last = handoff.start_s, handoff.received.settled_s
    pieces = [(first, min(compute_end_s(handoff), last))] if any(_computes(handoff)) else []
    for sent in handoff.sent.values():
        for copy in sent.copies:
            pieces.append((max(first, copy.submitted_s), min(last, copy.ended_s)))
    return [(start, stop) for start, stop in pieces if start < stop]


def _computes(handoff: Handoff) -> list[bool]:
    return [step.at_s > 0 for steps in handoff.steps.values() for step in steps]


def bound(handoff: Handoff, serial: SerialTransfer) -> float:
    """The efficiency of one-layer groups without overhead at the layer times of this hand-over."""
    end_s, last_s = compute_end_s(handoff), 0.0
    for rank, steps in handoff.steps.items():
        total_bytes = sum(step.num_bytes for step in steps)
        if not total_bytes or rank not in serial.transfer_s:
            continue
        ends_s = handoff.sent[rank].layer_ends_s
        dues = [(ready_s, step.num_bytes) for step, ready_s in zip(steps, ends_s, strict=True)]
        last_s = max(last_s, across_s(dues, serial.transfer_s[rank] / total_bytes, handoff.start_s))
    exposed_s = max(0.0, last_s - end_s)
    return 1 - exposed_s / serial.busiest_s if serial.busiest_s else 1.0


def _late_s(handoff: Handoff) -> float:
    late = [
        end_s - handoff.start_s - step.at_s
        for rank, sent in handoff.sent.items()
        for step, end_s in zip(handoff.steps[rank], sent.layer_ends_s, strict=True)
    ]
    return max(late, default=0.0)


def inner_bytes_per_s(handoff: Handoff) -> float:
    """Speed of the transport below the throttled link, of the slowest rank; 0 without a link."""
    speeds = []
    for sent in handoff.sent.values():
        busy_s = covered_s((copy.submitted_s, copy.ended_s) for copy in sent.inner_copies)
        if busy_s:
            speeds.append(sum(copy.num_bytes for copy in sent.inner_copies) / busy_s)
    return min(speeds, default=0.0)


def timeline_of(handoff: Handoff, name: str = "") -> Timeline:
    """Queue, compute by group, copies by route, exposed transfer and admission; the request starts at 0."""
    return Timeline(name or handoff.transfer, tuple(_intervals(handoff)))


def _intervals(handoff: Handoff) -> Iterator[Interval]:
    zero_s = handoff.start_s
    computed_s, landed_s = compute_end_s(handoff) - zero_s, last_byte_s(handoff) - zero_s
    ready_s = handoff.received.settled_s - zero_s
    called_s = max(0.0, handoff.received.called_s - zero_s)
    yield Interval(Track(REQUEST, "queue"), "queue", 0.0, called_s)
    yield Interval(Track(REQUEST, "prefill"), "prefill", min(called_s, computed_s), computed_s)
    yield Interval(Track(REQUEST, "exposed transfer"), "exposed", computed_s, landed_s)
    yield Interval(
        Track(REQUEST, "admission"),
        "admission",
        min(landed_s, ready_s),
        ready_s,
        {"outcome": handoff.received.outcome},
    )
    for rank, sent in sorted(handoff.sent.items()):
        yield from _groups(handoff, rank, sent)
        yield from _copies(handoff, rank, sent)


def _groups(handoff: Handoff, rank: int, sent: Sent) -> Iterator[Interval]:
    """Compute of every group of layers; a stage that waits for another one leaves a gap."""
    track = Track(f"source rank {rank}", "compute")
    steps = handoff.steps[rank]
    layer_s = _layer_s([step.at_s for step in steps])
    first, last_s = 0, 0.0
    for index, step in enumerate(steps):
        if step.sends[0] >= step.sends[1]:
            continue
        stop_s = sent.layer_ends_s[index] - handoff.start_s
        start_s = min(stop_s, max(last_s, steps[first].at_s - layer_s))
        layers, tokens = step.sends, step.tokens
        details = {"tokens": f"{tokens[0]}-{tokens[1]}"}
        yield Interval(track, f"layers {layers[0]}-{layers[1]}", start_s, stop_s, details)
        first, last_s = index + 1, stop_s


def _layer_s(ends: list[float]) -> float:
    """A layer's own time, from the ends of the layers; they are alike inside a chunk."""
    gaps = [right - left for left, right in pairwise(ends) if right > left]
    return min(gaps, default=ends[0] if ends else 0.0)


def _copies(handoff: Handoff, rank: int, sent: Sent) -> Iterator[Interval]:
    targets = handoff.target_ranks
    for copy in sorted(sent.copies, key=lambda copy: targets.get(copy.target, -1)):
        target = targets.get(copy.target, -1)
        yield Interval(
            Track(f"source rank {rank}", f"copy to {target}"),
            f"{rank} to {target}" if copy.is_done else f"{rank} to {target}, failed",
            max(0.0, copy.submitted_s - handoff.start_s),
            max(0.0, copy.ended_s - handoff.start_s),
            {"bytes": copy.num_bytes, "spans": copy.num_spans},
        )
