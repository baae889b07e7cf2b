"""The figures of a run: percentiles, throughput, goodput, and failures by what they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from baton.bench.serve.options import Slo
from baton.bench.serve.traces import Trace

FIGURES = ("ttft", "tth", "itl", "tpot", "e2e", "late")


@dataclass(frozen=True, slots=True)
class Spread:
    """Many values of one figure, in seconds."""

    num: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def spread(values: Sequence[float]) -> Spread | None:
    """Percentiles by linear interpolation between the neighbours; None of nothing."""
    if not values:
        return None
    found = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(value) for value in np.percentile(found, (50, 90, 95, 99)))
    return Spread(len(values), float(found.mean()), p50, p90, p95, p99, float(found.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """One run; figures are of the requests that were answered whole."""

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    duration_s: float
    """First intended sending to the last end, failures included."""
    num_prompt: int
    num_cached: int
    num_answer: int
    spreads: dict[str, Spread]
    num_good: int | None
    """Requests that kept the SLO; None where there is none."""

    @property
    def requests_per_s(self) -> float:
        """Answered whole."""
        return self._rate(self.num_ok)

    @property
    def answer_tokens_per_s(self) -> float:
        """Of whole answers."""
        return self._rate(self.num_answer)

    @property
    def goodput_per_s(self) -> float | None:
        """Requests a second that kept the SLO."""
        return None if self.num_good is None else self._rate(self.num_good)

    def _rate(self, num: int) -> float:
        return num / self.duration_s if self.duration_s > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """Everything, seconds as they are."""
        derived = {
            "requests_per_s": self.requests_per_s,
            "answer_tokens_per_s": self.answer_tokens_per_s,
            "prompt_tokens_per_s": self._rate(self.num_prompt),
            "goodput_per_s": self.goodput_per_s,
        }
        return {**asdict(self), **derived}


def summarise(traces: Sequence[Trace], slo: Slo | None = None) -> Summary:
    """All figures of a run's traces."""
    good = [trace for trace in traces if trace.is_ok]
    values: dict[str, list[float]] = {
        "ttft": [trace.ttft_s for trace in good if trace.ttft_s is not None],
        "tth": [trace.tth_s for trace in good if trace.tth_s is not None],
        "itl": [gap_s for trace in good for gap_s in trace.gaps_s],
        "tpot": [trace.tpot_s for trace in good if trace.tpot_s is not None],
        "e2e": [trace.e2e_s for trace in good],
        "late": [trace.late_s for trace in good],
    }
    begun_s = min((trace.intended_s for trace in traces), default=0.0)
    spreads = {name: spread(values[name]) for name in FIGURES}
    return Summary(
        num_requests=len(traces),
        num_ok=len(good),
        failures=dict(Counter(trace.status for trace in traces if not trace.is_ok).most_common()),
        duration_s=max((trace.ended_s for trace in traces), default=0.0) - begun_s,
        num_prompt=sum(trace.num_prompt for trace in good),
        num_cached=sum(trace.num_cached for trace in good),
        num_answer=sum(trace.num_answer for trace in good),
        spreads={name: found for name, found in spreads.items() if found is not None},
        num_good=None if slo is None else sum(trace.is_good(slo) for trace in traces),
    )
