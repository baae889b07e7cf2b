"""What is kept of requests as they go: figures and timelines."""

from __future__ import annotations

from baton.engine.trace import RequestTrace
from baton.server.bodies.answered import Usage
from baton.server.inquiries import Inquiry
from baton.server.metrics import Metrics
from baton.server.sides import Side
from baton.server.timelines import Timelines


class Observer:
    """The witness of a server's requests."""

    def __init__(self, instance: str, role: str) -> None:
        self.metrics = Metrics()
        self.timelines = Timelines(instance, role)

    def answered(self, endpoint: str, status: int) -> None:
        """An answer went out."""
        self.metrics.requests.labels(endpoint, str(status)).inc()

    def asked(self, inquiry: Inquiry) -> None:
        """A request was taken in."""
        self.timelines.asked(inquiry)

    def grew(self, inquiry: Inquiry, num_tokens: int, since_s: float, *, is_first: bool) -> None:
        """A choice has grown by some tokens."""
        del inquiry
        if is_first:
            self.metrics.latencies.ttft.observe(since_s)
            return
        for _ in range(num_tokens):
            self.metrics.latencies.itl.observe(since_s / num_tokens)

    def told(self, inquiry: Inquiry, job: int, story: RequestTrace) -> None:
        """All that a job took is back."""
        self.timelines.told(inquiry, job, story)
        side = Side.of(inquiry.jobs[job].request)
        figures = side.figures(story)
        if "queue_s" in figures:
            self.metrics.latencies.queue.observe(figures["queue_s"])
        if "tth_s" in figures:
            self.metrics.latencies.tth.observe(figures["tth_s"])
        if side is not Side.ALONE:
            self.metrics.handovers.note(story, side)

    def failed(self, inquiry: Inquiry, code: str) -> None:
        """A request failed."""
        self.timelines.failed(inquiry, code)
        self.metrics.failures.labels(code).inc()

    def ended(self, inquiry: Inquiry, usage: Usage, since_s: float) -> None:
        """A request was answered."""
        del inquiry
        self.metrics.latencies.e2e.observe(since_s)
        self.metrics.tokens.labels("prompt").inc(usage.prompt_tokens)
        self.metrics.tokens.labels("cached").inc(usage.prompt_tokens_details.cached_tokens)
        self.metrics.tokens.labels("generated").inc(usage.completion_tokens)
