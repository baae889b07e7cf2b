"""A timeline as a picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from baton.observe import Timeline
from baton.observe.plotting import load_pyplot

COLOURS = {
    "queue": "#9aa0a6",
    "prefill": "#4c78a8",
    "compute": "#4c78a8",
    "exposed transfer": "#e45756",
    "admission": "#b279a2",
}
COPY_COLOUR = "#f2a93b"


def draw(timeline: Timeline, path: Path, title: str) -> bool:
    """One row per track, what overlaps in it in thinner bars; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    tracks = timeline.tracks
    figure, axes = pyplot.subplots(figsize=(11, 1.2 + 0.3 * len(tracks)), layout="constrained")
    for row, track in enumerate(tracks):
        colour, lanes = COLOURS.get(track.name, COPY_COLOUR), timeline.lanes(track)
        height = 0.8 / len(lanes)
        for index, lane in enumerate(lanes):
            bars = [(each.start_s * 1e3, max(each.duration_s * 1e3, 1e-3)) for each in lane]
            place = (row - 0.4 + index * height, height)
            axes.broken_barh(bars, place, facecolors=colour, edgecolors="white", linewidth=0.3)
    axes.set_yticks(range(len(tracks)), [f"{track.group}: {track.name}" for track in tracks], fontsize=7)
    axes.set_ylim(len(tracks) - 0.5, -0.5)
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
