"""Why an attempt came to nothing, whose fault that is taken to be, and whether to try again."""

from __future__ import annotations

import random
from time import monotonic

from baton.router.config import Limits
from baton.router.instances import Instance
from baton.router.routes import Route
from baton.router.wire.leg import Lost
from baton.router.wire.reading import Head
from baton.web import STATUSES, Problem, failure, read_problem

RETRIED = frozenset({429, 502, 503, 504})
ENDS = frozenset({"PEER_LOST", "ENDED", "LOADING", "DRAINING"})
FULLS = frozenset({"QUEUE_FULL", "OUT_OF_PAGES"})
FULL_S = 1.0
WAIT_S_FIRST = 0.005
WAIT_S_MAX = 0.5


class Failed(Exception):  # noqa: N818  (an outcome of an attempt)
    """An attempt that failed: what a client would be told, and which instances to avoid next."""

    def __init__(self, problem: Problem, blamed: frozenset[str], raw: bytes | None = None) -> None:
        super().__init__(problem.message)
        self.problem = problem
        self.blamed = blamed
        self.raw = raw
        """The answer's body where an instance gave one; a client gets it as it is."""

    @property
    def cause(self) -> str:
        """A word for metrics."""
        return cause_of(self.problem)

    @property
    def is_end(self) -> bool:
        """Whether those that are blamed may be no more."""
        return self.problem.code in ENDS

    @property
    def is_retriable(self) -> bool:
        """Whether another attempt makes sense: what is wrong with the request itself stays wrong."""
        return self.problem.status in RETRIED


def cause_of(problem: Problem) -> str:
    """A word for metrics, of a set that nobody can make longer."""
    code = problem.code
    return code if code in STATUSES else f"HTTP_{problem.status}"


def lost_leg(instance: Instance, lost: Lost) -> Failed:
    """The leg to this instance ended without an answer."""
    code = lost.code if lost.code in STATUSES else "PEER_LOST"
    problem = Problem(STATUSES[code], f"instance {instance.name}: {lost.text}", code=code)
    return Failed(problem, frozenset({instance.name}))


def refused_leg(route: Route, instance: Instance, head: Head, body: bytes) -> Failed:
    """The instance answered with a status that is no success."""
    problem = read_problem(head.status, body, head.headers.get("retry-after"))
    if problem.status in (401, 403):
        # The client's key was good: it is the router's that this instance does not take.
        text = f"instance {instance.name} refuses the router: {problem.message}; give both the same secret"
        return Failed(failure("REFUSED_AUTHENTICATION", text), frozenset({instance.name}))
    if problem.status == 429:
        instance.full_until_s = monotonic() + min(problem.retry_after_s or FULL_S, FULL_S)
    return Failed(problem, _blamed(route, instance, problem), body)


def ended_stream(route: Route, event: bytes) -> Failed:
    """The stream ended with an error event."""
    told = read_problem(502, event)
    status = STATUSES.get(told.code or "", 500 if told.code else 502)
    problem = Problem(status, told.message, param=told.param, code=told.code)
    return Failed(problem, _blamed(route, route.server, problem), event)


def _blamed(route: Route, instance: Instance, problem: Problem) -> frozenset[str]:
    """A hand-over has two ends: who lost its peer is not the one to avoid."""
    if problem.status != 502 or problem.code == "ENDED":
        return frozenset({instance.name})
    if problem.code == "PEER_LOST":
        others = set(route.names) - {instance.name}
        return frozenset(others or {instance.name})
    return frozenset(route.names)


class Trials:
    """How often one request was tried, and with whom not to try it again."""

    def __init__(self, limits: Limits) -> None:
        self.num_in_row = 0
        self.num_failures = 0
        self.avoid: frozenset[str] = frozenset()
        self.last: Failed | None = None
        self._limits = limits
        self._since_s = monotonic()

    def progressed(self) -> None:
        """Tokens have come: what failed before is past."""
        self.num_in_row = 0
        self.avoid = frozenset()
        self._since_s = monotonic()

    def can_retry(self, failed: Failed) -> bool:
        """Whether to try again; the failure is noted."""
        self.last = failed
        self.num_in_row += 1
        self.num_failures += 1
        self.avoid |= failed.blamed
        limits = self._limits
        return (
            failed.is_retriable
            and self.num_in_row < limits.num_attempts_max
            and self.num_failures <= limits.num_resumes_max
            and monotonic() - self._since_s < limits.retry_s_max
        )

    def wait_s(self, *, is_resume: bool) -> float:
        """How long to wait before the next attempt: longer each time, and not the same for all."""
        if is_resume and self.last is not None and self.last.problem.code in FULLS:
            return FULL_S * (1 + random.random()) / 2
        most_s = min(WAIT_S_MAX, WAIT_S_FIRST * float(4**self.num_in_row))
        return most_s * (1 + random.random()) / 2
