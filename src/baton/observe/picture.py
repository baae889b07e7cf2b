"""Timelines as a picture, one above the other on a common axis, where matplotlib is installed.

The stages of a request (queue, prefill, exposed transfer, ...) share one row; below it is a row per track.
The end of prefill is a line through all rows; the exposed transfer after it is shaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.observe.plotting import save_picture
from baton.observe.timeline import Interval, Timeline

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
    return {_kind(each) for each in timeline.intervals}


def _rows(timeline: Timeline) -> Iterator[PictureRow]:
    stages = [each for each in timeline.intervals if each.track.name in STAGES]
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
    stages = [each for each in timeline.intervals if each.track.name in STAGES]
    return ", ".join(f"{each.name} {each.duration_s * MS_PER_S:.1f} ms" for each in stages)


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
