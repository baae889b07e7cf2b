"""What the suites share: options, progress, load averages and plots.

A suite is a script beside this file that starts its own processes on this machine, has them take turns, and
prints and writes what it measured. It exits with 1 if a request failed; a missed target is a figure, not a
failure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from baton.errors import BatonError
from baton.observe import NO_MATPLOTLIB, save_picture

RESULTS = Path(__file__).parent / "results"
ProgressCallback = Callable[[int | None, int, str], None]
"""Called with the number of steps if it is known, the number done, and a description."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    """The options of every suite; empty or 0: the suite's default."""

    model: str = ""
    link: str = ""
    repeats: int = 0
    seed: int = 0
    device: str = "cpu"


def run_suite(
    name: str,
    measure: Callable[[SuiteOptions, ProgressCallback], T],
    show: Callable[[T, Path, Path | None], None],
    is_right: Callable[[T], bool],
) -> None:
    """The `main` of a suite."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--model", default="", help="model to deploy (default: demo)")
    parser.add_argument("--link", default="", metavar="SPEED", help="link speed of each prefill rank")
    parser.add_argument("--repeat", type=int, default=0, metavar="N", help="rounds (default: the suite's)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    default = RESULTS / f"serve-{name}-{datetime.now(UTC):%Y-%m-%d}.json"
    parser.add_argument("--json", type=Path, default=default, metavar="FILE", help="file for the results")
    parser.add_argument("--png", type=Path, metavar="FILE", help="file for a plot (needs matplotlib)")
    given = parser.parse_args()
    try:
        with Progress(transient=True, console=Console(stderr=True)) as bar:
            task = bar.add_task("starting", total=None)

            def progress(total: int | None, done: int, text: str) -> None:
                bar.update(task, total=total, completed=done, description=text)

            options = SuiteOptions(given.model, given.link, given.repeat, given.seed, given.device)
            result = measure(options, progress)
        show(result, given.json, given.png)
    except BatonError as error:
        sys.exit(f"{name}: {error}")
    sys.exit(0 if is_right(result) else 1)


def load_averages() -> list[float]:
    """How busy the machine is."""
    return [round(value, 2) for value in os.getloadavg()]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: lines, or cumulative distributions, by label."""

    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    distributions: Mapping[str, Sequence[float]] = field(default_factory=dict)


def draw_panels(panels: Sequence[Panel], path: Path, title: str) -> str:
    """Draws plots side by side; returns a line to print."""
    is_drawn = save_picture(path, lambda pyplot: _paint(pyplot, panels, title))
    return f"drawn in {path}" if is_drawn else NO_MATPLOTLIB


def _paint(pyplot: Any, panels: Sequence[Panel], title: str) -> Any:
    size = (4.2 * len(panels), 3.6)
    figure, grid = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, axes in zip(panels, grid[0], strict=True):
        for label, values in panel.distributions.items():
            if values:
                shares = np.arange(1, len(values) + 1) / len(values)
                axes.step(np.sort(values), shares, where="post", label=label)
        for label, points in panel.lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        axes.grid(linewidth=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure
