"""A run as a picture, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.bench.serve.traces import Trace
from baton.observe.plotting import load_pyplot


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
        axes.set_ylabel(words)
        axes.set_xlabel("seconds" if axes is not right else "intended at (s)")
        axes.grid(linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True


def _shares(axes: Any, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
