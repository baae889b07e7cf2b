"""The figures of a run: percentiles, throughput, goodput, failures; as a table, a record and a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from baton.bench.record import show_picture, write
from baton.bench.serve.client import Percentiles, RequestTiming, Slo, percentiles_of
from baton.bench.serve.load import LoadResult, LoadSpec

FIGURES = ("ttft", "tth", "itl", "tpot", "e2e", "late")
TRACED = ("status", "intended_s", "late_s", "ttft_s", "tth_s", "e2e_s", "num_prompt", "num_answer")


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """One run; figures are of the requests with a complete answer."""

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    duration_s: float
    """First intended sending to the last end, failures included."""
    num_prompt: int
    num_cached: int
    num_answer: int
    spreads: dict[str, Percentiles]
    """By name of the figure."""
    num_good: int | None
    """Requests that kept the SLO; None without an SLO."""

    @property
    def requests_per_s(self) -> float:
        """Complete answers a second."""
        return self._rate(self.num_ok)

    @property
    def answer_tokens_per_s(self) -> float:
        """Tokens of complete answers a second."""
        return self._rate(self.num_answer)

    @property
    def goodput_per_s(self) -> float | None:
        """Requests a second that kept the SLO."""
        return None if self.num_good is None else self._rate(self.num_good)

    def _rate(self, num: int) -> float:
        return num / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, in seconds."""
        derived = {
            "requests_per_s": self.requests_per_s,
            "answer_tokens_per_s": self.answer_tokens_per_s,
            "prompt_tokens_per_s": self._rate(self.num_prompt),
            "goodput_per_s": self.goodput_per_s,
        }
        return {**asdict(self), **derived}


def summarise(timings: Sequence[RequestTiming], slo: Slo | None = None) -> LoadSummary:
    """All figures of a run's timings."""
    good = [timing for timing in timings if timing.is_ok]
    values: dict[str, list[float]] = {
        "ttft": [timing.ttft_s for timing in good if timing.ttft_s is not None],
        "tth": [timing.tth_s for timing in good if timing.tth_s is not None],
        "itl": [gap_s for timing in good for gap_s in timing.gaps_s],
        "tpot": [timing.tpot_s for timing in good if timing.tpot_s is not None],
        "e2e": [timing.e2e_s for timing in good],
        "late": [timing.late_s for timing in good],
    }
    start_s = min((timing.intended_s for timing in timings), default=0.0)
    spreads = {name: percentiles_of(values[name]) for name in FIGURES}
    return LoadSummary(
        num_requests=len(timings),
        num_ok=len(good),
        failures=dict(Counter(timing.status for timing in timings if not timing.is_ok).most_common()),
        duration_s=max((timing.ended_s for timing in timings), default=0.0) - start_s,
        num_prompt=sum(timing.num_prompt for timing in good),
        num_cached=sum(timing.num_cached for timing in good),
        num_answer=sum(timing.num_answer for timing in good),
        spreads={name: spread for name, spread in spreads.items() if spread is not None},
        num_good=None if slo is None else sum(timing.is_good(slo) for timing in timings),
    )


MEANINGS = {
    "ttft": "first text",
    "tth": "admitted on decode",
    "itl": "between tokens",
    "tpot": "per token, mean",
    "e2e": "complete answer",
    "late": "delay of the client",
}


def ms(value_s: float) -> str:
    """Milliseconds in a column."""
    return f"{value_s * 1e3:.1f}"


def table_of(summary: LoadSummary, title: str) -> Table:
    """Percentiles of every figure."""
    table = Table("figure", "meaning", "mean", "p50", "p90", "p99", "max", title=f"{title} (ms)")
    for name in FIGURES:
        spread = summary.spreads.get(name)
        if spread is not None:
            values = (spread.mean_s, spread.p50_s, spread.p90_s, spread.p99_s, spread.max_s)
            table.add_row(name, MEANINGS[name], *(ms(value) for value in values))
    return table


def lines_of(summary: LoadSummary, slo: Slo | None) -> list[str]:
    """Throughput, goodput, failures."""
    cached = f" ({summary.num_cached} cached)" if summary.num_cached else ""
    lines = [
        f"{summary.num_ok} of {summary.num_requests} requests answered in {summary.duration_s:.1f} s: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.answer_tokens_per_s:.1f} tokens/s out, "
        f"{summary.num_prompt} tokens in{cached}"
    ]
    if slo is not None and summary.goodput_per_s is not None:
        lines.append(f"goodput ({slo}): {summary.goodput_per_s:.2f} requests/s, {summary.num_good} requests")
    for status, num in summary.failures.items():
        lines.append(f"failed: {num} x {status}")
    return lines


def record_of(result: LoadResult, summary: LoadSummary, load: LoadSpec, slo: Slo | None) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "endpoint": {"kind": result.endpoint.kind, "model": result.endpoint.model},
        # JSON has no infinity.
        "load": {**asdict(load), "rate": load.rate if load.is_open else None},
        "slo": dict(slo.bounds) if slo is not None else None,
        "summary": summary.as_json(),
        "client": result.overhead.as_json(),
        "traces": [{name: getattr(timing, name) for name in TRACED} for timing in result.timings],
    }


def show(
    result: LoadResult,
    summary: LoadSummary,
    load: LoadSpec,
    slo: Slo | None,
    *,
    path: Path,
    picture: Path | None,
) -> None:
    """Prints and writes everything; failures come last, where they are seen."""
    print(load)
    Console(width=max(Console().width, 100)).print(table_of(summary, "baton bench serve"))
    write(path, record_of(result, summary, load, slo))
    if picture is not None:
        show_picture(picture, lambda pyplot: paint(pyplot, result.timings, str(load)))
    print(result.overhead)
    for line in lines_of(summary, slo):
        print(line)


def paint(pyplot: Any, timings: Sequence[RequestTiming], title: str) -> Any:
    """Share of requests by ttft and e2e, share of tokens by gap, ttft over time."""
    good = [timing for timing in timings if timing.is_ok]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12.0, 3.6), layout="constrained")
    first = [timing.ttft_s for timing in good if timing.ttft_s is not None]
    _shares(left, first, "ttft")
    _shares(left, [timing.e2e_s for timing in good], "e2e")
    _shares(left, [timing.tth_s for timing in good if timing.tth_s is not None], "tth")
    _shares(middle, [gap_s for timing in good for gap_s in timing.gaps_s], "itl")
    start_s = min((timing.intended_s for timing in timings), default=0.0)
    right.scatter([timing.intended_s - start_s for timing in good if timing.ttft_s is not None], first, s=8)
    for axes, words in ((left, "share of requests"), (middle, "share of tokens"), (right, "ttft (s)")):
        _label(axes, "seconds" if axes is not right else "intended at (s)", words)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(linewidth=0.3)


def _shares(axes: Any, values: Sequence[float], label: str) -> None:
    if values:
        axes.step(np.sort(values), np.arange(1, len(values) + 1) / len(values), where="post", label=label)
