"""Prometheus metrics of a router.

What every request counts is plain numbers here: the library's own counters take a lock each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.serving.fleet import Fleet
from baton.serving.routing import local_threshold
from baton.session.registry import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ADDED_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_STATES = ("able", "draining", "leaving", "loading", "unhealthy")


class CheapHistogram:
    """Numbers in a list, made into a metric when it is read."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        names = [str(bound) for bound in self._bounds] + ["+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


class RouterMetrics(Collector):
    """Counters of one router; gauges are read from the fleet on demand."""

    def __init__(self, fleet: Fleet) -> None:
        registry = self._registry = CollectorRegistry()
        self._fleet = fleet
        self._responses: dict[tuple[str, int], int] = {}
        self.num_hand_offs = 0

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_router_{name}", text, labels, registry=registry)

        self.retries = counter("retries", "attempts again before anything was streamed")
        self.resumes = counter("resumes", "streams that were resumed elsewhere")
        self.failures = counter("failures", "failed attempts by cause", "cause")
        self.given_up = counter("given_up", "requests that failed for good by cause", "cause")
        self.disconnects = counter("disconnects", "clients that left before the end")
        self.local_prefills = counter("local_prefills", "prompts not handed off by reason", "reason")
        self.added = CheapHistogram(
            "baton_router_added_seconds", "time that the router adds before a response begins", _ADDED_S
        )
        self.waits = CheapHistogram("baton_router_wait_seconds", "time until an instance had room", _WAIT_S)
        registry.register(self)

    def add_response(self, path: str, status: int) -> None:
        key = (path, status)
        self._responses[key] = self._responses.get(key, 0) + 1

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "baton_router_requests", "requests by path and status", labels=["path", "status"]
        )
        for (path, status), number in self._responses.items():
            responses.add_metric([path, str(status)], number)
        yield responses
        yield CounterMetricFamily(
            "baton_router_hand_overs", "attempts with prefill and decode", self.num_hand_offs
        )
        yield self.added.family()
        yield self.waits.family()
        labels = ["instance", "role"]
        states = GaugeMetricFamily(
            "baton_router_instance_state", "1 for the current state", labels=[*labels, "state"]
        )
        in_flight = GaugeMetricFamily("baton_router_in_flight", "requests given to it", labels=labels)
        tokens = GaugeMetricFamily("baton_router_load_tokens", "tokens in flight there", labels=labels)
        for instance in self._fleet.instances.values():
            key = [instance.name, instance.role.value]
            for state in _STATES:
                states.add_metric([*key, state], float(instance.state == state))
            in_flight.add_metric(key, instance.num_in_flight)
            tokens.add_metric(key, instance.load_tokens)
        yield states
        yield in_flight
        yield tokens
        thresholds = GaugeMetricFamily(
            "baton_router_local_threshold_tokens",
            "prompts up to this length are prefilled on decode",
            labels=["instance"],
        )
        prefills = self._fleet.able(Role.PREFILL)
        for decode in self._fleet.able(Role.DECODE):
            same = [instance for instance in prefills if instance.fingerprint == decode.fingerprint]
            if same:
                most = max(local_threshold(prefill, decode) for prefill in same)
                thresholds.add_metric([decode.name], most)
        yield thresholds
