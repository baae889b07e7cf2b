"""A timeline as a picture, where matplotlib is installed."""

from __future__ import annotations

import importlib
from pathlib import Path

from baton.observe import Timeline

COLOURS = {
    "queue": "#9aa0a6",
    "prefill": "#4c78a8",
    "compute": "#4c78a8",
    "exposed transfer": "#e45756",
    "admission": "#b279a2",
}
COPY_COLOUR = "#f2a93b"


def draw(timeline: Timeline, path: Path, title: str) -> bool:
    """One row per lane, a colour per kind of work; False without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return False
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    rows = [(track, lane) for track in timeline.tracks for lane in timeline.lanes(track)]
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.27 * len(rows)), layout="constrained")
    named: set[tuple[str, str]] = set()
    labels = []
    for row, (track, lane) in enumerate(rows):
        bars = [(each.start_s * 1e3, max(each.duration_s * 1e3, 1e-3)) for each in lane]
        colour = COLOURS.get(track.name, COPY_COLOUR)
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.4)
        key = (track.group, track.name)
        labels.append("" if key in named else f"{track.group}: {track.name}")
        named.add(key)
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, timeline.stop_s * 1e3 * 1.01 or 1)
    axes.set_xlabel("ms since the request came in")
    axes.set_title(title, fontsize=9, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
