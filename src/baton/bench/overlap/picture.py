"""Overlap as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.bench.overlap.figures import Row, link_text
from baton.observe.plotting import load_pyplot


def draw(rows: Sequence[Row], path: Path, title: str) -> bool:
    """By link: time to the last byte by compute-only, and efficiency; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    speeds = list(dict.fromkeys(row.case.link_bytes_per_s for row in rows))
    size = (9.0, 1.0 + 2.8 * len(speeds))
    figure, grid = pyplot.subplots(len(speeds), 2, figsize=size, layout="constrained", squeeze=False)
    for speed, (left, right) in zip(speeds, grid, strict=True):
        mine = [row for row in rows if row.case.link_bytes_per_s == speed]
        lengths = list(dict.fromkeys(row.case.num_tokens for row in mine))
        for policy in dict.fromkeys(row.policy for row in mine):
            found = [row for row in mine if row.policy == policy]
            _line(left, found, [row.middle(lambda run: run.complete) for row in found], policy)
            _line(right, found, [row.middle(lambda run: run.efficiency) for row in found], policy)
        last = [row for row in mine if row.policy == mine[-1].policy]
        bounds = [row.middle(lambda run: run.bound) for row in last]
        right.plot(range(len(bounds)), bounds, color="black", linestyle="--", label="bound")
        left.axhline(1.0, color="black", linestyle="--", linewidth=1)
        left.set_title(f"{link_text(speed)}: complete by compute-only", fontsize=9, loc="left")
        right.set_title(f"{link_text(speed)}: efficiency", fontsize=9, loc="left")
        for axes in (left, right):
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
            axes.set_xlabel("tokens")
            axes.grid(axis="y", linewidth=0.3)
            axes.spines[["top", "right"]].set_visible(False)
    grid[0][1].legend(frameon=False, fontsize=7)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _line(axes: Any, rows: Sequence[Row], values: Sequence[float], label: str) -> None:
    axes.plot(range(len(rows)), values, marker="o", markersize=3, linewidth=1.2, label=label)
