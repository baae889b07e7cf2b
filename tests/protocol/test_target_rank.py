"""Every cell of a target rank's table."""

from __future__ import annotations

import pytest
from tests.protocol.cells import Case, Suite, check, check_missing, gaps, ignored, name_of
from tests.protocol.values import BROKEN, GRANT_ID, TRANSFER

from baton.protocol.machine import Forget, replace
from baton.protocol.messages import Close, Closed, Landed, UnpackChunk, Unpacked
from baton.protocol.target_rank import TARGET_RANK, RevokePermissions, StartUnpack, TargetRank
from baton.protocol.target_rank import TargetRankState as S

RANK = 2
LANDED = Landed(transfer=TRANSFER, grant=GRANT_ID, source_rank=1, chunk=4, layers=(0, 2), tokens=(0, 8))
JOB, OTHER_JOB = (1, 4), (0, 0)
OPEN = TargetRank(GRANT_ID, RANK)
BUSY = replace(OPEN, unpacking=frozenset({JOB}))
CLOSING = replace(OPEN, state=S.CLOSING)
CLOSING_BUSY = replace(CLOSING, unpacking=frozenset({JOB, OTHER_JOB}), must_prove_quiet=True)
PROVING = replace(CLOSING, must_prove_quiet=True)
CLOSED = replace(OPEN, state=S.CLOSED)


def unpacked(cause=None) -> object:
    return Unpacked(grant=GRANT_ID, rank=RANK, source_rank=1, chunk=4, cause=cause)


def closed(text: str = "", *, is_quiet: bool = True) -> object:
    return Closed(grant=GRANT_ID, rank=RANK, is_quiet=is_quiet, text=text)


RECORDS = {one.state: one for one in (OPEN, CLOSING, CLOSED)}
EVENTS = {
    type(event): event
    for event in (
        UnpackChunk(grant=GRANT_ID, landed=LANDED),
        unpacked(),
        Close(grant=GRANT_ID, must_prove_quiet=False),
        Closed(grant=GRANT_ID, rank=RANK, is_quiet=True),
    )
}
SUITE = Suite(
    TARGET_RANK,
    (
        Case(
            "begun",
            OPEN,
            UnpackChunk(grant=GRANT_ID, landed=LANDED),
            {"unpacking": frozenset({JOB})},
            (StartUnpack(LANDED),),
        ),
        Case("asked twice", BUSY, UnpackChunk(grant=GRANT_ID, landed=LANDED)),
        Case("done", BUSY, unpacked(), {"unpacking": frozenset()}, (unpacked(),)),
        Case("found wrong", BUSY, unpacked(BROKEN), {"unpacking": frozenset()}, (unpacked(BROKEN),)),
        Case(
            "nothing runs",
            OPEN,
            Close(grant=GRANT_ID, must_prove_quiet=True),
            {"state": S.CLOSING, "must_prove_quiet": True},
            (RevokePermissions(must_prove_quiet=True),),
        ),
        Case(
            "the unpack is a writer too",
            BUSY,
            Close(grant=GRANT_ID, must_prove_quiet=True),
            {"state": S.CLOSING, "must_prove_quiet": True},
        ),
        Case("one of two", CLOSING_BUSY, unpacked(), {"unpacking": frozenset({OTHER_JOB})}),
        Case(
            "the last",
            replace(CLOSING_BUSY, unpacking=frozenset({JOB})),
            unpacked(),
            {"unpacking": frozenset()},
            (RevokePermissions(must_prove_quiet=True),),
        ),
        Case(
            "asked again",
            PROVING,
            Close(grant=GRANT_ID, must_prove_quiet=True),
            {},
            (RevokePermissions(must_prove_quiet=True),),
        ),
        Case(
            "the source has said quiet since",
            PROVING,
            Close(grant=GRANT_ID, must_prove_quiet=False),
            {"must_prove_quiet": False},
            (RevokePermissions(must_prove_quiet=False),),
        ),
        Case("asked again while an unpack runs", CLOSING_BUSY, Close(grant=GRANT_ID, must_prove_quiet=True)),
        Case(
            "still",
            PROVING,
            Closed(grant=GRANT_ID, rank=RANK, is_quiet=True),
            {"state": S.CLOSED},
            (closed(), Forget()),
        ),
        Case(
            "not still: staging stays leased",
            PROVING,
            Closed(grant=GRANT_ID, rank=RANK, is_quiet=False, text="a write may land"),
            {},
            (closed("a write may land", is_quiet=False),),
        ),
        Case(
            "the source is quiet, whatever the transport says",
            CLOSING,
            Closed(grant=GRANT_ID, rank=RANK, is_quiet=False, text="a write may land"),
            {"state": S.CLOSED},
            (closed("a write may land"), Forget()),
        ),
        Case(
            "paths that turned out to be unchecked are told",
            CLOSING,
            Closed(grant=GRANT_ID, rank=RANK, is_quiet=True, unchecked=(3, 5)),
            {"state": S.CLOSED},
            (
                Closed(grant=GRANT_ID, rank=RANK, is_quiet=True, unchecked=(3, 5)),
                Forget(),
            ),
        ),
        *ignored(RECORDS, EVENTS, S.CLOSING, UnpackChunk),
        *ignored(RECORDS, EVENTS, S.CLOSED, UnpackChunk, Close, Closed),
    ),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(TARGET_RANK, case)


@pytest.mark.parametrize("key", SUITE.missing(), ids=name_of)
def test_missing_cell(key):
    check_missing(SUITE, key)
