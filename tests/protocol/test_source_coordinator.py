"""Every cell of the table at the source's coordinator."""

from __future__ import annotations

import pytest
from tests.protocol.cells import NOW, Case, Suite, check, check_missing, gaps, ignored, name_of
from tests.protocol.values import (
    AUX,
    BROKEN,
    DIGEST,
    FAILED,
    FINISHED,
    GIVEN_UP,
    GONE,
    GRANT_ID,
    NUM_TOKENS,
    OTHER_ID,
    READY,
    TIMINGS,
    TRANSFER,
    deadlines,
    grant,
    settled,
)

from baton.protocol.machine import Forget, SessionLost, Ticked, replace
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Commit,
    Landed,
    Offer,
    OutcomeQuery,
    Queued,
    Quiet,
    Settled,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.source_coordinator import (
    SOURCE_COORDINATOR,
    GroupRequested,
    RankAborted,
    RetireGrant,
    SourceCoordinator,
    TargetAborted,
    TargetQueued,
    ToRank,
    ToSession,
    ToTarget,
)
from baton.protocol.source_coordinator import SourceCoordinatorState as S
from baton.protocol.timings import Deadlines

SOURCE = "prefill"
RANKS = frozenset({0, 1})
GROUPS = (RANKS, RANKS)
"""Both dp groups have these ranks, so that a group is told apart by its number alone."""


def offered(num_tokens: int, digest: bytes, source_dp: int) -> Offer:
    return Offer(transfer=TRANSFER, num_tokens=num_tokens, digest=digest, source_dp=source_dp)


def by(rank: int, offer: Offer) -> Offer:
    """An offer as a rank sends it."""
    return replace(offer, source_rank=rank)


def quiet(rank: int) -> Quiet:
    return Quiet(transfer=TRANSFER, grant=GRANT_ID, source_rank=rank)


def unquiet(rank: int, text: str) -> Unquiet:
    return Unquiet(transfer=TRANSFER, grant=GRANT_ID, source_rank=rank, text=text)


PREFILL = offered(NUM_TOKENS, DIGEST, 0)
OTHER_PROMPT = offered(NUM_TOKENS, b"\xd2" * 16, 0)
OTHER_GROUP = offered(NUM_TOKENS, DIGEST, 1)
GRANT = grant()
WAITS = deadlines(has_begun=False)
MOVED = replace(deadlines(), moved=NOW)
DOUBT = "bytes may be under way"
LATE = 95.0 + TIMINGS.progress_s
"""When records that last moved at 95 have made no progress for too long."""

EMPTY = SourceCoordinator(TRANSFER, SOURCE, GROUPS, WAITS)
ASKED = replace(EMPTY, askers=frozenset({7, 5}))
OPEN = replace(EMPTY, ranks=RANKS, joined=frozenset({0}), offer=PREFILL)
DECIDED = replace(OPEN, state=S.DECIDED, outcome=FAILED)
UNJOINED = replace(EMPTY, state=S.RUNNING, ranks=RANKS, grant=GRANT)
RUNNING = replace(OPEN, state=S.RUNNING, grant=GRANT, joined=RANKS, deadlines=deadlines())
HALF = replace(RUNNING, joined=frozenset({0}), committed=frozenset({0}))
"""One rank committed, the other never joined: all that have the grant are quiet."""
COMMITTED = replace(RUNNING, state=S.COMMITTED, committed=RANKS)
GIVING_UP = Failed(
    Cause(
        Why.DEADLINE,
        Stage.COMMIT,
        SOURCE,
        -1,
        f"no verdict: not done {TIMINGS.total_s:g} s after it began; raise total_s if it is only slow",
    )
)
TOO_LATE = 90.0 + TIMINGS.total_s
STOPPING = replace(RUNNING, state=S.STOPPING, outcome=FAILED)
STOPPING_LAST = replace(STOPPING, quiet=frozenset({0}))
ENDED = replace(STOPPING, state=S.ENDED, quiet=RANKS)

RECORD = AuxRecord(transfer=TRANSFER, grant=b"", aux=AUX)
FINAL = AuxRecord(transfer=TRANSFER, grant=b"", aux=AUX, is_final=True)
OFFERED = Offer(transfer=TRANSFER, num_tokens=NUM_TOKENS, digest=DIGEST, source_dp=0)
LANDED = Landed(transfer=TRANSFER, grant=GRANT_ID, source_rank=0, chunk=0, layers=(0, 2), tokens=(0, 8))
QUIET = ToTarget(Quiet(transfer=TRANSFER, grant=GRANT_ID))
OVER = (QUIET, RetireGrant(GRANT_ID, ""), Forget())
OVER_IN_DOUBT = (
    ToTarget(Unquiet(transfer=TRANSFER, grant=GRANT_ID, text=DOUBT)),
    RetireGrant(GRANT_ID, DOUBT),
    Forget(),
)


def cause(why: Why, stage: Stage, text: str, rank: int = -1) -> Cause:
    return Cause(why, stage, SOURCE, rank, text)


def abort(found: Cause, grant_id: bytes = GRANT_ID) -> Abort:
    return Abort(transfer=TRANSFER, grant=grant_id, cause=found)


def commit(rank: int) -> Commit:
    return Commit(transfer=TRANSFER, grant=GRANT_ID, source_rank=rank, num_chunks=1, num_bytes={0: {"k": 64}})


def verdict(outcome, *ranks: int, grant_id: bytes = GRANT_ID) -> tuple[ToRank, ...]:
    return tuple(ToRank(rank, settled(outcome, grant_id)) for rank in ranks)


def stamped(record: AuxRecord) -> ToTarget:
    return ToTarget(AuxRecord(transfer=TRANSFER, grant=GRANT_ID, aux=record.aux, is_final=record.is_final))


def described(offer: Offer) -> str:
    return f"{offer.num_tokens} tokens (digest {offer.digest.hex()}) in dp group {offer.source_dp}"


NO_GRANT = cause(
    Why.DEADLINE,
    Stage.OFFER,
    f"no grant: no progress for {TIMINGS.offer_s:g} s; raise offer_s if it is only slow",
)
TOO_LONG = cause(
    Why.DEADLINE,
    Stage.OFFER,
    f"no grant: not done {TIMINGS.total_s:g} s after it began; raise total_s if it is only slow",
)
STUCK = cause(
    Why.DEADLINE, Stage.COPY, f"no progress for {TIMINGS.progress_s:g} s; raise progress_s if it is only slow"
)
DIFFER = cause(
    Why.REFUSED_PROMPT,
    Stage.OFFER,
    f"rank 1 prefilled {described(OTHER_PROMPT)}, others {described(PREFILL)}",
    1,
)
WRONG_PROMPT = cause(
    Why.REFUSED_PROMPT,
    Stage.GRANT,
    f"granted for 8 tokens (digest {DIGEST.hex()}), prefilled 8 ({OTHER_PROMPT.digest.hex()})",
)
WRONG_GROUP = cause(Why.REFUSED_PROMPT, Stage.GRANT, "granted to dp group 0, prefilled by group 1")
LIVE = cause(
    Why.REFUSED_LIVE_ID,
    Stage.GRANT,
    f"transfer {TRANSFER} is live here under another grant; take a new id for each attempt",
)
SENT = cause(
    Why.REFUSED_LIVE_ID,
    Stage.OFFER,
    f"transfer {TRANSFER} was sent already; take a new id for each attempt",
    5,
)
SECOND = grant(OTHER_ID)
SECOND_REFUSED = (
    ToTarget(abort(LIVE, OTHER_ID)),
    ToTarget(Quiet(transfer=TRANSFER, grant=OTHER_ID)),
    RetireGrant(OTHER_ID, ""),
)

QUEUED = Queued(transfer=TRANSFER)
IN_QUEUE = replace(PREFILL, is_queued=True)
RENEWED = replace(WAITS, began=NOW, moved=NOW)
FULL = replace(OPEN, is_target_full=True)

RECORDS = {one.state: one for one in (OPEN, DECIDED, RUNNING, COMMITTED, STOPPING, ENDED)}
EVENTS = {
    type(event): event
    for event in (
        by(1, PREFILL),
        GroupRequested(7),
        GRANT,
        LANDED,
        commit(0),
        RECORD,
        RankAborted(BROKEN),
        quiet(1),
        unquiet(1, DOUBT),
        TargetQueued(),
        QUEUED,
        TargetAborted(GONE),
        settled(READY),
        SessionLost(GONE),
        Ticked(),
    )
}

OPEN_CASES = (
    Case(
        "the first rank answers those who asked",
        ASKED,
        by(0, PREFILL),
        {
            "ranks": RANKS,
            "joined": frozenset({0}),
            "offer": PREFILL,
            "askers": frozenset(),
            "deadlines": replace(WAITS, moved=NOW),
        },
        (ToSession(5, OFFERED), ToSession(7, OFFERED)),
    ),
    Case(
        "the second joins",
        OPEN,
        by(1, PREFILL),
        {"joined": RANKS, "deadlines": replace(WAITS, moved=NOW)},
    ),
    Case(
        "ranks prefilled different prompts",
        OPEN,
        by(1, OTHER_PROMPT),
        {
            "state": S.DECIDED,
            "joined": RANKS,
            "outcome": Failed(DIFFER),
            "deadlines": replace(WAITS, moved=NOW),
        },
        verdict(Failed(DIFFER), 0, 1, grant_id=b""),
    ),
    Case(
        "the answer ended, and the last rank agrees on its prompt",
        replace(OPEN, aux=FINAL, quiet=frozenset({0})),
        by(1, PREFILL),
        {
            "state": S.DECIDED,
            "joined": RANKS,
            "outcome": FINISHED,
            "deadlines": replace(WAITS, moved=NOW),
        },
        verdict(FINISHED, 0, 1, grant_id=b""),
    ),
    Case(
        "the answer ended, and was to another prompt than the last rank's",
        replace(OPEN, aux=FINAL, quiet=frozenset({0})),
        by(1, OTHER_PROMPT),
        {
            "state": S.DECIDED,
            "joined": RANKS,
            "outcome": Failed(DIFFER),
            "deadlines": replace(WAITS, moved=NOW),
        },
        verdict(Failed(DIFFER), 0, 1, grant_id=b""),
    ),
    Case(
        "a rank whose engine has it in the queue: the deadlines begin anew",
        EMPTY,
        by(0, IN_QUEUE),
        {"ranks": RANKS, "joined": frozenset({0}), "offer": IN_QUEUE, "deadlines": RENEWED},
    ),
    Case(
        "a rank joins when the engine is at work already",
        replace(OPEN, offer=IN_QUEUE),
        by(1, PREFILL),
        {"joined": RANKS, "deadlines": replace(WAITS, moved=NOW)},
    ),
    Case(
        "a rank that joins late hears that the target is full",
        FULL,
        by(1, PREFILL),
        {"joined": RANKS, "deadlines": replace(WAITS, moved=NOW)},
        (ToRank(1, QUEUED),),
    ),
    Case("the engine's queue moves", OPEN, QUEUED, {"deadlines": RENEWED}),
    Case(
        "the target has no room: ranks hear it",
        OPEN,
        TargetQueued(),
        {"deadlines": RENEWED, "is_target_full": True},
        (ToRank(0, QUEUED),),
    ),
    Case("its queue moves", FULL, TargetQueued(), {"deadlines": RENEWED}),
    Case(
        "the target that has it in its queue is lost",
        FULL,
        SessionLost(GONE),
        {"state": S.DECIDED, "outcome": Failed(GONE), "deadlines": replace(WAITS, moved=NOW)},
        verdict(Failed(GONE), 0, grant_id=b""),
    ),
    Case(
        "room for what is in this engine's queue: nothing has to move yet",
        replace(FULL, offer=IN_QUEUE),
        GRANT,
        {"state": S.RUNNING, "grant": GRANT, "is_target_full": False, "deadlines": RENEWED},
        (ToTarget(IN_QUEUE), ToRank(0, GRANT)),
    ),
    Case("the group is not known yet", EMPTY, GroupRequested(7), {"askers": frozenset({7})}),
    Case("the group is known", OPEN, GroupRequested(7), {}, (ToSession(7, OFFERED),)),
    Case(
        "before any rank",
        EMPTY,
        GRANT,
        {"state": S.RUNNING, "grant": GRANT, "ranks": RANKS, "deadlines": replace(WAITS, moved=NOW)},
    ),
    Case(
        "ranks get the grant, the target the offer and the aux record under its grant",
        replace(OPEN, aux=RECORD),
        GRANT,
        {"state": S.RUNNING, "grant": GRANT, "deadlines": MOVED},
        (ToTarget(OFFERED), ToRank(0, GRANT), stamped(RECORD)),
    ),
    Case(
        "an answer that ended waits for the other ranks",
        replace(OPEN, aux=FINAL, quiet=frozenset({0})),
        GRANT,
        {"state": S.RUNNING, "grant": GRANT, "deadlines": MOVED},
        (ToTarget(OFFERED), ToRank(0, GRANT)),
    ),
    Case(
        "for another prompt: no rank sees it",
        replace(OPEN, offer=OTHER_PROMPT),
        GRANT,
        {"state": S.STOPPING, "grant": GRANT, "outcome": Failed(WRONG_PROMPT), "deadlines": MOVED},
        (ToTarget(abort(WRONG_PROMPT)), *verdict(Failed(WRONG_PROMPT), 0)),
    ),
    Case(
        "the same, and who has joined is quiet",
        replace(OPEN, offer=OTHER_PROMPT, aux=FINAL, quiet=frozenset({0})),
        GRANT,
        {"state": S.ENDED, "grant": GRANT, "outcome": Failed(WRONG_PROMPT), "deadlines": MOVED},
        (ToTarget(abort(WRONG_PROMPT)), *verdict(Failed(WRONG_PROMPT), 0), *OVER),
    ),
    Case(
        "for another dp group: no rank sees it",
        replace(OPEN, offer=OTHER_GROUP),
        GRANT,
        {"state": S.STOPPING, "grant": GRANT, "outcome": Failed(WRONG_GROUP), "deadlines": MOVED},
        (ToTarget(abort(WRONG_GROUP)), *verdict(Failed(WRONG_GROUP), 0)),
    ),
    Case("kept for the grant", OPEN, RECORD, {"aux": RECORD}),
    Case("the answer ended; kept until all ranks have joined", OPEN, FINAL, {"aux": FINAL}),
    Case("whose answer ended is quiet", OPEN, quiet(0), {"quiet": frozenset({0})}),
    Case("or not sure", OPEN, unquiet(0, DOUBT), {"quiet": frozenset({0}), "doubt": DOUBT}),
    Case(
        "the answer ended; the time to ask for it starts now",
        replace(OPEN, joined=RANKS),
        FINAL,
        {"state": S.DECIDED, "aux": FINAL, "outcome": FINISHED, "deadlines": replace(WAITS, moved=NOW)},
        verdict(FINISHED, 0, 1, grant_id=b""),
    ),
    Case(
        "all ranks hear",
        replace(OPEN, joined=RANKS),
        RankAborted(BROKEN),
        {"state": S.DECIDED, "outcome": Failed(BROKEN), "deadlines": replace(WAITS, moved=NOW)},
        verdict(Failed(BROKEN), 0, 1, grant_id=b""),
    ),
    Case(
        "declined before any rank",
        ASKED,
        TargetAborted(GONE),
        {
            "state": S.DECIDED,
            "outcome": Failed(GONE),
            "askers": frozenset(),
            "deadlines": replace(WAITS, moved=NOW),
        },
        (ToSession(5, abort(GONE, b"")), ToSession(7, abort(GONE, b""))),
    ),
    Case("there is time", OPEN, Ticked(), now=95.0 + TIMINGS.offer_s - 0.1),
    Case(
        "nobody granted it",
        OPEN,
        Ticked(),
        {
            "state": S.DECIDED,
            "outcome": Failed(NO_GRANT),
            "deadlines": replace(WAITS, moved=95.0 + TIMINGS.offer_s),
        },
        verdict(Failed(NO_GRANT), 0, grant_id=b""),
        now=95.0 + TIMINGS.offer_s,
    ),
    Case(
        "ranks kept joining, and it took too long in all",
        replace(OPEN, deadlines=replace(WAITS, moved=389.0)),
        Ticked(),
        {
            "state": S.DECIDED,
            "outcome": Failed(TOO_LONG),
            "deadlines": replace(WAITS, moved=90.0 + TIMINGS.total_s),
        },
        verdict(Failed(TOO_LONG), 0, grant_id=b""),
        now=90.0 + TIMINGS.total_s,
    ),
)
DECIDED_CASES = (
    Case(
        "a late rank hears how it ended",
        DECIDED,
        by(1, PREFILL),
        {},
        verdict(FAILED, 1, grant_id=b""),
    ),
    Case("the target hears why not", DECIDED, GroupRequested(7), {}, (ToSession(7, abort(GIVEN_UP, b"")),)),
    Case(
        "the target grants, to hear the end of the answer",
        replace(DECIDED, outcome=FINISHED, aux=FINAL),
        GroupRequested(7),
        {},
        (ToSession(7, OFFERED),),
    ),
    Case(
        "quiet from the start",
        DECIDED,
        GRANT,
        {"state": S.ENDED, "grant": GRANT},
        (ToTarget(abort(GIVEN_UP)), *OVER),
    ),
    Case(
        "the answer ended",
        replace(DECIDED, outcome=FINISHED, aux=FINAL),
        GRANT,
        {"state": S.ENDED, "grant": GRANT},
        (stamped(FINAL), *OVER),
    ),
    Case(
        "the answer ended, but to another prompt",
        replace(DECIDED, outcome=FINISHED, aux=FINAL, offer=OTHER_PROMPT),
        GRANT,
        {"state": S.ENDED, "grant": GRANT},
        (ToTarget(abort(WRONG_PROMPT)), *OVER),
    ),
    Case("kept for a target that is late", DECIDED, Ticked(), now=95.0 + TIMINGS.linger_s - 0.1),
    Case(
        "nobody asked",
        DECIDED,
        Ticked(),
        {"state": S.ENDED},
        (Forget(),),
        now=95.0 + TIMINGS.linger_s,
    ),
    *ignored(
        RECORDS,
        EVENTS,
        S.DECIDED,
        AuxRecord,
        RankAborted,
        Quiet,
        Unquiet,
        Queued,
        TargetQueued,
        TargetAborted,
        SessionLost,
    ),
)
RUNNING_CASES = (
    Case(
        "the first rank: both hear",
        replace(UNJOINED, askers=frozenset({5})),
        by(0, PREFILL),
        {
            "joined": frozenset({0}),
            "offer": PREFILL,
            "askers": frozenset(),
            "deadlines": replace(WAITS, moved=NOW, has_begun=True),
        },
        (ToTarget(OFFERED), ToSession(5, OFFERED), ToRank(0, GRANT)),
    ),
    Case(
        "a later rank gets the grant",
        replace(RUNNING, joined=frozenset({0})),
        by(1, PREFILL),
        {"joined": RANKS, "deadlines": MOVED},
        (ToRank(1, GRANT),),
    ),
    Case(
        "the answer ended, and the last rank agrees on its prompt: it never sees the grant",
        replace(RUNNING, joined=frozenset({0}), aux=FINAL, quiet=frozenset({0})),
        by(1, PREFILL),
        {"state": S.STOPPING, "joined": RANKS, "outcome": FINISHED, "deadlines": MOVED},
        (stamped(FINAL), *verdict(FINISHED, 0, 1)),
    ),
    Case(
        "the same, and nothing moves",
        replace(HALF, aux=FINAL, quiet=frozenset({1})),
        by(1, PREFILL),
        {"state": S.ENDED, "joined": RANKS, "outcome": FINISHED, "deadlines": MOVED},
        (stamped(FINAL), *verdict(FINISHED, 0, 1), *OVER),
    ),
    Case(
        "ranks prefilled different prompts",
        replace(RUNNING, joined=frozenset({0})),
        by(1, OTHER_PROMPT),
        {"state": S.STOPPING, "joined": RANKS, "outcome": Failed(DIFFER)},
        (ToTarget(abort(DIFFER)), *verdict(Failed(DIFFER), 0, 1)),
    ),
    Case(
        "the grant is for another prompt: the rank never sees it",
        UNJOINED,
        by(0, OTHER_PROMPT),
        {
            "state": S.STOPPING,
            "joined": frozenset({0}),
            "offer": OTHER_PROMPT,
            "outcome": Failed(WRONG_PROMPT),
            "deadlines": replace(WAITS, moved=NOW, has_begun=True),
        },
        (ToTarget(abort(WRONG_PROMPT)), *verdict(Failed(WRONG_PROMPT), 0)),
    ),
    Case(
        "the first chunk: from here on it has to move",
        replace(RUNNING, deadlines=WAITS),
        LANDED,
        {"deadlines": replace(WAITS, moved=NOW, has_begun=True)},
        (ToTarget(LANDED),),
    ),
    Case(
        "granted, and still in the queue: the target hears that it moves",
        replace(RUNNING, deadlines=WAITS),
        QUEUED,
        {"deadlines": RENEWED},
        (ToTarget(QUEUED),),
    ),
    Case("known", RUNNING, GroupRequested(7), {}, (ToSession(7, OFFERED),)),
    *ignored(RECORDS, EVENTS, S.RUNNING, TargetQueued),
    Case("not known yet", UNJOINED, GroupRequested(7), {"askers": frozenset({7})}),
    Case("the same again", RUNNING, GRANT),
    Case("a second one is refused, and quiet", RUNNING, SECOND, {}, SECOND_REFUSED),
    Case("passed on", RUNNING, LANDED, {"deadlines": MOVED}, (ToTarget(LANDED),)),
    Case(
        "one of two",
        RUNNING,
        commit(0),
        {"committed": frozenset({0}), "deadlines": MOVED},
        (ToTarget(commit(0)),),
    ),
    Case(
        "the last",
        replace(RUNNING, committed=frozenset({0})),
        commit(1),
        {"state": S.COMMITTED, "committed": RANKS, "deadlines": MOVED},
        (ToTarget(commit(1)),),
    ),
    Case(
        "all that joined, but not all",
        replace(RUNNING, joined=frozenset({0})),
        commit(0),
        {"committed": frozenset({0}), "deadlines": MOVED},
        (ToTarget(commit(0)),),
    ),
    Case(
        "passed on",
        RUNNING,
        RECORD,
        {"aux": RECORD, "deadlines": MOVED},
        (stamped(RECORD),),
    ),
    Case(
        "the answer ended: ranks stop",
        RUNNING,
        FINAL,
        {"state": S.STOPPING, "aux": FINAL, "outcome": FINISHED, "deadlines": MOVED},
        (stamped(FINAL), *verdict(FINISHED, 0, 1)),
    ),
    Case(
        "the answer ended, and nothing moves",
        replace(RUNNING, committed=frozenset({0}), quiet=frozenset({1})),
        FINAL,
        {"state": S.ENDED, "aux": FINAL, "outcome": FINISHED, "deadlines": MOVED},
        (stamped(FINAL), *verdict(FINISHED, 0, 1), *OVER),
    ),
    Case(
        "the answer ended; kept until all ranks have joined",
        HALF,
        FINAL,
        {"aux": FINAL, "deadlines": MOVED},
    ),
    Case("whose answer ended is quiet", RUNNING, quiet(0), {"quiet": frozenset({0})}),
    Case("or not sure", RUNNING, unquiet(0, DOUBT), {"quiet": frozenset({0}), "doubt": DOUBT}),
    Case(
        "one stops all",
        RUNNING,
        RankAborted(BROKEN),
        {"state": S.STOPPING, "outcome": Failed(BROKEN)},
        (ToTarget(abort(BROKEN)), *verdict(Failed(BROKEN), 0, 1)),
    ),
    Case(
        "given up after it committed",
        HALF,
        RankAborted(GIVEN_UP),
        {"state": S.ENDED, "outcome": FAILED},
        (ToTarget(abort(GIVEN_UP)), *verdict(FAILED, 0), *OVER),
    ),
    Case(
        "ranks stop",
        RUNNING,
        TargetAborted(GONE),
        {"state": S.STOPPING, "outcome": Failed(GONE)},
        verdict(Failed(GONE), 0, 1),
    ),
    Case(
        "no rank has the grant",
        UNJOINED,
        TargetAborted(GONE),
        {"state": S.ENDED, "outcome": Failed(GONE)},
        OVER,
    ),
    Case(
        "the target needs no more",
        RUNNING,
        settled(READY),
        {"state": S.STOPPING, "outcome": READY},
        verdict(READY, 0, 1),
    ),
    Case(
        "who joined is done",
        HALF,
        settled(READY),
        {"state": S.ENDED, "outcome": READY},
        (*verdict(READY, 0), *OVER),
    ),
    Case(
        "ranks stop",
        RUNNING,
        SessionLost(GONE),
        {"state": S.STOPPING, "outcome": Failed(GONE)},
        verdict(Failed(GONE), 0, 1),
    ),
    Case(
        "no rank has the grant",
        UNJOINED,
        SessionLost(GONE),
        {"state": S.ENDED, "outcome": Failed(GONE)},
        OVER,
    ),
    Case("there is time", RUNNING, Ticked(), now=LATE - 0.1),
    Case("more of it while no rank has spoken", UNJOINED, Ticked(), now=LATE),
    Case(
        "no progress",
        RUNNING,
        Ticked(),
        {"state": S.STOPPING, "outcome": Failed(STUCK)},
        (ToTarget(abort(STUCK)), *verdict(Failed(STUCK), 0, 1)),
        now=LATE,
    ),
    Case(
        "a rank never joined",
        HALF,
        Ticked(),
        {"state": S.ENDED, "outcome": Failed(STUCK)},
        (ToTarget(abort(STUCK)), *verdict(Failed(STUCK), 0), *OVER),
        now=LATE,
    ),
)
COMMITTED_CASES = (
    Case("a rank of another attempt", COMMITTED, by(5, PREFILL), {}, verdict(Failed(SENT), 5)),
    Case("known", COMMITTED, GroupRequested(7), {}, (ToSession(7, OFFERED),)),
    *ignored(RECORDS, EVENTS, S.COMMITTED, Queued, TargetQueued),
    Case("the same again", COMMITTED, GRANT),
    Case("a second one is refused, and quiet", COMMITTED, SECOND, {}, SECOND_REFUSED),
    Case(
        "the target is asked, and decides",
        COMMITTED,
        RankAborted(GIVEN_UP),
        {},
        (ToTarget(abort(GIVEN_UP)),),
    ),
    Case(
        "the target failed",
        COMMITTED,
        TargetAborted(GONE),
        {"state": S.ENDED, "outcome": Failed(GONE)},
        (QUIET, *verdict(Failed(GONE), 0, 1), RetireGrant(GRANT_ID, ""), Forget()),
    ),
    Case(
        "admitted",
        COMMITTED,
        settled(READY),
        {"state": S.ENDED, "outcome": READY},
        (QUIET, *verdict(READY, 0, 1), RetireGrant(GRANT_ID, ""), Forget()),
    ),
    Case(
        "admitted after all",
        replace(COMMITTED, outcome=GIVING_UP),
        settled(READY),
        {"state": S.ENDED, "outcome": READY},
        (QUIET, *verdict(READY, 0, 1), RetireGrant(GRANT_ID, ""), Forget()),
    ),
    Case(
        "whether it was admitted will never be known here",
        COMMITTED,
        SessionLost(GONE),
        {"state": S.ENDED, "outcome": Failed(GONE)},
        (QUIET, *verdict(Failed(GONE), 0, 1), RetireGrant(GRANT_ID, ""), Forget()),
    ),
    Case("there is time", COMMITTED, Ticked(), now=95.0 + TIMINGS.ask_again_s_max - 0.1),
    Case(
        "asked again",
        COMMITTED,
        Ticked(),
        {"deadlines": replace(deadlines(), asked=95.0 + TIMINGS.ask_again_s_max)},
        (ToTarget(OutcomeQuery(grant=GRANT_ID)),),
        now=95.0 + TIMINGS.ask_again_s_max,
    ),
    Case(
        "not too often",
        replace(COMMITTED, deadlines=replace(deadlines(), asked=99.0)),
        Ticked(),
        now=102.9,
    ),
    Case(
        "the target may be unpacking: it watches that itself",
        replace(COMMITTED, deadlines=replace(deadlines(), asked=LATE)),
        Ticked(),
        now=LATE + 3.9,
    ),
    Case(
        "too late: the target is asked to give up, and decides",
        COMMITTED,
        Ticked(),
        {"outcome": GIVING_UP, "deadlines": replace(deadlines(), moved=TOO_LATE)},
        (ToTarget(abort(GIVING_UP.cause)),),
        now=TOO_LATE,
    ),
    Case(
        "it has a moment to answer",
        replace(COMMITTED, outcome=GIVING_UP, deadlines=replace(deadlines(), moved=TOO_LATE)),
        Ticked(),
        now=TOO_LATE + TIMINGS.silence_s - 0.1,
    ),
    Case(
        "it did not",
        replace(COMMITTED, outcome=GIVING_UP, deadlines=replace(deadlines(), moved=TOO_LATE)),
        Ticked(),
        {"state": S.ENDED},
        (QUIET, *verdict(GIVING_UP, 0, 1), RetireGrant(GRANT_ID, ""), Forget()),
        now=TOO_LATE + TIMINGS.silence_s,
    ),
)
STOPPING_CASES = (
    Case(
        "a late rank hears, and never sees the grant",
        replace(STOPPING, joined=frozenset({0})),
        by(1, PREFILL),
        {},
        verdict(FAILED, 1),
    ),
    Case(
        "another attempt hears why not",
        STOPPING,
        GroupRequested(7),
        {},
        (ToSession(7, abort(GIVEN_UP, b"")),),
    ),
    Case("nothing is known to offer", replace(STOPPING, outcome=FINISHED, offer=None), GroupRequested(7)),
    Case("the same again", STOPPING, GRANT),
    Case("a second one is refused, and quiet", STOPPING, SECOND, {}, SECOND_REFUSED),
    Case(
        "it committed before it heard: it is quiet",
        STOPPING,
        commit(0),
        {"committed": frozenset({0})},
    ),
    Case(
        "so all are",
        STOPPING_LAST,
        commit(1),
        {"state": S.ENDED, "committed": frozenset({1})},
        OVER,
    ),
    Case("one of two", STOPPING, quiet(0), {"quiet": frozenset({0})}),
    Case("the last", STOPPING_LAST, quiet(1), {"state": S.ENDED, "quiet": RANKS}, OVER),
    Case(
        "the last is not sure",
        STOPPING_LAST,
        unquiet(1, DOUBT),
        {"state": S.ENDED, "quiet": RANKS, "doubt": DOUBT},
        OVER_IN_DOUBT,
    ),
    Case(
        "one that cannot vouch",
        STOPPING,
        unquiet(0, DOUBT),
        {"quiet": frozenset({0}), "doubt": DOUBT},
    ),
    Case(
        "one cannot vouch, so all cannot",
        replace(STOPPING_LAST, doubt=DOUBT),
        quiet(1),
        {"state": S.ENDED, "quiet": RANKS},
        OVER_IN_DOUBT,
    ),
    *ignored(
        RECORDS,
        EVENTS,
        S.STOPPING,
        Landed,
        AuxRecord,
        RankAborted,
        Queued,
        TargetQueued,
        TargetAborted,
        Settled,
        SessionLost,
        Ticked,
    ),
)
SUITE = Suite(
    SOURCE_COORDINATOR,
    (*OPEN_CASES, *DECIDED_CASES, *RUNNING_CASES, *COMMITTED_CASES, *STOPPING_CASES),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(SOURCE_COORDINATOR, case)


@pytest.mark.parametrize("key", SUITE.missing(), ids=name_of)
def test_missing_cell(key):
    check_missing(SUITE, key)


def test_a_forgotten_transfer_has_no_cells():
    """`Forget` comes with every way into the last state: what is late finds no record, not this one."""
    assert [key for key in SOURCE_COORDINATOR.cells if key[0] is S.ENDED] == []
    assert all(Forget() in case.effects for case in SUITE.cases if case.changes.get("state") is S.ENDED)


def test_the_two_deadlines():
    waits = Deadlines(TIMINGS, began=0.0, moved=10.0)
    moves = replace(waits, has_begun=True)
    for one, patience_s in ((waits, TIMINGS.offer_s), (moves, TIMINGS.progress_s)):
        assert one.passed(10.0 + patience_s - 0.01) == ""
        assert "no progress" in one.passed(10.0 + patience_s)
        assert one.passed_in_all(10.0 + patience_s) == ""
    dripping = replace(moves, moved=TIMINGS.total_s - 1)
    assert dripping.passed(TIMINGS.total_s - 0.01) == ""
    assert dripping.passed_in_all(TIMINGS.total_s - 0.01) == ""
    assert "after it began" in dripping.passed(TIMINGS.total_s)
    assert dripping.passed_in_all(TIMINGS.total_s) == dripping.passed(TIMINGS.total_s)
