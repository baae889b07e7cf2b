"""What servers and routers record: Prometheus metrics, and the attempts of a router's requests."""

from __future__ import annotations

import collections
import re
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.observe import Interval, Timeline, Track, trace
from baton.serving.fleet import Fleet
from baton.serving.policies import local_threshold
from baton.serving.wire import BatonWire
from baton.session.registry import Role

if TYPE_CHECKING:
    from baton.engine.load import EngineLoad
    from baton.engine.trace import RequestTrace

_LATENCIES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_PAGE_STATES = ("free", "cached", "used", "leased", "quarantined")
NUMBER = re.compile(r"\d+(\.\d+)?")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ADDED_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_STATES = ("able", "draining", "leaving", "loading", "unhealthy")
NUM_LOGGED_MAX = 4096
NUM_FAILURES_MAX = 64
FAILURE_CHARACTERS_MAX = 500
US_PER_S = 1e6


# A second series for every counter, with the time of its first increment, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]


class ServerMetrics(Collector):
    """Of one instance; where vLLM has the metric too, by its name."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        registry = self._registry = CollectorRegistry()

        def latency(name: str, text: str) -> Histogram:
            return Histogram(f"baton_{name}_seconds", text, registry=registry, buckets=_LATENCIES_S)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"baton_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"baton_{name}", text, labels, registry=registry)

        self.ttft = latency("time_to_first_token", "Arrival of a request to its first token.")
        self.itl = latency("inter_token_latency", "From one token of a choice to its next.")
        self.e2e = latency("e2e_request_latency", "Arrival of a request to the end of its last choice.")
        self.queue = latency(
            "request_queue_time", "Arrival of a request to its first step, or on a target to its pages."
        )
        self.tth = latency("tth", "Arrival of a request to the outcome of its hand-over, on a target.")
        self.requests = counter("requests", "Responses by endpoint and status.", "endpoint", "status")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached_tokens = counter("prompt_tokens_cached", "Those of them that a prefix hit gave.")
        self.generation_tokens = counter("generation_tokens", "Generated tokens.")
        self.failures = counter("failures", "Failed requests.", "cause")
        self._stages = Histogram(
            "baton_handoff_seconds",
            "Stages of a hand-over: queue, compute, exposed, admission.",
            ["stage"],
            registry=registry,
            buckets=_LATENCIES_S,
        )
        self._exposed = counter(
            "exposed_seconds", "Total time from the end of prefill compute to the last byte copied."
        )
        self._efficiency = Histogram(
            "baton_handoff_efficiency",
            "1 - exposed / transfer time: the share of the transfer that compute hid.",
            registry=registry,
            buckets=_SHARES,
        )
        self._route_bytes = counter("route_bytes", "Bytes handed over.", "source_rank", "target_rank")
        self._unpipelined = counter(
            "unpipelined", "Hand-overs that were not split into layer groups.", "reason"
        )
        self._pages = gauge("pages", "Pages by state.", "state")
        self._running = gauge("num_requests_running", "Running requests.")
        self._waiting = gauge("num_requests_waiting", "Waiting requests.")
        self._in_flight = gauge("tokens_in_flight", "Tokens of all requests so far.")
        self._ready = gauge("ready", "1 if requests can be served and handed over.")
        self._starts = gauge("instance_starts", "How often the instance was started.")
        self._rates = gauge("tokens_per_second", "Recently measured rate.", "phase")
        self._drafts = gauge("draft_tokens", "Tokens that were drafted and accepted.", "kind")

    def add_response(self, endpoint: str, status: int) -> None:
        self.requests.labels(endpoint, str(status)).inc()

    def add_handoff(self, trace: RequestTrace, figures: Mapping[str, float]) -> None:
        """A hand-over that ended well: the trace of its job, and its stages in seconds."""
        for stage in ("queue", "compute", "exposed", "admission"):
            if (time_s := figures.get(f"{stage}_s")) is not None:
                self._stages.labels(stage).observe(time_s)
        if (exposed_s := figures.get("exposed_s")) is not None:
            self._exposed.inc(exposed_s)
        if (efficiency := figures.get("efficiency")) is not None:
            self._efficiency.observe(efficiency)
        for reason in dict.fromkeys(trace.unpipelined):
            # With its numbers every request would be a series of its own.
            self._unpipelined.labels(NUMBER.sub("N", reason)).inc()

    def add_copies(self, trace: RequestTrace) -> None:
        """What a job sent, also if its hand-over failed."""
        for rank, copies in trace.copies.items():
            for copy in copies:
                self._route_bytes.labels(str(rank), str(copy.target_rank)).inc(copy.num_bytes)

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

    def collect(self) -> Iterator[Metric]:
        """Every sample with the model's name."""
        for family in self._registry.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model_name})
                for sample in family.samples
            ]
            yield family

    def text(self) -> bytes:
        return generate_latest(self)


# ---- of a router
#
# What every request counts is plain numbers here: the library's own counters take a lock each time.

_ROUTER_COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "requests": ("Responses by path and status.", ("path", "status")),
    "handoffs": ("Attempts with a hand-over from prefill to decode.", ()),
    "local_prefills": ("Prompts that were not handed over, by reason.", ("reason",)),
    "retries": ("Retries before the first token was streamed.", ()),
    "resumes": ("Streams that were resumed on another instance.", ()),
    "failures": ("Failed attempts by cause.", ("cause",)),
    "given_up": ("Requests that failed after all retries, by cause.", ("cause",)),
    "disconnects": ("Clients that disconnected before the end.", ()),
}
"""By name: a text, and the names of labels after `model_name`."""


class CheapHistogram:
    """Numbers in a list for each model, made into a metric when it is read."""

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = collections.defaultdict[str, list[int]](lambda: [0] * (len(bounds) + 1))
        self._sums = collections.defaultdict[str, float](float)

    def observe(self, value: float, model: str) -> None:
        self._counts[model][bisect_left(self._bounds, value)] += 1
        self._sums[model] += value

    def family(self, models: Iterable[str]) -> HistogramMetricFamily:
        """With these models, and those that it has numbers of."""
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        names = [str(bound) for bound in self._bounds] + ["+Inf"]
        for model in dict.fromkeys([*models, *self._counts]):
            buckets = list(zip(names, map(float, accumulate(self._counts[model])), strict=True))
            family.add_metric([model], buckets, self._sums[model])
        return family


class RouterMetrics(Collector):
    """Counters of one router; gauges are read from the fleet on demand."""

    def __init__(self, fleet: Fleet, local_prefill_max: int | None = None) -> None:
        self._fleet = fleet
        self._local_prefill_max = local_prefill_max
        self._counts = {name: collections.Counter[tuple[str, ...]]() for name in _ROUTER_COUNTERS}
        self.added = CheapHistogram(
            "baton_router_added_seconds", "Time that the router adds before a response begins.", _ADDED_S
        )
        self.waits = CheapHistogram(
            "baton_router_wait_seconds", "Time that a request waited for an instance with room.", _WAIT_S
        )

    def count(self, name: str, model: str, *labels: str) -> None:
        """One more of a counter of _ROUTER_COUNTERS."""
        self._counts[name][model, *labels] += 1

    def text(self) -> bytes:
        return generate_latest(self)

    def totals(self) -> dict[str, Any]:
        """What the page shows of the counters: those of all models together."""
        counts, reasons = self._counts, collections.Counter[str]()
        for (_, reason), num in counts["local_prefills"].items():
            reasons[reason] += num
        return {
            "answers": sum(num for key, num in counts["requests"].items() if key[1] in BatonWire.paths),
            "handoffs": counts["handoffs"].total(),
            "retries": counts["retries"].total(),
            "resumes": counts["resumes"].total(),
            "disconnects": counts["disconnects"].total(),
            "failed_attempts": counts["failures"].total(),
            "given_up": counts["given_up"].total(),
            "local": dict(reasons),
        }

    def collect(self) -> Iterator[Metric]:
        models = sorted(self._fleet.model_names())
        for name, (text, more) in _ROUTER_COUNTERS.items():
            counter = CounterMetricFamily(f"baton_router_{name}", text, labels=["model_name", *more])
            # A counter that begins at 0 shows its first increment in rates.
            counts: dict[tuple[str, ...], int] = {} if more else {(model,): 0 for model in models}
            for values, number in {**counts, **self._counts[name]}.items():
                counter.add_metric(values, number)
            yield counter
        yield self.added.family(models)
        yield self.waits.family(models)
        labels = ("instance", "model_name", "role")

        def gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"baton_router_{name}", text, labels=[*labels, *more])

        states = gauge("instance_state", "1 for the current state.", "state")
        in_flight = gauge("in_flight", "Requests of this router that the instance is answering.")
        tokens = gauge("load_tokens", "Tokens in flight at the instance.")
        unpaired = gauge("unpaired", "1: no instance of the other role has the same model and settings.")
        alone = self._fleet.unpaired()
        for instance in self._fleet.instances.values():
            key = [instance.name, instance.model, instance.role.value]
            for state in _STATES:
                states.add_metric([*key, state], float(instance.state == state))
            in_flight.add_metric(key, instance.num_in_flight)
            tokens.add_metric(key, instance.load_tokens)
            unpaired.add_metric(key, float(instance in alone))
        yield from (states, in_flight, tokens, unpaired)
        thresholds = gauge("local_threshold_tokens", "Prompts up to this length are prefilled by decode.")
        prefills = self._fleet.able(Role.PREFILL)
        for decode in self._fleet.able(Role.DECODE):
            same = [instance for instance in prefills if decode.needs in instance.identity.gives]
            if same:
                lengths = (local_threshold(prefill, decode, self._local_prefill_max) for prefill in same)
                thresholds.add_metric([decode.name, decode.model, decode.role.value], max(lengths))
        yield thresholds


# ---- attempts of a router's requests
#
# Instances report times of their own monotonic clock, and what that clock and the calendar said at the time
# of the answer; so their timelines can be aligned, as well as their calendars agree.


@dataclass(slots=True)
class AttemptRecord:
    """One attempt as the router saw it, in seconds since 1970; for timelines."""

    names: tuple[str, ...]
    """The instance that answers, then the one that prefills for it."""
    local_reason: str
    is_streamed: bool = True
    began_s: float = field(default_factory=time.time)
    answered_s: float = 0.0
    """When the response began: with the first token of a stream, else with the whole answer."""
    ended_s: float = 0.0
    failure: str = ""
    """The cause, a colon and the message."""

    def fail(self, cause: str, message: str) -> None:
        self.failure = f"{cause}: {message}"[:FAILURE_CHARACTERS_MAX]

    def fields(self) -> dict[str, Any]:
        """For the router's /v1/timelines."""
        fields = asdict(self)
        return {"names": fields.pop("names"), "why_local": fields.pop("local_reason"), **fields}


@dataclass(slots=True)
class FailureCount:
    """How often one cause failed attempts on the same instances, and the last time."""

    id: str
    """Of the last request."""
    record: AttemptRecord
    number: int = 0


class AttemptLog:
    """The attempts of recent requests, by the id of the response; and failures by cause and instances."""

    def __init__(self, num_max: int = NUM_LOGGED_MAX) -> None:
        self.failures: OrderedDict[tuple[str, tuple[str, ...]], FailureCount] = OrderedDict()
        """The latest last; a failure that repeats does not push the others out."""
        self._attempts: OrderedDict[str, list[AttemptRecord]] = OrderedDict()
        self._num_max = num_max

    def add(self, identity: str, record: AttemptRecord) -> None:
        self._attempts.setdefault(identity, []).append(record)
        if len(self._attempts) > self._num_max:
            self._attempts.popitem(last=False)

    def add_failure(self, identity: str, record: AttemptRecord) -> None:
        """Of an attempt, or of a request that no instance was given."""
        key = (record.failure.partition(":")[0], record.names)
        count = self.failures.setdefault(key, FailureCount(identity, record))
        count.id, count.record = identity, record
        count.number += 1
        self.failures.move_to_end(key)
        if len(self.failures) > NUM_FAILURES_MAX:
            self.failures.popitem(last=False)

    def latest(self) -> Iterator[tuple[str, AttemptRecord]]:
        """The last attempt of each request, the newest request first."""
        return ((identity, records[-1]) for identity, records in reversed(self._attempts.items()))

    def attempts(self, identity: str) -> list[AttemptRecord]:
        """In order; none where the request is not remembered."""
        return self._attempts.get(identity, [])


def merged_trace(
    attempts: Sequence[AttemptRecord], timelines: Sequence[Any], traces: Sequence[Any]
) -> dict[str, Any]:
    """All traces as one, from the first attempt on; the router's own comes first."""
    zero_s = min(attempt.began_s for attempt in attempts)
    own = trace([Timeline("router", tuple(_attempt_intervals(attempts, zero_s)))])
    events, num_processes = list(own["traceEvents"]), _last_process(own)
    for timeline, instance_trace in zip(timelines, traces, strict=True):
        shift_us = (_arrived_s(timeline, zero_s) - zero_s) * US_PER_S
        for event in instance_trace.get("traceEvents", ()):
            moved = {"ts": event["ts"] + shift_us} if event.get("ph") == "X" else {}
            events.append({**event, "pid": event["pid"] + num_processes, **moved})
        num_processes += _last_process(instance_trace)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _attempt_intervals(attempts: Sequence[AttemptRecord], zero_s: float) -> Iterator[Interval]:
    for number, attempt in enumerate(attempts, 1):
        details = {
            "instances": " <- ".join(attempt.names),
            "failure": attempt.failure,
            "local": attempt.local_reason,
        }
        start_s = attempt.began_s - zero_s
        stop_s = max(start_s, (attempt.ended_s or time.time()) - zero_s)
        yield Interval(Track("router", "attempts"), f"attempt {number}", start_s, stop_s, details)
        if attempt.answered_s:
            answered_s = min(max(start_s, attempt.answered_s - zero_s), stop_s)
            name = "first token" if attempt.is_streamed else "whole answer"
            yield Interval(Track("router", "until the answer begins"), name, start_s, answered_s)


def _arrived_s(timeline: Any, fallback_s: float) -> float:
    """When the request came to an instance, by the calendar."""
    clock = timeline.get("clock") or {}
    traces = [job.get("trace") or {} for job in timeline.get("jobs", ())]
    arrivals = [trace["arrived_s"] for trace in traces if trace.get("arrived_s")]
    if not arrivals or "monotonic_s" not in clock:
        return fallback_s
    return float(clock["unix_s"] - (clock["monotonic_s"] - min(arrivals)))


def _last_process(instance_trace: Any) -> int:
    return max((int(event.get("pid", 0)) for event in instance_trace.get("traceEvents", ())), default=0)
