"""What a router counts, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.router import local
from baton.router.fleet import Fleet
from baton.session.registry import Role

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ADDED_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_STATES = ("able", "draining", "leaving", "loading", "unhealthy")


class Tally:
    """A histogram that costs a request next to nothing: numbers in a list, made into text when asked for."""

    def __init__(self, name: str, what: str, bounds: tuple[float, ...]) -> None:
        self._name, self._what, self._bounds = name, what, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> HistogramMetricFamily:
        """As Prometheus has it."""
        names = [str(bound) for bound in self._bounds] + ["+Inf"]
        buckets = list(zip(names, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(self._name, self._what, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Counters of one router; gauges are read from the fleet when somebody asks.

    What every request counts is plain numbers here: the library's own take a lock for each.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._registry = registry = CollectorRegistry()
        self._answers: dict[tuple[str, int], int] = {}
        self.num_hand_overs = 0
        self.retries = Counter(
            "baton_router_retries", "attempts again before anything was streamed", registry=registry
        )
        self.resumes = Counter("baton_router_resumes", "streams that went on elsewhere", registry=registry)
        self.failures = Counter(
            "baton_router_failures", "failed attempts by cause", ["cause"], registry=registry
        )
        self.given_up = Counter(
            "baton_router_given_up", "requests that failed for good by cause", ["cause"], registry=registry
        )
        self.disconnects = Counter(
            "baton_router_disconnects", "clients that left before the end", registry=registry
        )
        self.local_prefills = Counter(
            "baton_router_local_prefills", "prompts not handed over by reason", ["reason"], registry=registry
        )
        self.added = Tally(
            "baton_router_added_seconds", "time that the router adds before an answer begins", _ADDED_S
        )
        self.waits = Tally("baton_router_wait_seconds", "time until an instance had room", _WAIT_S)
        registry.register(_FleetGauges(fleet))
        registry.register(self)

    def answered(self, path: str, status: int) -> None:
        """A path was answered with a status."""
        key = (path, status)
        self._answers[key] = self._answers.get(key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        """What is counted here, for the library."""
        answers = CounterMetricFamily(
            "baton_router_requests", "requests by path and status", labels=["path", "status"]
        )
        for (path, status), number in self._answers.items():
            answers.add_metric([path, str(status)], number)
        yield answers
        yield CounterMetricFamily("baton_router_hand_overs", "attempts with two legs", self.num_hand_overs)
        yield self.added.family()
        yield self.waits.family()

    def text(self) -> bytes:
        """All of it, in Prometheus's form."""
        return generate_latest(self._registry)


class _FleetGauges(Collector):
    """How the fleet is right now."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample per instance, and one per decode instance for the threshold."""
        labels = ["instance", "role"]
        states = GaugeMetricFamily(
            "baton_router_instance_state", "1 for the state it is in", labels=[*labels, "state"]
        )
        in_flight = GaugeMetricFamily("baton_router_in_flight", "requests given to it", labels=labels)
        tokens = GaugeMetricFamily("baton_router_load_tokens", "tokens in flight there", labels=labels)
        for each in self._fleet.instances.values():
            key = [each.name, each.card.role.value]
            for state in _STATES:
                states.add_metric([*key, state], float(each.state == state))
            in_flight.add_metric(key, each.num_in_flight)
            tokens.add_metric(key, each.load_tokens)
        yield states
        yield in_flight
        yield tokens
        yield self._thresholds()

    def _thresholds(self) -> GaugeMetricFamily:
        found = GaugeMetricFamily(
            "baton_router_local_threshold_tokens",
            "prompts up to this are prefilled on decode",
            labels=["instance"],
        )
        prefills = self._fleet.able(Role.PREFILL)
        for decode in self._fleet.able(Role.DECODE):
            same = [each for each in prefills if each.card.fingerprint == decode.card.fingerprint]
            if same:
                found.add_metric([decode.name], max(local.threshold(each, decode) for each in same))
        return found
