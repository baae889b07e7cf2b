"""Prometheus metrics of a server."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from baton.engine.load import EngineLoad
from baton.engine.trace import RequestTrace

_LATENCIES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_PAGE_STATES = ("free", "cached", "used", "leased", "quarantined")
_NUMBER = re.compile(r"\d+(\.\d+)?")


class ServerMetrics:
    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()

        def latency(name: str, text: str) -> Histogram:
            return Histogram(f"baton_{name}_seconds", text, registry=registry, buckets=_LATENCIES_S)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"baton_{name}", text, labels, registry=registry)

        self.ttft = latency("ttft", "Arrival of a request to its first token.")
        self.itl = latency("itl", "From one token of a choice to its next.")
        self.e2e = latency("e2e", "Arrival of a request to the end of its last choice.")
        self.queue = latency("queue", "Arrival of a request to its first step, or at a target to its pages.")
        self.tth = latency("tth", "Arrival of a request to the verdict of its hand-off, at a target.")
        self.requests = counter("requests", "Responses by endpoint and status.", "endpoint", "status")
        self.tokens = counter("tokens", "Tokens of requests.", "kind")
        self.failures = counter("failures", "Failed requests.", "cause")
        self._stages = Histogram(
            "baton_handoff_seconds",
            "Stages of a hand-off: queue, compute, exposed, admission.",
            ["stage"],
            registry=registry,
            buckets=_LATENCIES_S,
        )
        self._exposed = counter(
            "exposed_seconds", "End of prefill compute to the last byte copied, summed up."
        )
        self._efficiency = Histogram(
            "baton_handoff_efficiency",
            "1 - exposed / transfer time: the share of the transfer that compute hid.",
            registry=registry,
            buckets=_SHARES,
        )
        self._route_bytes = counter("route_bytes", "Bytes handed off.", "source_rank", "target_rank")
        self._unpipelined = counter(
            "unpipelined", "Hand-offs that were not cut into groups of layers.", "reason"
        )
        self._pages = gauge("pages", "Pages by state.", "state")
        self._running = gauge("requests_running", "Running requests.")
        self._waiting = gauge("requests_waiting", "Waiting requests.")
        self._in_flight = gauge("tokens_in_flight", "Tokens of all requests so far.")
        self._ready = gauge("ready", "1 where requests can be served and handed off.")
        self._starts = gauge("instance_starts", "How often the instance was started.")
        self._rates = gauge("tokens_per_second", "Recently measured rate.", "phase")
        self._drafts = gauge("draft_tokens", "Tokens that were drafted and accepted.", "kind")

    def add_response(self, endpoint: str, status: int) -> None:
        self.requests.labels(endpoint, str(status)).inc()

    def add_hand_off(self, story: RequestTrace, figures: Mapping[str, float]) -> None:
        """The trace of one job, and its stages in seconds."""
        for stage in ("queue", "compute", "exposed", "admission"):
            if (time_s := figures.get(f"{stage}_s")) is not None:
                self._stages.labels(stage).observe(time_s)
        if (exposed_s := figures.get("exposed_s")) is not None:
            self._exposed.inc(exposed_s)
        if (efficiency := figures.get("efficiency")) is not None:
            self._efficiency.observe(efficiency)
        for rank, copies in story.copies.items():
            for copy in copies:
                self._route_bytes.labels(str(rank), str(copy.target_rank)).inc(copy.num_bytes)
        for reason in dict.fromkeys(story.unpipelined):
            # With its numbers every request would be a series of its own.
            self._unpipelined.labels(_NUMBER.sub("N", reason)).inc()

    def set_load(
        self, load: EngineLoad, counts: Mapping[str, int], *, is_ready: bool, num_starts: int
    ) -> None:
        """The state of the instance now; `counts` since its start."""
        for state in _PAGE_STATES:
            self._pages.labels(state).set(getattr(load.pages, state))
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._in_flight.set(load.num_tokens)
        self._ready.set(is_ready)
        self._starts.set(num_starts)
        self._rates.labels("prefill").set(load.prefill_tokens_per_s)
        self._rates.labels("decode").set(load.decode_tokens_per_s)
        for kind in ("drafted", "accepted"):
            self._drafts.labels(kind).set(counts.get(kind, 0))

    def text(self) -> bytes:
        return generate_latest(self._registry)
