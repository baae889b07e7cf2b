"""Figures of hand-overs that were never made: two layers of 1 s each, and a link that takes 2 s for both."""

from __future__ import annotations

import pytest

from baton.bench.overlap_report import (
    OverlapCase,
    OverlapRound,
    losses,
    rows_of,
    summary_lines,
    table_of,
    targets,
)
from baton.engine.commands import CopyRecord, LayerGroupTiming, LayerReady
from baton.engine.trace import HandoffTrace, RequestTrace

CASE = OverlapCase(4096, 1e9)


def told(
    groups: list[tuple[int, int]],
    copies: list[tuple[float, float]],
    slowed: float = 1.0,
    state_bytes: int = 0,
) -> HandoffTrace:
    """Asked at 10, computed from 11 on; copies are (begun, ended), relative to that."""
    dues = [LayerReady(11.0 + slowed, 500), LayerReady(11.0 + 2 * slowed, 500, state_bytes)]
    source, target = RequestTrace(10.0), RequestTrace(10.0)
    source.begun_s, source.prompt_s = 11.0, 11.0 + 2 * slowed
    source.groups[0] = [
        LayerGroupTiming(each, 11.0 + each[0] * slowed, 11.0 + each[1] * slowed) for each in groups
    ]
    source.copies[0] = [
        CopyRecord(0, chunk, 500, 11.0 + begun_s, 11.0 + ended_s, dues[chunk :: len(copies)])
        for chunk, (begun_s, ended_s) in enumerate(copies)
    ]
    target.settled_s = 11.5 + max(ended_s for _, ended_s in copies)
    return HandoffTrace(10.0, 13.5, source, target)


OFF = told([(0, 2)], [(2.0, 3.0), (2.0, 4.0)])


def test_efficiency_is_held_to_the_transfer_time_of_off() -> None:
    by_layer = told([(0, 1), (1, 2)], [(1.0, 2.0), (2.0, 3.25)])
    rows = rows_of(CASE, {"off": [OverlapRound(OFF, 2.0)], "fixed:1": [OverlapRound(by_layer, 2.0)]})
    off, one = rows
    assert off.serial_s == one.serial_s == 2.0
    assert (off.runs[0].exposed_s, off.runs[0].efficiency) == (2.0, 0.0)
    assert (one.runs[0].exposed_s, one.runs[0].efficiency) == (1.25, 0.375)
    # Layers are ready at 1 and 2, and take 1 each on the link: done at 3, 1 after compute.
    assert [run.bound for row in rows for run in row.runs] == [0.5, 0.5]
    assert one.of_bound == pytest.approx(0.75)
    assert one.runs[0].complete == pytest.approx(3.25 / 2)
    assert one.runs[0].tth_s == pytest.approx(1 + 3.25 + 0.5)
    assert one.tth_over_compute == pytest.approx(4.75 / 2)
    assert (off.runs[0].num_groups, one.runs[0].num_groups, one.runs[0].num_bytes) == (1, 2, 1000)


def test_compute_beside_copies_is_compared_with_compute_of_the_same_round() -> None:
    slow = told([(0, 2)], [(2.2, 4.0)], slowed=1.1)
    row = rows_of(CASE, {"off": [OverlapRound(slow, 2.0), OverlapRound(slow, 2.2)]})[0]
    assert [run.slowed for run in row.runs] == [pytest.approx(0.1), pytest.approx(0.0)]
    assert row.compute_only_s == pytest.approx(2.1)


def test_targets_of_a_gpu_are_harder_and_more() -> None:
    good = told([(0, 1), (1, 2)], [(1.0, 2.0), (2.0, 3.06)])
    rows = rows_of(CASE, {"off": [OverlapRound(OFF, 2.0)], "cost": [OverlapRound(good, 2.0)]})
    on_cpu = targets(rows, "cost", "cpu")["4096 tokens, 1 GB/s"]
    on_gpu = targets(rows, "cost", "cuda")["4096 tokens, 1 GB/s"]
    assert on_cpu == {"of_bound": pytest.approx(0.94), "of_bound_is_met": True}
    assert on_gpu["of_bound_is_met"] is False
    assert (on_gpu["slowed_is_met"], on_gpu["complete_is_met"]) == (True, False)


def with_states(ended_s: float) -> HandoffTrace:
    """The last of two layers keeps a state alone, which takes 1 s of the link."""
    return told([(0, 1), (1, 2)], [(1.0, 2.0), (2.0, ended_s)], state_bytes=500)


@pytest.mark.parametrize(
    ("ended_s", "is_hidden", "is_met"), [(2.9, True, True), (3.08, True, False), (3.12, False, False)]
)
def test_a_state_may_expose_its_own_bytes_and_no_more(ended_s: float, is_hidden: bool, is_met: bool) -> None:
    off = told([(0, 2)], [(2.0, 3.0), (2.0, 4.0)], state_bytes=500)
    rounds = {"off": [OverlapRound(off, 2.0)], "cost": [OverlapRound(with_states(ended_s), 2.0)]}
    found = targets(rows_of(CASE, rounds), "cost", "cpu")["4096 tokens, 1 GB/s"]
    # Without the state all would be across when compute ends, at 2.
    assert found["state_s"] == pytest.approx(1.0)
    assert found["beyond_s"] == pytest.approx(ended_s - 2.0)
    assert (found["of_bound_is_met"], found["beyond_is_met"]) == (is_hidden, is_met)


def test_a_policy_that_loses_to_off_is_named() -> None:
    """Its transfer is hidden, and yet a client waits longer: compute beside the copies was slowed down."""
    slow = told([(0, 1), (1, 2)], [(1.0, 2.0), (4.2, 4.4)], slowed=2.1)
    rounds = {"off": [OverlapRound(OFF, 2.0)], "cost": [OverlapRound(slow, 2.0)]}
    rows = rows_of(CASE, rounds)
    off, cost = rows
    assert cost.median(lambda run: run.efficiency) > off.median(lambda run: run.efficiency)
    assert losses(rows) == [(cost, off)]
    lines = summary_lines(rows)
    assert lines[0].startswith("cost: tth at most ")
    assert lines[0].endswith(" times compute-only (4096 tokens, 1 GB/s)")
    assert lines[-1].startswith("cost is slower than off at 4096 tokens, 1 GB/s: tth ")
    heads = [str(column.header) for column in table_of(rows, "t").columns]
    assert heads[3:6] == ["tth", "tth/compute", "against off"]


def test_it_says_when_no_policy_loses() -> None:
    fast = told([(0, 1), (1, 2)], [(1.0, 2.0), (2.0, 3.0)])
    rows = rows_of(CASE, {"off": [OverlapRound(OFF, 2.0)], "fixed:1": [OverlapRound(fast, 2.0)]})
    assert summary_lines(rows)[-1] == "no policy is slower than off"
