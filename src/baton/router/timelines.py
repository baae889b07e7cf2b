"""One story of a request: the router's attempts, and what each of its instances remembers.

Instances tell times of their own monotonic clock, and what that clock and the calendar said when they were
asked; so their stories can be laid side by side, as well as their calendars agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.observe import Interval, Timeline, Track, trace

US_PER_S = 1e6


@dataclass(slots=True)
class Tried:
    """One attempt as the router saw it, in seconds since 1970."""

    names: tuple[str, ...]
    """Who answers, then who prefills for it."""
    why_local: str
    began_s: float = field(default_factory=time.time)
    answered_s: float = 0.0
    ended_s: float = 0.0
    failure: str = ""


def story(identity: str, attempts: Sequence[Tried], told: Sequence[Any]) -> dict[str, Any]:
    """Everything, in the order of the instances that took part."""
    return {
        "id": identity,
        "attempts": [asdict(tried) for tried in attempts],
        "instances": list(told),
    }


def perfetto(attempts: Sequence[Tried], told: Sequence[Any], traces: Sequence[Any]) -> dict[str, Any]:
    """All traces as one, from the first attempt on; the router's own comes first."""
    zero_s = min(tried.began_s for tried in attempts)
    own = trace([Timeline("router", tuple(_intervals(attempts, zero_s)))])
    events, num_processes = list(own["traceEvents"]), _most(own)
    for each, found in zip(told, traces, strict=True):
        shift_us = (_arrived_s(each, zero_s) - zero_s) * US_PER_S
        for event in found.get("traceEvents", ()):
            moved = {"ts": event["ts"] + shift_us} if event.get("ph") == "X" else {}
            events.append({**event, "pid": event["pid"] + num_processes, **moved})
        num_processes += _most(found)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _intervals(attempts: Sequence[Tried], zero_s: float) -> Iterator[Interval]:
    for number, tried in enumerate(attempts, 1):
        details = {"instances": " <- ".join(tried.names), "failure": tried.failure, "local": tried.why_local}
        start_s = tried.began_s - zero_s
        stop_s = max(start_s, (tried.ended_s or time.time()) - zero_s)
        yield Interval(Track("router", "attempts"), f"attempt {number}", start_s, stop_s, details)
        if tried.answered_s:
            answered_s = min(max(start_s, tried.answered_s - zero_s), stop_s)
            yield Interval(Track("router", "until the answer begins"), "first token", start_s, answered_s)


def _arrived_s(told: Any, fallback_s: float) -> float:
    """When the request came to an instance, by the calendar."""
    clock = told.get("clock") or {}
    stories = [job.get("story") or {} for job in told.get("jobs", ())]
    arrivals = [found["arrived_s"] for found in stories if found.get("arrived_s")]
    if not arrivals or "monotonic_s" not in clock:
        return fallback_s
    return float(clock["unix_s"] - (clock["monotonic_s"] - min(arrivals)))


def _most(found: Any) -> int:
    return max((int(event.get("pid", 0)) for event in found.get("traceEvents", ())), default=0)
