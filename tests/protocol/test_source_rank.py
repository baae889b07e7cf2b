"""Every cell of a source rank's table."""

from __future__ import annotations

import pytest
from tests.protocol.cells import Case, Suite, check, check_missing, gaps, ignored, name_of
from tests.protocol.values import (
    AUX,
    BROKEN,
    FAILED,
    FINISHED,
    GIVEN_UP,
    GRANT_ID,
    READY,
    TRANSFER,
    grant,
    settled,
)

from baton.errors import LocalProtocolError
from baton.protocol.ledger import Rectangle
from baton.protocol.machine import Conclude, Forget, replace
from baton.protocol.messages import Abort, AuxRecord, Commit, Grant, Landed, Quiet, Unquiet
from baton.protocol.source_rank import (
    SOURCE_RANK,
    Aborted,
    AnswerEnded,
    CancelCopies,
    ChunkCopied,
    ChunkDropped,
    ChunkFailed,
    ChunkReady,
    EndWithdrawal,
    ReleaseChunks,
    Sealed,
    SourceRank,
    StartCopies,
    Withdrawn,
)
from baton.protocol.source_rank import SourceRankState as S

RANK = 1
CHUNKS = tuple(ChunkReady(index, Rectangle((0, 2), (2 * index, 2 * index + 2))) for index in range(3))
ONE, TWO = CHUNKS[:2]
DOUBT = "the connection broke with bytes under way"

WAITING = SourceRank(TRANSFER, RANK)
HOLDING = replace(WAITING, waiting=(ONE, TWO), num_chunks=2)
SEALED_EARLY = replace(HOLDING, is_sealed=True)
GRANTED = replace(WAITING, state=S.COPYING, grant=GRANT_ID)
COPYING = replace(GRANTED, under_way={0: ONE, 1: TWO}, num_chunks=2)
LAST = replace(GRANTED, under_way={1: TWO}, num_chunks=2, num_bytes={0: {"k": 64}, 3: {"k": 8}})
WITHDRAWING = replace(COPYING, state=S.WITHDRAWING)
WITHDRAWING_LAST = replace(LAST, state=S.WITHDRAWING)
DRAINING = replace(COPYING, state=S.DRAINING, is_sealed=True)
DRAINING_LAST = replace(LAST, state=S.DRAINING, is_sealed=True)
COMMITTED = replace(DRAINING_LAST, state=S.COMMITTED, under_way={})
STOPPING = replace(COPYING, state=S.STOPPING)
STOPPING_LAST = replace(LAST, state=S.STOPPING)
ENDED = replace(GRANTED, state=S.ENDED)

COPIED = ChunkCopied(1, {0: {"k": 32, "v": 32}, 2: {"v": 16}}, {0: 4096}, {0: {"k": b"\x01" * 8}})
LANDED = Landed(
    transfer=TRANSFER,
    grant=GRANT_ID,
    source_rank=RANK,
    chunk=1,
    layers=(0, 2),
    tokens=(2, 4),
    staged={0: 4096},
    checksums={0: {"k": b"\x01" * 8}},
)
SUMMED = {0: {"k": 96, "v": 32}, 3: {"k": 8}, 2: {"v": 16}}


def quiet(grant_id: bytes = GRANT_ID) -> object:
    return Quiet(transfer=TRANSFER, grant=grant_id, source_rank=RANK)


def unquiet(text: str) -> object:
    return Unquiet(transfer=TRANSFER, grant=GRANT_ID, source_rank=RANK, text=text)


def abort(cause, grant_id: bytes = GRANT_ID) -> object:
    return Abort(transfer=TRANSFER, grant=grant_id, cause=cause, source_rank=RANK)


def aux(grant_id: bytes = GRANT_ID, *, is_final: bool = False) -> object:
    return AuxRecord(transfer=TRANSFER, grant=grant_id, aux=AUX, is_final=is_final)


def commit(num_chunks: int, num_bytes) -> object:
    return Commit(
        transfer=TRANSFER, grant=GRANT_ID, source_rank=RANK, num_chunks=num_chunks, num_bytes=num_bytes
    )


RECORDS = {
    record.state: record for record in (WAITING, COPYING, WITHDRAWING, DRAINING, COMMITTED, STOPPING, ENDED)
}
EVENTS = {
    type(event): event
    for event in (
        TWO,
        Sealed(AUX),
        AnswerEnded(AUX),
        Aborted(GIVEN_UP),
        grant(),
        settled(READY),
        COPIED,
        ChunkFailed(1, BROKEN),
        Withdrawn(),
        ChunkDropped(1),
    )
}

WAITING_CASES = (
    Case(
        "kept",
        replace(WAITING, num_chunks=1, waiting=(ONE,)),
        TWO,
        {"waiting": (ONE, TWO), "num_chunks": 2},
    ),
    Case(
        "the aux record goes ahead",
        HOLDING,
        Sealed(AUX),
        {"is_sealed": True, "has_aux": True},
        (aux(b""),),
    ),
    Case(
        "the first aux record stands",
        replace(HOLDING, has_aux=True),
        Sealed(AUX),
        {"is_sealed": True},
    ),
    Case(
        "dropped: nothing was read yet",
        HOLDING,
        Withdrawn(),
        {"waiting": (), "num_chunks": 0},
        (ReleaseChunks((0, 1)), EndWithdrawal(())),
    ),
    Case(
        "to be sealed again",
        replace(SEALED_EARLY, has_aux=True),
        Withdrawn(),
        {"waiting": (), "num_chunks": 0, "is_sealed": False},
        (ReleaseChunks((0, 1)), EndWithdrawal(())),
    ),
    Case("nothing was offered", WAITING, Withdrawn(), {}, (EndWithdrawal(()),)),
    Case("this rank did not sample", HOLDING, Sealed(None), {"is_sealed": True}),
    Case(
        "quiet at once, kept until the verdict",
        HOLDING,
        AnswerEnded(AUX),
        {"state": S.ENDED, "waiting": ()},
        (aux(b"", is_final=True), ReleaseChunks((0, 1)), quiet(b"")),
    ),
    Case(
        "quiet at once, kept until the verdict",
        HOLDING,
        Aborted(GIVEN_UP),
        {"state": S.ENDED, "waiting": ()},
        (abort(GIVEN_UP, b""), ReleaseChunks((0, 1)), quiet(b"")),
    ),
    Case(
        "with nothing to let go",
        WAITING,
        Aborted(GIVEN_UP),
        {"state": S.ENDED},
        (abort(GIVEN_UP, b""), quiet(b"")),
    ),
    Case(
        "chunks are copied",
        HOLDING,
        grant(),
        {"state": S.COPYING, "grant": GRANT_ID, "waiting": (), "under_way": {0: ONE, 1: TWO}},
        (StartCopies(0), StartCopies(1)),
    ),
    Case(
        "everything was ready",
        SEALED_EARLY,
        grant(),
        {"state": S.DRAINING, "grant": GRANT_ID, "waiting": (), "under_way": {0: ONE, 1: TWO}},
        (StartCopies(0), StartCopies(1)),
    ),
    Case(
        "nothing to send",
        replace(WAITING, is_sealed=True),
        grant(),
        {"state": S.COMMITTED, "grant": GRANT_ID},
        (commit(0, {}),),
    ),
    Case(
        "gone before it began",
        HOLDING,
        settled(FAILED),
        {"state": S.ENDED, "waiting": (), "is_settled": True},
        (Conclude(FAILED), ReleaseChunks((0, 1)), quiet(b""), Forget()),
    ),
)
COPYING_CASES = (
    Case(
        "copied at once",
        LAST,
        CHUNKS[2],
        {"under_way": {1: TWO, 2: CHUNKS[2]}, "num_chunks": 3},
        (StartCopies(2),),
    ),
    Case(
        "copies are under way",
        COPYING,
        Sealed(AUX),
        {"state": S.DRAINING, "is_sealed": True, "has_aux": True},
        (aux(),),
    ),
    Case(
        "the first aux record stands",
        replace(COPYING, has_aux=True),
        Sealed(AUX),
        {"state": S.DRAINING, "is_sealed": True},
    ),
    Case(
        "copies are called off",
        COPYING,
        Withdrawn(),
        {"state": S.WITHDRAWING},
        (CancelCopies(is_withdrawal=True),),
    ),
    Case(
        "nothing is under way",
        replace(GRANTED, landed=(ONE.box,)),
        Withdrawn(),
        {},
        (EndWithdrawal((ONE.box,)),),
    ),
    Case(
        "all is copied: aux before commit",
        replace(LAST, under_way={}),
        Sealed(AUX),
        {"state": S.COMMITTED, "is_sealed": True, "has_aux": True},
        (aux(), commit(2, {0: {"k": 64}, 3: {"k": 8}})),
    ),
    Case(
        "nothing was ever sent",
        GRANTED,
        Sealed(None),
        {"state": S.COMMITTED, "is_sealed": True},
        (commit(0, {}),),
    ),
    Case(
        "copies are called off",
        COPYING,
        AnswerEnded(AUX),
        {"state": S.STOPPING},
        (aux(is_final=True), CancelCopies()),
    ),
    Case(
        "nothing is under way",
        GRANTED,
        AnswerEnded(AUX),
        {"state": S.ENDED},
        (aux(is_final=True), quiet()),
    ),
    Case(
        "copies are called off",
        COPYING,
        Aborted(GIVEN_UP),
        {"state": S.STOPPING},
        (abort(GIVEN_UP), CancelCopies()),
    ),
    Case(
        "nothing is under way",
        GRANTED,
        Aborted(GIVEN_UP),
        {"state": S.ENDED},
        (abort(GIVEN_UP), quiet()),
    ),
    Case(
        "copies are called off",
        COPYING,
        settled(FAILED),
        {"state": S.STOPPING, "is_settled": True},
        (Conclude(FAILED), CancelCopies()),
    ),
    Case(
        "nothing is under way",
        GRANTED,
        settled(FINISHED),
        {"state": S.ENDED, "is_settled": True},
        (Conclude(FINISHED), quiet(), Forget()),
    ),
    Case(
        "told, with where it lies and its sums",
        LAST,
        COPIED,
        {"under_way": {}, "num_bytes": SUMMED, "landed": (TWO.box,)},
        (ReleaseChunks((1,)), LANDED),
    ),
    Case(
        "others are called off",
        COPYING,
        ChunkFailed(1, BROKEN),
        {"state": S.STOPPING, "under_way": {0: ONE}},
        (ReleaseChunks((1,)), abort(BROKEN), CancelCopies()),
    ),
    Case(
        "it was the last",
        LAST,
        ChunkFailed(1, BROKEN),
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), abort(BROKEN), quiet()),
    ),
    Case(
        "it cannot vouch",
        LAST,
        ChunkFailed(1, BROKEN, DOUBT),
        {"state": S.ENDED, "under_way": {}, "doubt": DOUBT},
        (ReleaseChunks((1,)), abort(BROKEN), unquiet(DOUBT)),
    ),
)
WITHDRAWING_CASES = (
    Case(
        "copied all the same",
        replace(WITHDRAWING, num_bytes={0: {"k": 64}, 3: {"k": 8}}),
        COPIED,
        {"under_way": {0: ONE}, "num_bytes": SUMMED, "landed": (TWO.box,)},
        (ReleaseChunks((1,)), LANDED),
    ),
    Case(
        "the last was copied all the same",
        replace(WITHDRAWING_LAST, landed=(ONE.box,)),
        COPIED,
        {"state": S.COPYING, "under_way": {}, "num_bytes": SUMMED, "landed": (ONE.box, TWO.box)},
        (ReleaseChunks((1,)), LANDED, EndWithdrawal((ONE.box, TWO.box))),
    ),
    Case(
        "others are under way",
        WITHDRAWING,
        ChunkDropped(1),
        {"under_way": {0: ONE}, "num_chunks": 1},
        (ReleaseChunks((1,)),),
    ),
    Case(
        "the last: not in the manifest",
        replace(WITHDRAWING_LAST, landed=(ONE.box,)),
        ChunkDropped(1),
        {"state": S.COPYING, "under_way": {}, "num_chunks": 1},
        (ReleaseChunks((1,)), EndWithdrawal((ONE.box,))),
    ),
    Case(
        "it cannot vouch, so nothing is sent again",
        WITHDRAWING_LAST,
        ChunkFailed(1, BROKEN, DOUBT),
        {"state": S.ENDED, "under_way": {}, "doubt": DOUBT},
        (ReleaseChunks((1,)), abort(BROKEN), unquiet(DOUBT)),
    ),
    Case(
        "others are called off already",
        WITHDRAWING,
        ChunkFailed(1, BROKEN),
        {"state": S.STOPPING, "under_way": {0: ONE}},
        (ReleaseChunks((1,)), abort(BROKEN), CancelCopies()),
    ),
    Case(
        "the transfer is given up",
        WITHDRAWING,
        Aborted(GIVEN_UP),
        {"state": S.STOPPING},
        (abort(GIVEN_UP), CancelCopies()),
    ),
    Case(
        "the answer ended here",
        WITHDRAWING,
        AnswerEnded(AUX),
        {"state": S.STOPPING},
        (aux(is_final=True), CancelCopies()),
    ),
    Case(
        "the target gave up",
        WITHDRAWING,
        settled(FAILED),
        {"state": S.STOPPING, "is_settled": True},
        (Conclude(FAILED), CancelCopies()),
    ),
    *ignored(RECORDS, EVENTS, S.WITHDRAWING, Withdrawn),
)
DRAINING_CASES = (
    Case(
        "to be sealed again",
        DRAINING,
        Withdrawn(),
        {"state": S.WITHDRAWING, "is_sealed": False},
        (CancelCopies(is_withdrawal=True),),
    ),
    Case(
        "copies are called off",
        DRAINING,
        Aborted(GIVEN_UP),
        {"state": S.STOPPING},
        (abort(GIVEN_UP), CancelCopies()),
    ),
    Case(
        "copies are called off",
        DRAINING,
        settled(FAILED),
        {"state": S.STOPPING, "is_settled": True},
        (Conclude(FAILED), CancelCopies()),
    ),
    Case(
        "others are under way",
        replace(DRAINING, num_bytes={0: {"k": 64}, 3: {"k": 8}}),
        COPIED,
        {"under_way": {0: ONE}, "num_bytes": SUMMED, "landed": (TWO.box,)},
        (ReleaseChunks((1,)), LANDED),
    ),
    Case(
        "the last: landed before commit",
        DRAINING_LAST,
        COPIED,
        {"state": S.COMMITTED, "under_way": {}, "num_bytes": SUMMED, "landed": (TWO.box,)},
        (ReleaseChunks((1,)), LANDED, commit(2, SUMMED)),
    ),
    Case(
        "others are called off",
        DRAINING,
        ChunkFailed(1, BROKEN),
        {"state": S.STOPPING, "under_way": {0: ONE}},
        (ReleaseChunks((1,)), abort(BROKEN), CancelCopies()),
    ),
    Case(
        "it was the last",
        DRAINING_LAST,
        ChunkFailed(1, BROKEN),
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), abort(BROKEN), quiet()),
    ),
)
COMMITTED_CASES = (
    Case(
        "everything was sent",
        replace(COMMITTED, landed=(ONE.box, TWO.box)),
        Withdrawn(),
        {},
        (EndWithdrawal((ONE.box, TWO.box), is_committed=True),),
    ),
    Case("the target is asked, and decides", COMMITTED, Aborted(GIVEN_UP), {}, (abort(GIVEN_UP),)),
    Case(
        "admitted",
        COMMITTED,
        settled(READY),
        {"state": S.ENDED, "is_settled": True},
        (Conclude(READY), Forget()),
    ),
    Case(
        "another rank failed",
        COMMITTED,
        settled(FAILED),
        {"state": S.ENDED, "is_settled": True},
        (Conclude(FAILED), Forget()),
    ),
)
STOPPING_CASES = (
    Case("never copied", STOPPING, CHUNKS[2], {}, (ReleaseChunks((2,)),)),
    Case("others are under way", STOPPING, COPIED, {"under_way": {0: ONE}}, (ReleaseChunks((1,)),)),
    Case(
        "the last, verdict to come",
        STOPPING_LAST,
        COPIED,
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), quiet()),
    ),
    Case(
        "the last, verdict heard",
        replace(STOPPING_LAST, is_settled=True),
        COPIED,
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), quiet(), Forget()),
    ),
    Case(
        "a doubt is kept",
        STOPPING,
        ChunkFailed(1, BROKEN, DOUBT),
        {"under_way": {0: ONE}, "doubt": DOUBT},
        (ReleaseChunks((1,)),),
    ),
    Case(
        "an earlier doubt stays",
        replace(STOPPING_LAST, doubt=DOUBT),
        ChunkFailed(1, BROKEN),
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), unquiet(DOUBT)),
    ),
    Case(
        "called off, as asked",
        STOPPING_LAST,
        ChunkFailed(1, BROKEN),
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), quiet()),
    ),
    Case("told", STOPPING, settled(FAILED), {"is_settled": True}, (Conclude(FAILED),)),
    Case("told once", replace(STOPPING, is_settled=True), settled(FINISHED), {}),
    Case(
        "dropped, as asked",
        STOPPING_LAST,
        ChunkDropped(1),
        {"state": S.ENDED, "under_way": {}},
        (ReleaseChunks((1,)), quiet()),
    ),
    Case("others are under way", STOPPING, ChunkDropped(1), {"under_way": {0: ONE}}, (ReleaseChunks((1,)),)),
    *ignored(RECORDS, EVENTS, S.STOPPING, Sealed, AnswerEnded, Aborted, Withdrawn),
)
ENDED_CASES = (
    Case("never copied", ENDED, TWO, {}, (ReleaseChunks((1,)),)),
    Case(
        "now nothing can come any more",
        ENDED,
        settled(FAILED),
        {"is_settled": True},
        (Conclude(FAILED), Forget()),
    ),
    Case("once is enough", replace(ENDED, is_settled=True), settled(FAILED)),
    *ignored(RECORDS, EVENTS, S.ENDED, Sealed, AnswerEnded, Aborted, Withdrawn, Grant),
)
SUITE = Suite(
    SOURCE_RANK,
    (
        *WAITING_CASES,
        *COPYING_CASES,
        *WITHDRAWING_CASES,
        *DRAINING_CASES,
        *COMMITTED_CASES,
        *STOPPING_CASES,
        *ENDED_CASES,
    ),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(SOURCE_RANK, case)


@pytest.mark.parametrize("key", SUITE.missing(), ids=name_of)
def test_missing_cell(key):
    check_missing(SUITE, key)


@pytest.mark.parametrize("event", [TWO, Sealed(None), AnswerEnded(AUX)])
@pytest.mark.parametrize("record", [SEALED_EARLY, DRAINING, COMMITTED])
def test_a_sealed_transfer_takes_nothing_more(record, event):
    """Misuse, whether or not the grant has come or the copies are done: the engine cannot know."""
    with pytest.raises(LocalProtocolError):
        SOURCE_RANK.step(record, event, 0.0)
