"""Plots of measurements, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from baton.bench.sizes import size_text
from baton.bench.transport import Result
from baton.observe.plotting import load_pyplot


def plot_throughput(results: Sequence[Result], path: Path) -> bool:
    """Bars of GB/s by size, one colour a transport, memcpy as lines; False without matplotlib."""
    pyplot = load_pyplot()
    if pyplot is None:
        return False
    names = list(dict.fromkeys(result.transport for result in results))
    sizes = list(dict.fromkeys((result.span_bytes, result.num_spans) for result in results))
    figure, axes = pyplot.subplots(figsize=(1.8 + 1.9 * len(sizes), 4.2), layout="constrained")
    width = 0.8 / max(1, len(names))
    for place, name in enumerate(names):
        mine = {(r.span_bytes, r.num_spans): r for r in results if r.transport == name}
        at = [index + (place - (len(names) - 1) / 2) * width for index in range(len(sizes))]
        axes.bar(at, [mine[size].bytes_per_s / 1e9 for size in sizes], width * 0.92, label=name)
        # Each transport took turns with a memcpy of its own: other load was not the same for all.
        edges = ([x - width * 0.46 for x in at], [x + width * 0.46 for x in at])
        axes.hlines([_memcpy_speed(mine[size]) for size in sizes], *edges, colors="black", linewidth=1)
    axes.set_xticks(range(len(sizes)), [size_text(*size) for size in sizes])
    axes.set_ylabel("GB/s (black: memcpy in the same run)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=min(len(names), 6), loc="outside upper center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _memcpy_speed(result: Result) -> float:
    return result.span_bytes * result.num_spans / float(result.figures["memcpy"]["median_s"]) / 1e9
