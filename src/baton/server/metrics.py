"""Figures for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from baton.engine.load import EngineLoad
from baton.engine.trace import RequestTrace
from baton.server.sides import Side

_LATENCIES_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
)
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_NUMBER = re.compile(r"\d+(\.\d+)?")

__all__ = ["CONTENT_TYPE_LATEST", "Metrics"]


class Latencies:
    """How long requests take, as their clients see it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"baton_{name}_seconds", text, registry=registry, buckets=_LATENCIES_S)

        self.ttft = histogram("ttft", "Request in to its first token.")
        self.itl = histogram("itl", "From one token of an answer to its next.")
        self.e2e = histogram("e2e", "Request in to the end of its last answer.")
        self.queue = histogram("queue", "Request in to its first step, or at a target to its pages.")
        self.tth = histogram("tth", "Request in to the verdict of its hand-over, at a target.")


class Handovers:
    """What hand-overs take, as far as this side knows."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.stages = Histogram(
            "baton_handoff_seconds",
            "Stages of a hand-over: queue, compute, exposed, admission.",
            ["stage"],
            registry=registry,
            buckets=_LATENCIES_S,
        )
        self.exposed = Counter(
            "baton_exposed_seconds",
            "End of prefill compute to the last byte copied, in sum.",
            registry=registry,
        )
        self.efficiency = Histogram(
            "baton_handoff_efficiency",
            "1 - exposed / transfer time: the share of the transfer that compute hid.",
            registry=registry,
            buckets=_SHARES,
        )
        self.routes = Counter(
            "baton_route_bytes", "Bytes handed over.", ["source_rank", "target_rank"], registry=registry
        )
        self.unpipelined = Counter(
            "baton_unpipelined",
            "Hand-overs that were not cut into groups of layers.",
            ["reason"],
            registry=registry,
        )

    def note(self, story: RequestTrace, side: Side) -> None:
        """What one job's story adds."""
        figures = side.figures(story)
        for stage in ("queue", "compute", "exposed", "admission"):
            if (time_s := figures.get(f"{stage}_s")) is not None:
                self.stages.labels(stage).observe(time_s)
        if (exposed_s := figures.get("exposed_s")) is not None:
            self.exposed.inc(exposed_s)
        if (efficiency := figures.get("efficiency")) is not None:
            self.efficiency.observe(efficiency)
        for rank, copies in story.copies.items():
            for copy in copies:
                self.routes.labels(str(rank), str(copy.target_rank)).inc(copy.num_bytes)
        for reason in dict.fromkeys(story.unpipelined):
            # Numbers would make every request a series of its own.
            self.unpipelined.labels(_NUMBER.sub("N", reason)).inc()


class Gauges:
    """How an instance is right now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pages = Gauge("baton_pages", "Pages by state.", ["state"], registry=registry)
        self._running = Gauge("baton_requests_running", "Requests that were begun.", registry=registry)
        self._waiting = Gauge("baton_requests_waiting", "Requests that wait.", registry=registry)
        self._tokens = Gauge("baton_tokens_in_flight", "Tokens of all requests so far.", registry=registry)
        self._ready = Gauge(
            "baton_ready", "1 where requests can be served and handed over.", registry=registry
        )
        self._starts = Gauge(
            "baton_instance_starts", "How often the instance was started.", registry=registry
        )
        self._rates = Gauge("baton_tokens_per_second", "Measured lately.", ["phase"], registry=registry)
        self._drafts = Gauge(
            "baton_draft_tokens", "Guesses of the draft, and those that stood.", ["kind"], registry=registry
        )

    def look(self, load: EngineLoad, is_ready: bool, num_starts: int) -> None:
        """Takes a look, before they are told."""
        for state in ("free", "cached", "used", "leased", "quarantined"):
            self._pages.labels(state).set(getattr(load.pages, state))
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._tokens.set(load.num_tokens)
        self._ready.set(is_ready)
        self._starts.set(num_starts)
        self._rates.labels("prefill").set(load.prefill_tokens_per_s)
        self._rates.labels("decode").set(load.decode_tokens_per_s)

    def count(self, counts: Mapping[str, int]) -> None:
        """What an instance has counted since its start."""
        for kind in ("drafted", "accepted"):
            self._drafts.labels(kind).set(counts.get(kind, 0))


class Metrics:
    """All figures of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.latencies = Latencies(self.registry)
        self.handovers = Handovers(self.registry)
        self.gauges = Gauges(self.registry)
        self.requests = Counter(
            "baton_requests",
            "Answers by endpoint and status.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.tokens = Counter("baton_tokens", "Tokens of requests.", ["kind"], registry=self.registry)
        self.failures = Counter("baton_failures", "Failed requests.", ["cause"], registry=self.registry)

    def text(self, look: Callable[[Gauges], None]) -> bytes:
        """In the format that Prometheus reads."""
        look(self.gauges)
        return generate_latest(self.registry)
