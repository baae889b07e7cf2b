"""Timelines in the trace event format, which chrome://tracing and ui.perfetto.dev read.

A group becomes a process and each lane of a track a thread. Intervals that overlap without nesting may not
share a thread there, hence lanes and not tracks. Times are microseconds from the first interval on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from baton.observe.timeline import Interval, Timeline

US_PER_S = 1e6


def trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """The trace as one JSON object; each timeline gets processes of its own."""
    start_s = min((timeline.start_s for timeline in timelines if timeline.intervals), default=0.0)
    events: list[dict[str, Any]] = []
    num_groups = 0
    for timeline in timelines:
        groups = list(dict.fromkeys(track.group for track in timeline.tracks))
        events.extend(
            _timeline_events(timeline, start_s, {g: num_groups + i for i, g in enumerate(groups, 1)})
        )
        num_groups += len(groups)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _timeline_events(timeline: Timeline, start_s: float, pids: dict[str, int]) -> Iterator[dict[str, Any]]:
    prefix = f"{timeline.name}: " if timeline.name else ""
    for group, pid in pids.items():
        yield _metadata("process_name", pid, 0, name=f"{prefix}{group}")
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    num_lanes = dict.fromkeys(pids.values(), 0)
    for track in timeline.tracks:
        pid = pids[track.group]
        for lane in timeline.lanes(track):
            num_lanes[pid] += 1
            tid = num_lanes[pid]
            yield _metadata("thread_name", pid, tid, name=track.name)
            yield _metadata("thread_sort_index", pid, tid, sort_index=tid)
            for interval in lane:
                yield _complete(interval, start_s, pid, tid)


def _metadata(kind: str, pid: int, tid: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _complete(interval: Interval, start_s: float, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": interval.name,
        "cat": interval.track.name,
        "ts": round((interval.start_s - start_s) * US_PER_S, 3),
        "dur": round(interval.duration_s * US_PER_S, 3),
        "pid": pid,
        "tid": tid,
        "args": dict(interval.details),
    }
