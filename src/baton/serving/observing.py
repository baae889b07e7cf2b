"""What a server records of its requests: stages in seconds, timelines, and the metrics made of them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff
from baton.engine.trace import RequestTrace, last_byte_s, rank_intervals, serial_s
from baton.observe import Interval, Timeline, Track
from baton.observe import trace as perfetto_trace
from baton.plan.printer import human_bytes, human_time
from baton.serving.metrics import ServerMetrics
from baton.serving.openai import ParsedRequest, Usage

NUM_TIMELINES_MAX = 256
NUM_JOBS_MAX = 16
"""Of one request; the traces of long prompts on many ranks are large."""

_STAGE_LABELS = {
    "queue_s": "queue",
    "compute_s": "prefill",
    "exposed_s": "exposed transfer",
    "admission_s": "admission",
    "first_step_s": "first decode step",
}


_HANDOFF_FIGURES = (
    "bytes",
    "groups",
    "exposed_s",
    "efficiency",
    "tth_s",
    "held_tokens",
    "not_pipelined",
    "cause",
)
"""In the order of a log line."""
_log = logging.getLogger("baton.serving.handoff")


class Side(Enum):
    """The part of an instance in a request."""

    SOURCE = "source"
    TARGET = "target"
    ALONE = "alone"

    @staticmethod
    def of(request: EngineRequest) -> Side:
        match request.handoff:
            case OutboundHandoff():
                return Side.SOURCE
            case InboundHandoff():
                return Side.TARGET
            case None:
                return Side.ALONE

    def figures(self, trace: RequestTrace) -> dict[str, float]:
        """Stages in seconds; those that this side cannot know, or that never came, are left out.

        queue: arrival to the first step, or at a target to its pages. compute: to the end of the prompt's
        last layer. exposed: from there to the last byte copied. admission: from there to the verdict, as the
        source learns of it. tth: arrival to the verdict, at a target. ttft: arrival to the first token.
        """
        figures = {name: stop_s - start_s for name, (start_s, stop_s) in self._stages(trace)}
        busiest_s = max(serial_s(trace).values(), default=0.0)
        if self is Side.SOURCE and busiest_s > 0 and "exposed_s" in figures:
            figures["efficiency"] = max(0.0, 1 - figures["exposed_s"] / busiest_s)
        return figures

    def timeline(self, name: str, trace: RequestTrace) -> Timeline:
        """Stages, compute by group, copies by route, from the arrival of the request."""
        return Timeline(name, tuple(self._intervals(trace)))

    def _stages(self, trace: RequestTrace) -> Iterator[tuple[str, tuple[float, float]]]:
        arrived_s = trace.arrived_s
        if trace.begun_s:
            yield "queue_s", (arrived_s, max(arrived_s, trace.begun_s))
        if trace.prompt_s and trace.begun_s:
            yield "compute_s", (trace.begun_s, max(trace.begun_s, trace.prompt_s))
        if self is Side.SOURCE and trace.prompt_s:
            last_s = last_byte_s(trace)
            yield "exposed_s", (trace.prompt_s, last_s)
            if trace.is_handed_over:
                yield "admission_s", (last_s, max(last_s, trace.settled_s))
        if self is Side.TARGET and trace.is_handed_over:
            yield "tth_s", (arrived_s, trace.settled_s)
            if trace.stepped_s:
                yield "first_step_s", (trace.settled_s, max(trace.settled_s, trace.stepped_s))
        if trace.token_s:
            yield "ttft_s", (arrived_s, max(arrived_s, trace.token_s))
        if trace.ended_s:
            yield "total_s", (arrived_s, trace.ended_s)

    def _intervals(self, trace: RequestTrace) -> Iterator[Interval]:
        zero_s, stages = trace.arrived_s, dict(self._stages(trace))
        details: dict[str, str | int] = {"cached tokens": trace.num_cached, "held tokens": trace.num_held}
        if trace.failure:
            details["failure"] = trace.failure
        if trace.unpipelined:
            details["not pipelined"] = "; ".join(dict.fromkeys(trace.unpipelined))
        for stage, label in _STAGE_LABELS.items():
            if stage in stages:
                start_s, stop_s = stages[stage]
                yield Interval(Track("request", label), label, start_s - zero_s, stop_s - zero_s, details)
        if self is Side.TARGET and trace.begun_s and trace.settled_s:
            start_s, stop_s = trace.begun_s, max(trace.begun_s, trace.settled_s)
            track = Track("request", "hand-over")
            yield Interval(track, "hand-over", start_s - zero_s, stop_s - zero_s, details)
        first_s = trace.stepped_s or trace.token_s
        if trace.ended_s > first_s > 0:
            yield Interval(Track("request", "decode"), "decode", first_s - zero_s, trace.ended_s - zero_s)
        yield from rank_intervals(trace, zero_s, "rank")


def handoff_sizes(side: Side, trace: RequestTrace) -> dict[str, int]:
    """What was sent, at the source; what was there already, at the target."""
    if side is Side.TARGET:
        return {"held_tokens": trace.num_held}
    return {
        "bytes": sum(copy.num_bytes for copies in trace.copies.values() for copy in copies),
        "groups": max((len(groups) for groups in trace.groups.values()), default=0),
    }


def _value_text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    if name == "bytes":
        return human_bytes(int(value))
    return human_time(value) if name.endswith("_s") else f"{value:.4g}"


@dataclass(slots=True)
class RecordedRequest:
    """One request and the traces of its jobs."""

    parsed: ParsedRequest
    traces: dict[int, RequestTrace] = field(default_factory=dict)
    figures: dict[int, dict[str, float]] = field(default_factory=dict)
    failure: str | None = None
    failed_jobs: set[int] = field(default_factory=set)


class RequestObserver:
    """Records what happens to a server's requests: metrics, and timelines of the latest by response id."""

    def __init__(self, instance: str, role: str, layout: str, model_name: str) -> None:
        self.metrics = ServerMetrics(model_name)
        self._instance = instance
        self._role = role
        self._layout = layout
        self._recorded: OrderedDict[str, RecordedRequest] = OrderedDict()

    def started(self, recorded: RecordedRequest) -> None:
        """The instance accepted a request, perhaps a later attempt of one that is known."""
        self._recorded[recorded.parsed.id] = recorded
        self._recorded.move_to_end(recorded.parsed.id)
        while len(self._recorded) > NUM_TIMELINES_MAX:
            self._recorded.popitem(last=False)

    def sampled(self, num_tokens: int, since_s: float, *, is_first: bool) -> None:
        """A choice gained tokens, so long after its last ones or after the request arrived."""
        if is_first:
            self.metrics.ttft.observe(since_s)
            return
        for _ in range(num_tokens):
            self.metrics.itl.observe(since_s / num_tokens)

    def traced(self, recorded: RecordedRequest, job_index: int, trace: RequestTrace) -> None:
        """A job is over and its pages are free."""
        side = Side.of(recorded.parsed.jobs[job_index].request)
        figures = side.figures(trace)
        if len(recorded.traces) < NUM_JOBS_MAX:
            recorded.traces[job_index], recorded.figures[job_index] = trace, figures
        if "queue_s" in figures:
            self.metrics.queue.observe(figures["queue_s"])
        if side is not Side.ALONE:
            self.metrics.add_copies(trace)
            if job_index not in recorded.failed_jobs:
                self._handoff_over(recorded.parsed, job_index, trace, figures)

    def _handoff_over(
        self, parsed: ParsedRequest, job_index: int, trace: RequestTrace, figures: Mapping[str, float]
    ) -> None:
        """A hand-over ended well, or was aborted because the request ended."""
        side = Side.of(parsed.jobs[job_index].request)
        shown: dict[str, float | str] = dict(handoff_sizes(side, trace))
        if not trace.is_handed_over:
            shown["cause"] = trace.failure or "the request ended before its hand-over began"
            self._log_handoff(parsed, job_index, "aborted", shown)
            return
        if "tth_s" in figures:
            self.metrics.tth.observe(figures["tth_s"])
        self.metrics.add_handoff(trace, figures)
        shown |= figures
        if trace.unpipelined and side is Side.SOURCE:
            shown["not_pipelined"] = "; ".join(dict.fromkeys(trace.unpipelined))
        self._log_handoff(parsed, job_index, "done", shown)

    def _log_handoff(
        self, parsed: ParsedRequest, job_index: int, state: str, figures: Mapping[str, float | str]
    ) -> None:
        """One line on each side; transfer and request are the same in both."""
        handoff = parsed.jobs[job_index].request.handoff
        if handoff is None:
            return
        fields: dict[str, Any] = {"transfer": handoff.transfer, "request": parsed.id, "layout": self._layout}
        if isinstance(handoff, InboundHandoff):
            fields |= {"side": Side.TARGET.value, "source": handoff.source}
        else:
            fields |= {"side": Side.SOURCE.value}
        fields |= {name: figures[name] for name in _HANDOFF_FIGURES if name in figures}
        words = [
            f"{name.removesuffix('_s')} {_value_text(name, value)}"
            for name, value in fields.items()
            if name != "transfer"
        ]
        _log.log(
            logging.WARNING if state == "failed" else logging.INFO,
            "hand-over %s %s: %s",
            handoff.transfer,
            state,
            ", ".join(words),
            extra={"fields": {"event": "handoff", "state": state, **fields}},
        )

    def failed(
        self,
        recorded: RecordedRequest,
        job_index: int,
        code: str,
        text: str,
        trace: RequestTrace | None = None,
    ) -> None:
        """A job failed, of a code that is also the label of a metric; perhaps after its hand-over."""
        if trace is not None and trace.is_handed_over:
            side = Side.of(recorded.parsed.jobs[job_index].request)
            self._handoff_over(recorded.parsed, job_index, trace, side.figures(trace))
        else:
            self._log_handoff(recorded.parsed, job_index, "failed", {"cause": f"{code}: {text}"})
        recorded.failure = code
        recorded.failed_jobs.add(job_index)
        self.metrics.failures.labels(code).inc()

    def finished(self, usage: Usage, since_s: float) -> None:
        """A response was written whole, so long after the request arrived."""
        self.metrics.e2e.observe(since_s)
        self.metrics.prompt_tokens.inc(usage.prompt_tokens)
        self.metrics.cached_tokens.inc(usage.prompt_tokens_details.cached_tokens)
        self.metrics.generation_tokens.inc(usage.completion_tokens)

    def timelines(self) -> dict[str, Any]:
        """All requests, the latest first, without the work of their ranks."""
        return {"data": [self._summary(recorded) for recorded in reversed(self._recorded.values())]}

    def timeline(self, name: str) -> dict[str, Any] | None:
        """One request, with everything."""
        recorded = self._recorded.get(name)
        if recorded is None:
            return None
        # With both clocks, timelines of several machines can be aligned.
        clock = {"monotonic_s": time.monotonic(), "unix_s": time.time()}
        traces = {
            index: msgspec.to_builtins(trace, str_keys=True) for index, trace in recorded.traces.items()
        }
        jobs = [{**job, "trace": traces.get(job["job"])} for job in self._jobs(recorded)]
        return {**self._summary(recorded), "clock": clock, "jobs": jobs}

    def trace(self, name: str) -> dict[str, Any] | None:
        """One request in the form that ui.perfetto.dev reads."""
        recorded = self._recorded.get(name)
        if recorded is None:
            return None
        return perfetto_trace(
            [
                Side.of(recorded.parsed.jobs[index].request).timeline(f"{self._instance} job {index}", trace)
                for index, trace in sorted(recorded.traces.items())
            ]
        )

    def _summary(self, recorded: RecordedRequest) -> dict[str, Any]:
        parsed = recorded.parsed
        return {
            "id": parsed.id,
            "created": parsed.created,
            "instance": self._instance,
            "role": self._role,
            "is_stream": parsed.is_stream,
            "num_prompt_tokens": sum(len(prompt) for prompt in parsed.prompts),
            "failure": recorded.failure,
            "jobs": self._jobs(recorded),
        }

    def _jobs(self, recorded: RecordedRequest) -> list[dict[str, Any]]:
        jobs = []
        for index, job in enumerate(recorded.parsed.jobs[:NUM_JOBS_MAX]):
            side, trace = Side.of(job.request), recorded.traces.get(index)
            jobs.append(
                {
                    "job": index,
                    "prompt": job.prompt_index,
                    "side": side.value,
                    "transfer": None if job.request.handoff is None else job.request.handoff.transfer,
                    "figures": recorded.figures.get(index),
                    "unpipelined": [] if trace is None else list(dict.fromkeys(trace.unpipelined)),
                    "num_cached": 0 if trace is None else trace.num_cached,
                    "num_held": 0 if trace is None else trace.num_held,
                }
            )
        return jobs
