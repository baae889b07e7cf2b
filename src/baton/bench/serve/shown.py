"""A run as a table, a record, a picture and a last line."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.bench.record import write
from baton.bench.serve.load import Run
from baton.bench.serve.options import Load, Slo
from baton.bench.serve.picture import WITHOUT, draw
from baton.bench.serve.summary import FIGURES, Spread, Summary

MEANINGS = {
    "ttft": "first text",
    "tth": "admitted on decode",
    "itl": "between tokens",
    "tpot": "per token, mean",
    "e2e": "whole answer",
    "late": "held up by the client",
}


def ms(value_s: float) -> str:
    """Milliseconds in a column."""
    return f"{value_s * 1e3:.1f}"


def table_of(summary: Summary, title: str) -> Table:
    """Percentiles of every figure."""
    table = Table("figure", "meaning", "mean", "p50", "p90", "p99", "max", title=f"{title} (ms)")
    for name in FIGURES:
        found: Spread | None = summary.spreads.get(name)
        if found is not None:
            values = (found.mean_s, found.p50_s, found.p90_s, found.p99_s, found.max_s)
            table.add_row(name, MEANINGS[name], *(ms(value) for value in values))
    return table


def lines_of(summary: Summary, slo: Slo | None) -> list[str]:
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


def loads() -> list[float]:
    """What else the machine does: its load averages."""
    return [round(value, 2) for value in os.getloadavg()]


def record_of(run: Run, summary: Summary, load: Load, slo: Slo | None) -> dict[str, Any]:
    """Everything as JSON."""
    return {
        "endpoint": {"kind": run.endpoint.kind, "model": run.endpoint.model},
        # JSON has no infinity.
        "load": {**asdict(load), "rate": load.rate if load.is_open else None},
        "slo": dict(slo.bounds) if slo is not None else None,
        "summary": summary.as_json(),
        "client": run.overhead.as_json(),
        "traces": [_trace(trace) for trace in run.traces],
    }


def _trace(trace: Any) -> dict[str, Any]:
    return {
        "status": trace.status,
        "intended_s": trace.intended_s,
        "late_s": trace.late_s,
        "ttft_s": trace.ttft_s,
        "tth_s": trace.tth_s,
        "e2e_s": trace.e2e_s,
        "num_prompt": trace.num_prompt,
        "num_answer": trace.num_answer,
    }


def show(
    run: Run, summary: Summary, wanted: tuple[Load, Slo | None], files: tuple[Path, Path | None]
) -> None:
    """Prints and writes everything; failures come last, where they are seen."""
    load, slo = wanted
    path, picture = files
    print(load)
    Console(width=max(Console().width, 100)).print(table_of(summary, "baton bench serve"))
    write(path, record_of(run, summary, load, slo))
    print(f"written to {path}")
    if picture is not None:
        is_drawn = draw(run.traces, picture, str(load))
        print(f"drawn in {picture}" if is_drawn else WITHOUT)
    print(run.overhead)
    for line in lines_of(summary, slo):
        print(line)
