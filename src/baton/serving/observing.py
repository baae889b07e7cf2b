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
from baton.observe import Interval, Timeline, Track, trace
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

    def figures(self, story: RequestTrace) -> dict[str, float]:
        """Stages in seconds; those that this side cannot know, or that never came, are left out.

        queue: arrival to the first step, or at a target to its pages. compute: to the end of the prompt's
        last layer. exposed: from there to the last byte copied. admission: from there to the verdict, as the
        source learns of it. tth: arrival to the verdict, at a target. ttft: arrival to the first token.
        """
        figures = {name: stop_s - start_s for name, (start_s, stop_s) in self._stages(story)}
        busiest_s = max(serial_s(story).values(), default=0.0)
        if self is Side.SOURCE and busiest_s > 0 and "exposed_s" in figures:
            figures["efficiency"] = max(0.0, 1 - figures["exposed_s"] / busiest_s)
        return figures

    def timeline(self, name: str, story: RequestTrace) -> Timeline:
        """Stages, compute by group, copies by route, from the arrival of the request."""
        return Timeline(name, tuple(self._intervals(story)))

    def _stages(self, story: RequestTrace) -> Iterator[tuple[str, tuple[float, float]]]:
        arrived_s = story.arrived_s
        if story.begun_s:
            yield "queue_s", (arrived_s, max(arrived_s, story.begun_s))
        if story.prompt_s and story.begun_s:
            yield "compute_s", (story.begun_s, max(story.begun_s, story.prompt_s))
        if self is Side.SOURCE and story.prompt_s:
            last_s = last_byte_s(story)
            yield "exposed_s", (story.prompt_s, last_s)
            if story.is_handed_over:
                yield "admission_s", (last_s, max(last_s, story.settled_s))
        if self is Side.TARGET and story.is_handed_over:
            yield "tth_s", (arrived_s, story.settled_s)
            if story.stepped_s:
                yield "first_step_s", (story.settled_s, max(story.settled_s, story.stepped_s))
        if story.token_s:
            yield "ttft_s", (arrived_s, max(arrived_s, story.token_s))
        if story.ended_s:
            yield "total_s", (arrived_s, story.ended_s)

    def _intervals(self, story: RequestTrace) -> Iterator[Interval]:
        zero_s, stages = story.arrived_s, dict(self._stages(story))
        details: dict[str, str | int] = {"cached tokens": story.num_cached, "held tokens": story.num_held}
        if story.failure:
            details["failure"] = story.failure
        if story.unpipelined:
            details["not pipelined"] = "; ".join(dict.fromkeys(story.unpipelined))
        for stage, label in _STAGE_LABELS.items():
            if stage in stages:
                start_s, stop_s = stages[stage]
                yield Interval(Track("request", label), label, start_s - zero_s, stop_s - zero_s, details)
        if self is Side.TARGET and story.begun_s and story.settled_s:
            start_s, stop_s = story.begun_s, max(story.begun_s, story.settled_s)
            track = Track("request", "hand-over")
            yield Interval(track, "hand-over", start_s - zero_s, stop_s - zero_s, details)
        first_s = story.stepped_s or story.token_s
        if story.ended_s > first_s > 0:
            yield Interval(Track("request", "decode"), "decode", first_s - zero_s, story.ended_s - zero_s)
        yield from rank_intervals(story, zero_s, "rank")


def handoff_sizes(side: Side, story: RequestTrace) -> dict[str, int]:
    """What was sent, at the source; what was there already, at the target."""
    if side is Side.TARGET:
        return {"held_tokens": story.num_held}
    return {
        "bytes": sum(copy.num_bytes for copies in story.copies.values() for copy in copies),
        "groups": max((len(groups) for groups in story.groups.values()), default=0),
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

    def traced(self, recorded: RecordedRequest, job_index: int, story: RequestTrace) -> None:
        """A job is over and its pages are free."""
        side = Side.of(recorded.parsed.jobs[job_index].request)
        figures = side.figures(story)
        if len(recorded.traces) < NUM_JOBS_MAX:
            recorded.traces[job_index], recorded.figures[job_index] = story, figures
        if "queue_s" in figures:
            self.metrics.queue.observe(figures["queue_s"])
        if side is not Side.ALONE:
            self.metrics.add_copies(story)
            if job_index not in recorded.failed_jobs:
                self._handoff_over(recorded.parsed, job_index, story, figures)

    def _handoff_over(
        self, parsed: ParsedRequest, job_index: int, story: RequestTrace, figures: Mapping[str, float]
    ) -> None:
        """A hand-over ended well, or was aborted because the request ended."""
        side = Side.of(parsed.jobs[job_index].request)
        shown: dict[str, float | str] = dict(handoff_sizes(side, story))
        if not story.is_handed_over:
            shown["cause"] = story.failure or "the request ended before its hand-over began"
            self._log_handoff(parsed, job_index, "aborted", shown)
            return
        if "tth_s" in figures:
            self.metrics.tth.observe(figures["tth_s"])
        self.metrics.add_handoff(story, figures)
        shown |= figures
        if story.unpipelined and side is Side.SOURCE:
            shown["not_pipelined"] = "; ".join(dict.fromkeys(story.unpipelined))
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
        story: RequestTrace | None = None,
    ) -> None:
        """A job failed, of a code that is also the label of a metric; perhaps after its hand-over."""
        if story is not None and story.is_handed_over:
            side = Side.of(recorded.parsed.jobs[job_index].request)
            self._handoff_over(recorded.parsed, job_index, story, side.figures(story))
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
        stories = {
            index: msgspec.to_builtins(story, str_keys=True) for index, story in recorded.traces.items()
        }
        jobs = [{**job, "story": stories.get(job["job"])} for job in self._jobs(recorded)]
        return {**self._summary(recorded), "clock": clock, "jobs": jobs}

    def trace(self, name: str) -> dict[str, Any] | None:
        """One request in the form that ui.perfetto.dev reads."""
        recorded = self._recorded.get(name)
        if recorded is None:
            return None
        return trace(
            [
                Side.of(recorded.parsed.jobs[index].request).timeline(f"{self._instance} job {index}", story)
                for index, story in sorted(recorded.traces.items())
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
            side, story = Side.of(job.request), recorded.traces.get(index)
            jobs.append(
                {
                    "job": index,
                    "prompt": job.prompt_index,
                    "side": side.value,
                    "transfer": None if job.request.handoff is None else job.request.handoff.transfer,
                    "figures": recorded.figures.get(index),
                    "unpipelined": [] if story is None else list(dict.fromkeys(story.unpipelined)),
                    "num_cached": 0 if story is None else story.num_cached,
                    "num_held": 0 if story is None else story.num_held,
                }
            )
        return jobs
