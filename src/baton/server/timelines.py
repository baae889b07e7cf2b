"""The latest requests' stories, as this side knows them."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton.engine.trace import RequestTrace
from baton.observe import trace
from baton.server.inquiries import Inquiry
from baton.server.sides import Side

NUM_KEPT = 256
NUM_JOBS_KEPT = 16
"""Of one request; stories of long prompts on many ranks are large."""


@dataclass(slots=True)
class Kept:
    """One request and the stories of its jobs."""

    inquiry: Inquiry
    stories: dict[int, RequestTrace] = field(default_factory=dict)
    failure: str | None = None


class Timelines:
    """By the id of a response: what became of the request."""

    def __init__(self, instance: str, role: str) -> None:
        self._instance = instance
        self._role = role
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def asked(self, inquiry: Inquiry) -> None:
        """A request was taken in."""
        self._kept[inquiry.id] = Kept(inquiry)
        self._kept.move_to_end(inquiry.id)
        while len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)

    def told(self, inquiry: Inquiry, job: int, story: RequestTrace) -> None:
        """One of its jobs is over."""
        kept = self._kept.get(inquiry.id)
        if kept is not None and kept.inquiry is inquiry and len(kept.stories) < NUM_JOBS_KEPT:
            kept.stories[job] = story

    def failed(self, inquiry: Inquiry, code: str) -> None:
        """It failed."""
        kept = self._kept.get(inquiry.id)
        if kept is not None and kept.inquiry is inquiry:
            kept.failure = code

    def all(self) -> dict[str, Any]:
        """All requests, the latest first, without the work of their ranks."""
        return {"data": [self._summary(kept) for kept in reversed(self._kept.values())]}

    def find(self, name: str) -> dict[str, Any] | None:
        """One request, with everything."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        # So that stories of other machines can be laid beside this one.
        clock = {"monotonic_s": time.monotonic(), "unix_s": time.time()}
        stories = {job: msgspec.to_builtins(story, str_keys=True) for job, story in kept.stories.items()}
        jobs = [{**each, "story": stories.get(each["job"])} for each in self._jobs(kept)]
        return {**self._summary(kept), "clock": clock, "jobs": jobs}

    def trace(self, name: str) -> dict[str, Any] | None:
        """One request in the form that ui.perfetto.dev reads."""
        kept = self._kept.get(name)
        if kept is None:
            return None
        return trace(
            [
                Side.of(kept.inquiry.jobs[job].request).timeline(f"{self._instance} job {job}", story)
                for job, story in sorted(kept.stories.items())
            ]
        )

    def _summary(self, kept: Kept) -> dict[str, Any]:
        inquiry = kept.inquiry
        return {
            "id": inquiry.id,
            "created": inquiry.created,
            "instance": self._instance,
            "role": self._role,
            "is_stream": inquiry.is_stream,
            "num_prompt_tokens": sum(len(prompt) for prompt in inquiry.prompts),
            "failure": kept.failure,
            "jobs": self._jobs(kept),
        }

    def _jobs(self, kept: Kept) -> list[dict[str, Any]]:
        found = []
        for place, job in enumerate(kept.inquiry.jobs[:NUM_JOBS_KEPT]):
            side, story = Side.of(job.request), kept.stories.get(place)
            found.append(
                {
                    "job": place,
                    "prompt": job.prompt_index,
                    "side": side.value,
                    "transfer": None if job.request.handoff is None else job.request.handoff.transfer,
                    "figures": None if story is None else side.figures(story),
                    "unpipelined": [] if story is None else list(dict.fromkeys(story.unpipelined)),
                    "num_cached": 0 if story is None else story.num_cached,
                    "num_held": 0 if story is None else story.num_held,
                }
            )
        return found
