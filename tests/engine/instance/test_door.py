"""Requests come in until too many wait or the instance ends, and the end is told once."""

from __future__ import annotations

import pytest

from baton.engine.instance.door import RETRY_S_MIN, Door
from baton.engine.instance.load import Gauge, Load, Queue
from baton.errors import EngineError, FullError


def test_too_many_are_refused_with_a_time() -> None:
    door, gauge, come = Door("one", 2), Gauge(), []
    gauge.queue, gauge.load = Queue(num_taken=0, num_waiting=1, num_slots=0), Load(wait_s=7.5)
    door.enter(gauge, lambda: come.append(1))
    with pytest.raises(
        FullError, match=r"one is full: 2 requests wait, at most 2 may; ask again in 8 s"
    ) as found:
        door.enter(gauge, lambda: come.append(2))
    assert found.value.retry_after_s == 7.5
    gauge.queue, gauge.load = Queue(num_taken=1, num_waiting=0, num_slots=1), Load()
    door.enter(gauge, lambda: come.append(3))
    door.enter(gauge, lambda: come.append(4))
    door.enter(gauge, lambda: come.append(5))
    with pytest.raises(FullError) as found:
        door.enter(gauge, lambda: come.append(6))
    assert found.value.retry_after_s == RETRY_S_MIN
    assert come == [1, 3, 4, 5]


def test_without_a_limit_everybody_comes_in() -> None:
    door, gauge, come = Door("one", 0), Gauge(), []
    gauge.queue = Queue(num_taken=0, num_waiting=1000, num_slots=0)
    for _ in range(5):
        door.enter(gauge, lambda: come.append(1))
    assert len(come) == 5


def test_a_door_that_is_shut() -> None:
    door, told = Door("one", 0), []
    door.on_end(lambda: told.append("first"))
    door.shut("rank 0 ended")
    with pytest.raises(EngineError, match="one is not running: rank 0 ended"):
        door.enter(Gauge(), lambda: told.append("came in"))
    assert told == [], "requests inside hear of the end first"
    door.end()
    door.on_end(lambda: told.append("late"))
    assert told == ["first", "late"]
