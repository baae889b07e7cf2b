"""Every cell of the table of an instance's life."""

from __future__ import annotations

import pytest
from tests.protocol.cells import Case, Suite, check, gaps, ignored

from baton.protocol.instance import (
    INSTANCE,
    DrainRequested,
    EndAll,
    EndRequested,
    InstanceRecord,
    RankAttached,
    RankLost,
    RefuseRank,
    Serve,
    StopGranting,
    WorkCounted,
)
from baton.protocol.instance import InstanceState as S
from baton.protocol.machine import replace

FORMING = InstanceRecord("decode-0", 3, 2)
HALF = replace(FORMING, ranks=frozenset({1}))
SERVING = replace(FORMING, state=S.SERVING, ranks=frozenset({0, 1}))
BUSY = replace(SERVING, is_idle=False)
DRAINING = replace(BUSY, state=S.DRAINING, cause="upgrade")
ENDED = replace(SERVING, state=S.ENDED, cause="upgrade")
TOO_MUCH = "30% of a rank's pages are in quarantine; restart the instance"
LOST = "rank 1 was lost: killed"


def full(state: S) -> str:
    return f"decode-0 is {state.value} with all its ranks; a new rank needs a new incarnation"


def ended(text: str, **fields: object) -> tuple[dict[str, object], tuple[object, ...]]:
    return {"state": S.ENDED, "cause": text, **fields}, (EndAll(text),)


def requested(text: str) -> tuple[dict[str, object], tuple[object, ...]]:
    return {"state": S.ENDED, "cause": text}, (EndAll(text, is_requested=True),)


RECORDS = {one.state: one for one in (FORMING, SERVING, DRAINING, ENDED)}
EVENTS = {
    type(event): event
    for event in (
        RankAttached(0),
        RankLost(1, "killed"),
        DrainRequested("upgrade"),
        WorkCounted(2),
        EndRequested("upgrade"),
    )
}
SUITE = Suite(
    INSTANCE,
    (
        Case("one of two", FORMING, RankAttached(1), {"ranks": frozenset({1})}),
        Case("the last", HALF, RankAttached(0), {"state": S.SERVING, "ranks": frozenset({0, 1})}, (Serve(),)),
        Case("twice", HALF, RankAttached(1), {}, (RefuseRank(1, "rank 1 is attached already"),)),
        Case(
            "too many",
            HALF,
            RankAttached(2),
            {},
            (RefuseRank(2, "rank 2 is outside of a layout with 2 ranks"),),
        ),
        Case(
            "no rank at all",
            HALF,
            RankAttached(-1),
            {},
            (RefuseRank(-1, "rank -1 is outside of a layout with 2 ranks"),),
        ),
        Case("does not fit", HALF, RankAttached(0, "other spec"), {}, (RefuseRank(0, "other spec"),)),
        Case("nothing is recovered in place", HALF, RankLost(1, "killed"), *ended(LOST)),
        Case("nothing to wait for", HALF, DrainRequested("upgrade"), *ended("upgrade")),
        Case("at once", HALF, EndRequested("upgrade"), *requested("upgrade")),
        *ignored(RECORDS, EVENTS, S.FORMING, WorkCounted),
        Case("nobody is replaced", SERVING, RankAttached(0), {}, (RefuseRank(0, full(S.SERVING)),)),
        Case("does not fit", SERVING, RankAttached(0, "other spec"), {}, (RefuseRank(0, "other spec"),)),
        Case("one fate", BUSY, RankLost(1, "killed"), *ended(LOST)),
        Case(
            "transfers are under way",
            BUSY,
            DrainRequested("upgrade"),
            {"state": S.DRAINING, "cause": "upgrade"},
            (StopGranting("upgrade"),),
        ),
        Case("idle", SERVING, DrainRequested("upgrade"), *ended("upgrade")),
        Case("busy", SERVING, WorkCounted(2), {"is_idle": False}),
        Case("idle", BUSY, WorkCounted(0), {"is_idle": True}),
        Case("a quarter in quarantine is borne", SERVING, WorkCounted(2, 0.25), {"is_idle": False}),
        Case(
            "more is not",
            SERVING,
            WorkCounted(2, 0.3),
            {"state": S.DRAINING, "is_idle": False, "cause": TOO_MUCH},
            (StopGranting(TOO_MUCH),),
        ),
        Case("more, and nothing to wait for", BUSY, WorkCounted(0, 0.3), *ended(TOO_MUCH, is_idle=True)),
        Case("at once", BUSY, EndRequested("upgrade"), *requested("upgrade")),
        Case("nobody is replaced", DRAINING, RankAttached(0), {}, (RefuseRank(0, full(S.DRAINING)),)),
        Case("one fate", DRAINING, RankLost(1, "killed"), *ended(LOST)),
        Case("one is left", replace(DRAINING, is_idle=True), WorkCounted(1), {"is_idle": False}),
        Case(
            "none is left",
            DRAINING,
            WorkCounted(0),
            {"state": S.ENDED, "is_idle": True},
            (EndAll("upgrade"),),
        ),
        Case("at once", DRAINING, EndRequested("now"), *requested("now")),
        *ignored(RECORDS, EVENTS, S.DRAINING, DrainRequested),
        Case("over", ENDED, RankAttached(0), {}, (RefuseRank(0, full(S.ENDED)),)),
        *ignored(RECORDS, EVENTS, S.ENDED, RankLost, DrainRequested, WorkCounted, EndRequested),
    ),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(INSTANCE, case)


def test_no_cell_is_missing():
    assert SUITE.missing() == []
