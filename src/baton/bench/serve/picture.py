"""A run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.serve.traces import Trace
from baton.observe.plotting import load_pyplot

WITHOUT = "no picture: matplotlib is not installed (pip install 'baton[plot]')"


@dataclass(frozen=True, slots=True)
class Panel:
    """One diagram: lines, or shares of values, each by its name."""

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw_panels(panels: Sequence[Panel], path: Path, title: str) -> str:
    """Diagrams side by side; answers with what to tell the user."""
    pyplot = load_pyplot()
    if pyplot is None:
        return WITHOUT
    size = (4.2 * len(panels), 3.6)
    figure, places = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, axes in zip(panels, places[0], strict=True):
        for label, values in panel.shares.items():
            _shares(axes, values, label)
        for label, points in panel.lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        _dress(axes, panel.x, panel.y)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    _save(pyplot, figure, path, title)
    return f"drawn in {path}"


def draw(traces: Sequence[Trace], path: Path, title: str) -> bool:
    """Share of requests by ttft and e2e, share of tokens by gap, ttft over time; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    good = [trace for trace in traces if trace.is_ok]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12.0, 3.6), layout="constrained")
    first = [trace.ttft_s for trace in good if trace.ttft_s is not None]
    _shares(left, first, "ttft")
    _shares(left, [trace.e2e_s for trace in good], "e2e")
    _shares(left, [trace.tth_s for trace in good if trace.tth_s is not None], "tth")
    _shares(middle, [gap_s for trace in good for gap_s in trace.gaps_s], "itl")
    begun_s = min((trace.intended_s for trace in traces), default=0.0)
    right.scatter([trace.intended_s - begun_s for trace in good if trace.ttft_s is not None], first, s=8)
    for axes, words in ((left, "share of requests"), (middle, "share of tokens"), (right, "ttft (s)")):
        _dress(axes, "seconds" if axes is not right else "intended at (s)", words)
    left.legend(frameon=False, fontsize=8)
    _save(pyplot, figure, path, title)
    return True


def _dress(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _save(pyplot: Any, figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _shares(axes: Any, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
