"""Timelines as data, their lanes, and the trace that other programs read."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from baton.observe import Interval, Timeline, Track, covered_s, trace

COMPUTE, COPY = Track("source rank 0", "compute"), Track("source rank 0", "copy to 1")


def on(track: Track, *bounds: tuple[float, float]) -> list[Interval]:
    return [Interval(track, f"{start:g}", start, stop) for start, stop in bounds]


def test_tracks_of_a_group_stay_together_in_order_of_appearance() -> None:
    late = Track("source rank 0", "queue")
    target = Track("target", "admission")
    timeline = Timeline("t", (*on(COMPUTE, (0, 1)), *on(target, (2, 3)), *on(late, (0, 0))))
    assert timeline.tracks == (COMPUTE, late, target)
    assert (timeline.start_s, timeline.stop_s) == (0, 3)
    assert Timeline("empty").tracks == ()


def test_an_interval_does_not_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="before its start"):
        Interval(COPY, "x", 2, 1)


def test_covered_time_counts_once() -> None:
    assert covered_s([]) == 0
    assert covered_s([(5, 6), (0, 2), (1, 3), (3, 4), (1, 2)]) == 5


bounds = some.lists(
    some.tuples(some.integers(0, 40), some.integers(0, 10)).map(lambda b: (float(b[0]), float(sum(b))))
)


@given(bounds)
def test_lanes_hold_everything_and_nothing_overlaps(found: list[tuple[float, float]]) -> None:
    lanes = Timeline("t", tuple(on(COPY, *found))).lanes(COPY)
    assert sorted((i.start_s, i.stop_s) for lane in lanes for i in lane) == sorted(found)
    for lane in lanes:
        assert all(left.stop_s <= right.start_s for left, right in pairwise(lane))
    moments = {start for start, _ in found}
    most = max((sum(a <= at < b or a == b == at for a, b in found) for at in moments), default=0)
    assert len(lanes) <= most


@given(bounds)
def test_covered_time_is_that_of_the_moments(found: list[tuple[float, float]]) -> None:
    assert covered_s(found) == len({at for a, b in found for at in range(int(a), int(b))})


def check_trace(text: str) -> list[dict[str, object]]:
    """The trace event format, as its readers need it."""
    found = json.loads(text)
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    for event in found["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int | float)
            assert event["dur"] >= 0
        else:
            assert set(event["args"]) & {"name", "sort_index"}
    return found["traceEvents"]


def test_trace_events() -> None:
    first = Timeline(
        "a", (*on(COMPUTE, (10, 11)), *on(COPY, (10.5, 12), (11, 13)), *on(Track("b", "x"), (9, 9)))
    )
    events = check_trace(json.dumps(trace([first, Timeline("again", tuple(on(COMPUTE, (20, 21))))])))
    named = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["ph"] == "M" and "name" in event["args"]
    }
    assert sorted(named.values()) == sorted(
        [
            "a: source rank 0",
            "a: b",
            "again: source rank 0",
            "compute",
            "copy to 1",
            "copy to 1",
            "x",
            "compute",
        ]
    )
    copies = [event for event in events if event["ph"] == "X" and event["cat"] == "copy to 1"]
    assert [(copy["ts"], copy["dur"]) for copy in copies] == [(1.5e6, 1.5e6), (2e6, 2e6)]
    assert copies[0]["tid"] != copies[1]["tid"], "they overlap"
    last = [event for event in events if event["ph"] == "X"][-1]
    assert (last["ts"], last["dur"]) == (11e6, 1e6)
    assert check_trace(json.dumps(trace([]))) == []
