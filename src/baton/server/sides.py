"""One side's view of a request: its stages in seconds, and as a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from baton.engine.requests import EngineRequest, InboundHandoff, OutboundHandoff
from baton.engine.trace import RequestTrace, last_byte_s, rank_intervals, serial_s
from baton.observe import Interval, Timeline, Track


class Side(Enum):
    """What an instance was to a request."""

    SOURCE = "source"
    TARGET = "target"
    ALONE = "alone"

    @staticmethod
    def of(request: EngineRequest) -> Side:
        """By where the prompt goes or comes from."""
        match request.handoff:
            case OutboundHandoff():
                return Side.SOURCE
            case InboundHandoff():
                return Side.TARGET
            case None:
                return Side.ALONE

    def figures(self, story: RequestTrace) -> dict[str, float]:
        """Stages in seconds; those that this side cannot know, or that never came, are left out.

        queue: request in to the first step, or at a target to its pages. compute: to the end of the prompt's
        last layer. exposed: from there to the last byte copied. admission: from there to the verdict, as the
        source hears of it. tth: request in to the verdict, at a target. ttft: request in to the first token.
        """
        marks = dict(self._marks(story))
        found = {name: stop_s - start_s for name, (start_s, stop_s) in marks.items()}
        busiest_s = max(serial_s(story).values(), default=0.0)
        if self is Side.SOURCE and busiest_s > 0 and "exposed_s" in found:
            found["efficiency"] = max(0.0, 1 - found["exposed_s"] / busiest_s)
        return found

    def _marks(self, story: RequestTrace) -> Iterator[tuple[str, tuple[float, float]]]:
        asked_s = story.arrived_s
        if story.begun_s:
            yield "queue_s", (asked_s, max(asked_s, story.begun_s))
        if story.prompt_s and story.begun_s:
            yield "compute_s", (story.begun_s, max(story.begun_s, story.prompt_s))
        if self is Side.SOURCE and story.prompt_s:
            last_s = last_byte_s(story)
            yield "exposed_s", (story.prompt_s, last_s)
            if story.settled_s:
                yield "admission_s", (last_s, max(last_s, story.settled_s))
        if self is Side.TARGET and story.settled_s:
            yield "tth_s", (asked_s, story.settled_s)
            if story.stepped_s:
                yield "first_step_s", (story.settled_s, max(story.settled_s, story.stepped_s))
        if story.token_s:
            yield "ttft_s", (asked_s, max(asked_s, story.token_s))
        if story.ended_s:
            yield "total_s", (asked_s, story.ended_s)

    def timeline(self, name: str, story: RequestTrace) -> Timeline:
        """Stages, compute by group, copies by route, from the moment the request came."""
        return Timeline(name, tuple(self._intervals(story)))

    def _intervals(self, story: RequestTrace) -> Iterator[Interval]:
        zero_s, marks = story.arrived_s, dict(self._marks(story))
        labels = {
            "queue_s": "queue",
            "compute_s": "prefill",
            "exposed_s": "exposed transfer",
            "admission_s": "admission",
            "first_step_s": "first decode step",
        }
        details: dict[str, str | int] = {"cached tokens": story.num_cached, "held tokens": story.num_held}
        if story.unpipelined:
            details["not pipelined"] = "; ".join(dict.fromkeys(story.unpipelined))
        for stage, label in labels.items():
            if stage in marks:
                start_s, stop_s = marks[stage]
                track = Track("request", label)
                yield Interval(track, label, start_s - zero_s, stop_s - zero_s, details)
        if self is Side.TARGET and story.begun_s and story.settled_s:
            start_s, stop_s = story.begun_s, max(story.begun_s, story.settled_s)
            yield Interval(
                Track("request", "hand-over"), "hand-over", start_s - zero_s, stop_s - zero_s, details
            )
        first_s = story.stepped_s or story.token_s
        if story.ended_s > first_s > 0:
            yield Interval(Track("request", "decode"), "decode", first_s - zero_s, story.ended_s - zero_s)
        yield from rank_intervals(story, zero_s, "rank")
