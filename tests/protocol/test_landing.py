"""Every cell of a target rank's table."""

from __future__ import annotations

import pytest
from tests.protocol.cells import Case, Suite, check, check_missing, gaps, ignored, name_of
from tests.protocol.values import BROKEN, GRANT_ID, TRANSFER

from baton.protocol.landing import (
    LANDING,
    CloseAsked,
    FreeStaging,
    JobEnded,
    Landing,
    StartUnpack,
    TakeBack,
    TakenBack,
    Tell,
    UnpackAsked,
)
from baton.protocol.landing import LandingState as S
from baton.protocol.machine import replace
from baton.protocol.messages import Closed, Landed, Unpacked

RANK = 2
LANDED = Landed(transfer=TRANSFER, grant=GRANT_ID, source_rank=1, chunk=4, layers=(0, 2), tokens=(0, 8))
JOB, OTHER_JOB = (1, 4), (0, 0)
OPEN = Landing(GRANT_ID, RANK)
BUSY = replace(OPEN, jobs=frozenset({JOB}))
CLOSING = replace(OPEN, state=S.CLOSING)
CLOSING_BUSY = replace(CLOSING, jobs=frozenset({JOB, OTHER_JOB}), must_still=True)
PROVING = replace(CLOSING, must_still=True)
CLOSED = replace(OPEN, state=S.CLOSED)


def unpacked(cause=None) -> Tell:
    return Tell(Unpacked(grant=GRANT_ID, rank=RANK, source_rank=1, chunk=4, cause=cause))


def closed(text: str = "", *, is_still: bool = True) -> Tell:
    return Tell(Closed(grant=GRANT_ID, rank=RANK, is_still=is_still, text=text))


RECORDS = {one.state: one for one in (OPEN, CLOSING, CLOSED)}
EVENTS = {
    type(event): event
    for event in (UnpackAsked(LANDED), JobEnded(1, 4), CloseAsked(must_still=False), TakenBack(is_still=True))
}
SUITE = Suite(
    LANDING,
    (
        Case("begun", OPEN, UnpackAsked(LANDED), {"jobs": frozenset({JOB})}, (StartUnpack(LANDED),)),
        Case("asked twice", BUSY, UnpackAsked(LANDED)),
        Case("done", BUSY, JobEnded(1, 4), {"jobs": frozenset()}, (unpacked(),)),
        Case("found wrong", BUSY, JobEnded(1, 4, BROKEN), {"jobs": frozenset()}, (unpacked(BROKEN),)),
        Case(
            "nothing runs",
            OPEN,
            CloseAsked(must_still=True),
            {"state": S.CLOSING, "must_still": True},
            (TakeBack(must_still=True),),
        ),
        Case(
            "the unpack is a writer too",
            BUSY,
            CloseAsked(must_still=True),
            {"state": S.CLOSING, "must_still": True},
        ),
        Case("one of two", CLOSING_BUSY, JobEnded(1, 4), {"jobs": frozenset({OTHER_JOB})}),
        Case(
            "the last",
            replace(CLOSING_BUSY, jobs=frozenset({JOB})),
            JobEnded(1, 4),
            {"jobs": frozenset()},
            (TakeBack(must_still=True),),
        ),
        Case("asked again", PROVING, CloseAsked(must_still=True), {}, (TakeBack(must_still=True),)),
        Case(
            "the source has said quiet since",
            PROVING,
            CloseAsked(must_still=False),
            {"must_still": False},
            (TakeBack(must_still=False),),
        ),
        Case("asked again while an unpack runs", CLOSING_BUSY, CloseAsked(must_still=True)),
        Case(
            "still",
            PROVING,
            TakenBack(is_still=True),
            {"state": S.CLOSED},
            (closed(), FreeStaging()),
        ),
        Case(
            "not still: staging stays leased",
            PROVING,
            TakenBack(is_still=False, text="a write may land"),
            {},
            (closed("a write may land", is_still=False),),
        ),
        Case(
            "the source is quiet, whatever the transport says",
            CLOSING,
            TakenBack(is_still=False, text="a write may land"),
            {"state": S.CLOSED},
            (closed("a write may land"), FreeStaging()),
        ),
        Case(
            "paths that turned out to be unchecked are told",
            CLOSING,
            TakenBack(is_still=True, unchecked=(3, 5)),
            {"state": S.CLOSED},
            (
                Tell(Closed(grant=GRANT_ID, rank=RANK, is_still=True, unchecked=(3, 5))),
                FreeStaging(),
            ),
        ),
        *ignored(RECORDS, EVENTS, S.CLOSING, UnpackAsked),
        *ignored(RECORDS, EVENTS, S.CLOSED, UnpackAsked, CloseAsked, TakenBack),
    ),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(LANDING, case)


@pytest.mark.parametrize("key", SUITE.missing(), ids=name_of)
def test_missing_cell(key):
    check_missing(SUITE, key)
