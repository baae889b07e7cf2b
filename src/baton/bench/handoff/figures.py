"""What a hand-over took, and what of it could not have been less.

tth          request in to ready at the target
compute      request in to the end of the last layer, as it was in fact
exposed      end of compute to the last byte in the target's pool
T            serial transfer time: the whole prompt ready at once, first submit to last Done, busiest rank
efficiency   1 - exposed / T
bound        the efficiency of one-layer groups without overhead, from the measured layer times: per rank
             F = max(F, R) + t over its layers, R when the layer was computed, t its share of the rank's T
control      the part of tth in which no rank computed and no copy was under way: what is neither bytes
             nor compute. A copy is under way from its submit to the poll that tells of its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from baton.bench.handoff.records import HandOver
from baton.observe import covered_s


@dataclass(frozen=True, slots=True)
class Serial:
    """Serial transfer times, measured: by source rank, and what the link loses with each group."""

    transfer_s: Mapping[int, float]
    overhead_s: float = 0.0

    @property
    def busiest_s(self) -> float:
        """T."""
        return max(self.transfer_s.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """One hand-over in numbers; see the head of this file."""

    tth_s: float
    compute_s: float
    exposed_s: float
    transfer_s: float
    efficiency: float
    bound: float
    control_s: float
    late_s: float
    """By how much the producer was late at worst."""
    num_groups: int
    num_copies: int
    num_spans: int
    num_bytes: int


def serial_of(whole: Sequence[HandOver], layered: Sequence[HandOver]) -> Serial:
    """From hand-overs whose prompt was ready at once, in one group and in groups of one layer."""
    by_rank: dict[int, list[float]] = {}
    for found in whole:
        for rank, seconds in _transfers_s(found).items():
            by_rank.setdefault(rank, []).append(seconds)
    transfer_s = {rank: median(seconds) for rank, seconds in by_rank.items()}
    lost = []
    for found in layered:
        for rank, seconds in _transfers_s(found).items():
            num_groups = sum(step.sends[0] < step.sends[1] for step in found.steps[rank])
            if num_groups > 1:
                lost.append((seconds - transfer_s.get(rank, seconds)) / (num_groups - 1))
    return Serial(transfer_s, max(0.0, median(lost)) if lost else 0.0)


def _transfers_s(found: HandOver) -> dict[int, float]:
    """From the first submit to the last Done of every rank that sent something."""
    return {
        rank: max(copy.ended_s for copy in sent.copies) - min(copy.submitted_s for copy in sent.copies)
        for rank, sent in found.sent.items()
        if sent.copies
    }


def compute_end_s(found: HandOver) -> float:
    """When the last layer was computed; the start of the request where nothing is."""
    ends = [sent.layer_ends_s[-1] for sent in found.sent.values() if sent.layer_ends_s]
    return max(ends, default=found.start_s)


def last_byte_s(found: HandOver) -> float:
    """When the last copy was done; the end of compute where there was none."""
    ends = [copy.ended_s for sent in found.sent.values() for copy in sent.copies]
    return max([compute_end_s(found), *ends])


def figures(found: HandOver, serial: Serial) -> Figures:
    """The figures of one hand-over that succeeded."""
    copies = [copy for sent in found.sent.values() for copy in sent.copies]
    exposed_s = last_byte_s(found) - compute_end_s(found)
    total_s = serial.busiest_s
    tth_s = found.received.settled_s - found.start_s
    return Figures(
        tth_s=tth_s,
        compute_s=compute_end_s(found) - found.start_s,
        exposed_s=exposed_s,
        transfer_s=total_s,
        efficiency=1 - exposed_s / total_s if total_s else 1.0,
        bound=bound(found, serial),
        control_s=tth_s - covered_s(busy(found)),
        late_s=_late_s(found),
        num_groups=sum(s.sends[0] < s.sends[1] for steps in found.steps.values() for s in steps),
        num_copies=len(copies),
        num_spans=sum(copy.num_spans for copy in copies),
        num_bytes=sum(copy.num_bytes for copy in copies),
    )


def busy(found: HandOver) -> list[tuple[float, float]]:
    """When a rank computed or a copy was under way, inside of the request's time."""
    first, last = found.start_s, found.received.settled_s
    pieces = [(first, min(compute_end_s(found), last))] if any(_computes(found)) else []
    for sent in found.sent.values():
        for copy in sent.copies:
            pieces.append((max(first, copy.submitted_s), min(last, copy.ended_s)))
    return [(start, stop) for start, stop in pieces if start < stop]


def _computes(found: HandOver) -> list[bool]:
    return [step.at_s > 0 for steps in found.steps.values() for step in steps]


def bound(found: HandOver, serial: Serial) -> float:
    """What one-layer groups without overhead would have reached at the layer times of this hand-over."""
    end_s, last_s = compute_end_s(found), 0.0
    for rank, steps in found.steps.items():
        total_bytes = sum(step.num_bytes for step in steps)
        if not total_bytes or rank not in serial.transfer_s:
            continue
        finish_s = found.start_s
        for step, ready_s in zip(steps, found.sent[rank].layer_ends_s, strict=True):
            finish_s = max(finish_s, ready_s) + serial.transfer_s[rank] * step.num_bytes / total_bytes
        last_s = max(last_s, finish_s)
    exposed_s = max(0.0, last_s - end_s)
    return 1 - exposed_s / serial.busiest_s if serial.busiest_s else 1.0


def _late_s(found: HandOver) -> float:
    late = [
        end_s - found.start_s - step.at_s
        for rank, sent in found.sent.items()
        for step, end_s in zip(found.steps[rank], sent.layer_ends_s, strict=True)
    ]
    return max(late, default=0.0)


def inner_bytes_per_s(found: HandOver) -> float:
    """How fast the transport under the throttled link was, the slowest rank's figure; 0 without a link."""
    speeds = []
    for sent in found.sent.values():
        busy_s = covered_s((copy.submitted_s, copy.ended_s) for copy in sent.inner_copies)
        if busy_s:
            speeds.append(sum(copy.num_bytes for copy in sent.inner_copies) / busy_s)
    return min(speeds, default=0.0)
