"""A hand-over as a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from baton.bench.handoff.figures import compute_end_s, last_byte_s
from baton.bench.handoff.records import HandOver, Sent
from baton.observe import Interval, Timeline, Track

REQUEST = "request"


def story(found: HandOver, name: str = "") -> Timeline:
    """Queue, compute by group, copies by route, exposed transfer and admission; the request starts at 0."""
    return Timeline(name or found.transfer, tuple(_intervals(found)))


def _intervals(found: HandOver) -> Iterator[Interval]:
    zero_s = found.start_s
    computed_s, landed_s = compute_end_s(found) - zero_s, last_byte_s(found) - zero_s
    ready_s = found.received.settled_s - zero_s
    called_s = max(0.0, found.received.called_s - zero_s)
    yield Interval(Track(REQUEST, "queue"), "queue", 0.0, called_s)
    yield Interval(Track(REQUEST, "prefill"), "prefill", min(called_s, computed_s), computed_s)
    yield Interval(Track(REQUEST, "exposed transfer"), "exposed", computed_s, landed_s)
    yield Interval(
        Track(REQUEST, "admission"),
        "admission",
        min(landed_s, ready_s),
        ready_s,
        {"outcome": found.received.outcome},
    )
    for rank, sent in sorted(found.sent.items()):
        yield from _groups(found, rank, sent)
        yield from _copies(found, rank, sent)


def _groups(found: HandOver, rank: int, sent: Sent) -> Iterator[Interval]:
    """Compute of every group of layers; a stage that waits for another one leaves a gap."""
    track = Track(f"source rank {rank}", "compute")
    steps = found.steps[rank]
    layer_s = _layer_s([step.at_s for step in steps])
    first, last_s = 0, 0.0
    for index, step in enumerate(steps):
        if step.sends[0] >= step.sends[1]:
            continue
        stop_s = sent.layer_ends_s[index] - found.start_s
        start_s = min(stop_s, max(last_s, steps[first].at_s - layer_s))
        layers, tokens = step.sends, step.tokens
        details = {"tokens": f"{tokens[0]}-{tokens[1]}"}
        yield Interval(track, f"layers {layers[0]}-{layers[1]}", start_s, stop_s, details)
        first, last_s = index + 1, stop_s


def _layer_s(ends: list[float]) -> float:
    """A layer's own time, from the ends of the layers; they are alike inside a chunk."""
    gaps = [right - left for left, right in pairwise(ends) if right > left]
    return min(gaps, default=ends[0] if ends else 0.0)


def _copies(found: HandOver, rank: int, sent: Sent) -> Iterator[Interval]:
    targets = found.target_ranks
    for copy in sorted(sent.copies, key=lambda each: targets.get(each.target, -1)):
        target = targets.get(copy.target, -1)
        yield Interval(
            Track(f"source rank {rank}", f"copy to {target}"),
            f"{rank} to {target}" if copy.is_done else f"{rank} to {target}, failed",
            max(0.0, copy.submitted_s - found.start_s),
            max(0.0, copy.ended_s - found.start_s),
            {"bytes": copy.num_bytes, "spans": copy.num_spans},
        )
