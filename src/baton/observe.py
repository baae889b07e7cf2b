"""Timelines of requests: named intervals on tracks, as Perfetto traces and as pictures.

A trace is in the trace event format, which chrome://tracing and ui.perfetto.dev read: a group becomes a
process and each lane of a track a thread. Intervals that overlap without nesting may not share a thread,
hence lanes and not tracks. Times are microseconds from the first interval on.

A picture shows timelines one above the other on a common axis, where matplotlib is installed. The stages of a
request (queue, prefill, exposed transfer, ...) share one row; below it is a row per track. The end of prefill
is a line through all rows; the exposed transfer after it is shaded.
"""

from __future__ import annotations

import heapq
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

Detail: TypeAlias = str | int | float | bool


@dataclass(frozen=True, slots=True, order=True)
class Track:
    """A row of the timeline: a group, such as a rank, and what it does."""

    group: str
    name: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A named span of time, in seconds on the timeline's clock."""

    track: Track
    name: str
    start_s: float
    stop_s: float
    details: Mapping[str, Detail] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.start_s <= self.stop_s:
            raise ValueError(f"interval {self.name!r} ends at {self.stop_s}, before its start {self.start_s}")

    @property
    def duration_s(self) -> float:
        """Its length."""
        return self.stop_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """The intervals of one request; tracks keep the order in which they first occur."""

    name: str
    intervals: tuple[Interval, ...] = ()

    @property
    def tracks(self) -> tuple[Track, ...]:
        """Every track that has an interval, those of a group together."""
        tracks = list(dict.fromkeys(interval.track for interval in self.intervals))
        groups = {group: index for index, group in enumerate(dict.fromkeys(track.group for track in tracks))}
        return tuple(sorted(tracks, key=lambda track: groups[track.group]))

    def on(self, track: Track) -> list[Interval]:
        """The intervals of a track, by start."""
        return sorted(
            (interval for interval in self.intervals if interval.track == track), key=lambda i: i.start_s
        )

    def lanes(self, track: Track) -> list[list[Interval]]:
        """The intervals of a track on as few lanes as possible, without overlap on a lane."""
        lanes: list[list[Interval]] = []
        free: list[tuple[float, int]] = []
        for interval in self.on(track):
            if free and free[0][0] <= interval.start_s:
                _, lane = heapq.heappop(free)
                lanes[lane].append(interval)
            else:
                lane = len(lanes)
                lanes.append([interval])
            heapq.heappush(free, (interval.stop_s, lane))
        return lanes

    @property
    def start_s(self) -> float:
        """When the first interval starts; 0 without intervals."""
        return min((interval.start_s for interval in self.intervals), default=0.0)

    @property
    def stop_s(self) -> float:
        """When the last interval ends; 0 without intervals."""
        return max((interval.stop_s for interval in self.intervals), default=0.0)


def covered_s(pieces: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, stop) intervals."""
    return sum(stop - start for start, stop in merged(pieces))


def merged(pieces: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """The union of (start, stop) intervals, as disjoint intervals in order."""
    ordered = sorted(pieces)
    if not ordered:
        return
    begun, ended = ordered[0]
    for start, stop in ordered[1:]:
        if start > ended:
            yield begun, ended
            begun = start
        ended = max(ended, stop)
    yield begun, ended


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


NO_MATPLOTLIB = "no picture: matplotlib is not installed (pip install matplotlib)"


def load_pyplot() -> ModuleType | None:
    """`matplotlib.pyplot` for writing files, without a display; None if it is not installed."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return None
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def save_picture(path: Path, paint: Callable[[Any], Any], dpi: int = 130) -> bool:
    """Writes the figure that `paint` makes with pyplot; False, and nothing written, without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    figure = paint(pyplot)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    pyplot.close(figure)
    return True


COLOURS = {
    "queue": "#9aa0a6",
    "prefill": "#2f5d8a",
    "compute": "#7da7d0",
    "copy": "#f2a93b",
    "exposed transfer": "#d6453d",
    "admission": "#8e5ea2",
    "first decode step": "#3c9d6b",
}
STAGES = ("queue", "prefill", "exposed transfer", "admission", "first decode step")
MS_PER_S = 1e3
ROW_INCHES = 0.3
LETTER_SHARE = 0.0062
"""Width of a letter as a share of the axis; text that does not fit its bar is left out."""


@dataclass(frozen=True, slots=True)
class PictureRow:
    """A row of the picture: its label, and bars in lanes."""

    label: str
    lanes: list[list[Interval]]
    is_stages: bool


def draw(timelines: Sequence[Timeline], path: Path, title: str) -> bool:
    """Writes the picture; False, and nothing written, without matplotlib."""
    return save_picture(path, lambda pyplot: _paint(pyplot, timelines, title))


def _paint(pyplot: Any, timelines: Sequence[Timeline], title: str) -> Any:
    panels = [list(_rows(timeline)) for timeline in timelines]
    heights = [len(rows) + 1 for rows in panels]
    figure, columns = pyplot.subplots(
        nrows=len(panels),
        figsize=(11, 1.3 + ROW_INCHES * sum(heights)),
        height_ratios=heights,
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    stop_ms = max((timeline.stop_s for timeline in timelines), default=0.0) * MS_PER_S * 1.02 or 1.0
    for axes, timeline, rows in zip(columns[:, 0], timelines, panels, strict=True):
        axes.set_xlim(0, stop_ms)
        _panel(axes, timeline, rows)
    columns[-1, 0].set_xlabel("ms since the request arrived")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    kinds = [kind for kind in COLOURS if any(kind in _kinds(timeline) for timeline in timelines)]
    patch = importlib.import_module("matplotlib.patches").Patch
    line = importlib.import_module("matplotlib.lines").Line2D
    handles = [patch(color=COLOURS[kind], label=kind) for kind in kinds]
    if "prefill" in kinds:
        handles.append(line([], [], color=COLOURS["prefill"], linestyle="--", label="end of prefill"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


def _kind(interval: Interval) -> str:
    return "copy" if interval.track.name.startswith("copy") else interval.track.name


def _kinds(timeline: Timeline) -> set[str]:
    return {_kind(interval) for interval in timeline.intervals}


def _rows(timeline: Timeline) -> Iterator[PictureRow]:
    stages = [interval for interval in timeline.intervals if interval.track.name in STAGES]
    if stages:
        yield PictureRow(stages[0].track.group, [stages], is_stages=True)
    for track in timeline.tracks:
        if track.name not in STAGES:
            yield PictureRow(f"{track.group}: {track.name}", timeline.lanes(track), is_stages=False)


def _panel(axes: Any, timeline: Timeline, rows: Sequence[PictureRow]) -> None:
    for place, row in enumerate(rows):
        height = 0.8 / len(row.lanes)
        for lane, intervals in enumerate(row.lanes):
            for interval in intervals:
                _bar(axes, interval, (place - 0.4 + lane * height, height), row.is_stages)
    for interval in timeline.intervals:
        start, stop = interval.start_s * MS_PER_S, interval.stop_s * MS_PER_S
        if interval.track.name == "exposed transfer":
            axes.axvspan(start, stop, color=COLOURS["exposed transfer"], alpha=0.13, linewidth=0, zorder=0)
        if interval.track.name == "prefill":
            axes.axvline(stop, color=COLOURS["prefill"], linewidth=1.2, linestyle="--", zorder=3)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(timeline.name, fontsize=9, loc="left", fontweight="bold")
    axes.set_title(_summary(timeline), fontsize=8, loc="right")
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)


def _summary(timeline: Timeline) -> str:
    stages = [interval for interval in timeline.intervals if interval.track.name in STAGES]
    return ", ".join(f"{interval.name} {interval.duration_s * MS_PER_S:.1f} ms" for interval in stages)


def _bar(axes: Any, interval: Interval, place: tuple[float, float], is_stage: bool) -> None:
    start, length = interval.start_s * MS_PER_S, interval.duration_s * MS_PER_S
    low, height = place
    axes.broken_barh(
        [(start, max(length, 1e-3))],
        (low, height),
        facecolors=COLOURS.get(_kind(interval), COLOURS["copy"]),
        edgecolors="white",
        linewidth=0.4,
        zorder=2,
    )
    text = f"{interval.name}, {length:.0f} ms" if is_stage else interval.name
    if length < LETTER_SHARE * len(text) * axes.get_xlim()[1] or height < 0.5:
        return
    axes.text(
        start + length / 2,
        low + height / 2,
        text,
        ha="center",
        va="center",
        fontsize=7,
        color="white" if is_stage else "black",
        clip_on=True,
        zorder=4,
    )
