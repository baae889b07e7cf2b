"""The progress deadline of one transfer: the longer of what either side names holds for both."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from tests.protocol.test_source_coordinator import EMPTY, PREFILL, by
from tests.protocol.test_target_coordinator import WAITS, asked
from tests.protocol.values import TIMINGS, grant

from baton.errors import ConfigError
from baton.protocol.machine import Ticked, replace
from baton.protocol.messages import Offer
from baton.protocol.outcomes import Failed, Why
from baton.protocol.source_coordinator import SOURCE_COORDINATOR, GroupRequested, ToSession, ToTarget
from baton.protocol.source_coordinator import SourceCoordinatorState as Source
from baton.protocol.target_coordinator import TARGET_COORDINATOR, TargetCoordinator
from baton.protocol.timings import Timings, check_progress

TARGET = TargetCoordinator(asked(0, 1), "decode", frozenset({0, 1}), WAITS)


def naming(message: Any, progress_s: float) -> Any:
    return msgspec.structs.replace(message, progress_s=progress_s)


def fed(record: Any, *events: object, now: float = 100.0) -> tuple[Any, list[Any]]:
    """A record after some events, and every effect."""
    table = TARGET_COORDINATOR if isinstance(record, TargetCoordinator) else SOURCE_COORDINATOR
    performed: list[Any] = []
    for event in events:
        record, effects = table.step(record, event, now)
        performed += effects
    return record, performed


def offers(effects: list[Any]) -> list[float]:
    """What a target is told of the deadline, offer by offer."""
    sent = [effect.message for effect in effects if isinstance(effect, ToTarget | ToSession)]
    return [message.progress_s for message in sent if isinstance(message, Offer)]


def check_patience(record: Any, patience_s: float) -> None:
    """It fails when it has made no progress for this long, not before, and says which setting it was."""
    table = TARGET_COORDINATOR if isinstance(record, TargetCoordinator) else SOURCE_COORDINATOR
    moved = record.deadlines.moved
    assert table.step(record, Ticked(), moved + patience_s - 0.1)[0].outcome is None
    outcome = table.step(record, Ticked(), moved + patience_s)[0].outcome
    assert isinstance(outcome, Failed)
    assert outcome.cause.why is Why.DEADLINE
    assert f"no progress for {patience_s:g} s; raise progress_s" in outcome.cause.text


@pytest.mark.parametrize(
    ("source_s", "target_s", "held_s"),
    [
        (0.0, 0.0, TIMINGS.progress_s),
        (80.0, 0.0, 80.0),
        (0.0, 80.0, 80.0),
        (80.0, 5.0, 80.0),
        (5.0, 0.0, 5.0),
    ],
)
def test_both_sides_keep_to_the_longer_of_what_they_name(
    source_s: float, target_s: float, held_s: float
) -> None:
    source, effects = fed(EMPTY, by(0, naming(PREFILL, source_s)), naming(grant(), target_s))
    check_patience(source, held_s)
    (told_s,) = offers(effects)
    target, _ = fed(TARGET, naming(asked(1), target_s), naming(PREFILL, told_s))
    check_patience(target, held_s)


def test_a_grant_that_comes_first() -> None:
    source, effects = fed(EMPTY, naming(grant(), 80.0), by(0, PREFILL))
    check_patience(source, 80.0)
    assert offers(effects) == [80.0]


def test_a_rank_that_names_more_after_the_grant_is_passed_on() -> None:
    source, effects = fed(EMPTY, by(0, naming(PREFILL, 25.0)), grant(), by(1, naming(PREFILL, 80.0)))
    assert offers(effects) == [25.0, 80.0]
    assert source.state is Source.RUNNING, "ranks may name different deadlines for one prompt"
    check_patience(source, 80.0)
    assert offers(fed(EMPTY, by(0, naming(PREFILL, 80.0)), grant(), by(1, PREFILL))[1]) == [80.0]


def test_a_target_that_asks_for_the_group_is_told_the_deadline() -> None:
    offer = by(0, naming(PREFILL, 80.0))
    assert offers(fed(EMPTY, GroupRequested(5), offer)[1]) == [80.0]
    assert offers(fed(EMPTY, offer, GroupRequested(5))[1]) == [80.0]


def test_ranks_of_a_target_may_name_different_deadlines() -> None:
    target, _ = fed(TARGET, naming(asked(0), 80.0), naming(asked(1), 25.0), PREFILL)
    check_patience(target, 80.0)


def test_before_both_sides_have_mentioned_it_the_other_deadline_runs() -> None:
    source, _ = fed(EMPTY, by(0, naming(PREFILL, 80.0)))
    record, _ = SOURCE_COORDINATOR.step(source, Ticked(), source.deadlines.moved + TIMINGS.offer_s)
    assert isinstance(record.outcome, Failed)
    assert f"no progress for {TIMINGS.offer_s:g} s; raise offer_s" in record.outcome.cause.text


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_what_a_peer_cannot_mean_is_passed_over(wrong: float) -> None:
    check_patience(fed(TARGET, naming(PREFILL, wrong))[0], TIMINGS.progress_s)
    check_patience(fed(EMPTY, by(0, PREFILL), naming(grant(), wrong))[0], TIMINGS.progress_s)


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_deadline_is_refused(wrong: float) -> None:
    for make in (check_progress, lambda value: Timings(progress_s=value)):
        with pytest.raises(ConfigError, match=r"progress_s is .*; give a finite number of seconds above 0"):
            make(wrong)


def test_the_total_deadline_holds_all_the_same() -> None:
    source, _ = fed(EMPTY, by(0, naming(PREFILL, 10 * TIMINGS.total_s)), grant())
    began = source.deadlines.began
    record, _ = SOURCE_COORDINATOR.step(replace(source), Ticked(), began + TIMINGS.total_s)
    assert isinstance(record.outcome, Failed)
    assert "after it began" in record.outcome.cause.text
