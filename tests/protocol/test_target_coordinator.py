"""Every cell of the table at the target's coordinator."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from tests.protocol.cells import NOW, Case, Suite, check, check_missing, gaps, ignored, name_of
from tests.protocol.values import (
    AUX,
    DIGEST,
    FAILED,
    FINISHED,
    GIVEN_UP,
    GONE,
    GRANT_ID,
    NUM_TOKENS,
    READY,
    TIMINGS,
    TRANSFER,
    deadlines,
    grant,
    settled,
)

from baton.protocol.ledger import Ledger, Need, Rectangle
from baton.protocol.machine import Conclude, SessionLost, Ticked, replace
from baton.protocol.messages import (
    Abort,
    AuxRecord,
    Closed,
    Commit,
    Landed,
    Lane,
    Offer,
    Opened,
    OutcomeQuery,
    Queued,
    Quiet,
    QuietQuery,
    Receive,
    Unpacked,
    Unquiet,
)
from baton.protocol.outcomes import Cause, Failed, Stage, Why
from baton.protocol.target_coordinator import (
    TARGET_COORDINATOR,
    Account,
    CallerAborted,
    CloseRanks,
    Closing,
    GrantTerms,
    OpenRanks,
    Prepared,
    Release,
    SourceAborted,
    TargetCoordinator,
    ToCallers,
    ToSource,
    UnpackAt,
)
from baton.protocol.target_coordinator import TargetCoordinatorState as S

TARGET = "decode"
RANKS = frozenset({0, 1})
SOURCES = frozenset({0, 1})
LANES = (Lane(0, 0, 3), Lane(0, 1, 4, "pack", 0, 512))
GRANT = grant(lanes=LANES)
LEASED = Lane(0, 1, 4, "pack", 4096, 512)
LEASED_GRANT = msgspec.structs.replace(GRANT, lanes=(LANES[0], LEASED))
TERMS = GrantTerms(
    sources=SOURCES,
    expected={(0, 0): {"k": 64}, (0, 1): {"k": 32}},
    unpacked=frozenset({(0, 1)}),
    targets={0: (0, 1), 1: ()},
)
"""Source rank 0 sends to both target ranks, to the second through staging; source rank 1 has nothing."""
UNSTAGED = replace(TERMS, unpacked=frozenset())
NEEDS = {(0, 0): (Need((0, 2), 0),), (0, 1): (Need((0, 2), 4),)}
LEDGER = Ledger.empty(NUM_TOKENS, NEEDS)
WAITS = deadlines(has_begun=False)
MOVED = replace(deadlines(), moved=NOW)
LATE = 95.0 + TIMINGS.progress_s
HEAD, TAIL = Rectangle((0, 2), (0, 4)), Rectangle((0, 2), (4, 8))


QUIET = Quiet(transfer=TRANSFER, grant=GRANT_ID)
UNQUIET = Unquiet(transfer=TRANSFER, grant=GRANT_ID, text="bytes may be under way")
QUERY = OutcomeQuery(grant=GRANT_ID)


def opened(rank: int, lanes: tuple[Lane, ...] = (), cause: Cause | None = None) -> Opened:
    return Opened(grant=GRANT_ID, rank=rank, lanes=lanes, cause=cause)


def asked(*ranks: int, **fields: object) -> Receive:
    values: dict[str, object] = {
        "source": "prefill",
        "num_tokens": NUM_TOKENS,
        "digest": DIGEST,
        "held": {},
        "tables": {rank: {"kv": bytes(4)} for rank in ranks},
    }
    return Receive(transfer=TRANSFER, **{**values, **fields})  # type: ignore[arg-type]


def offered(num_tokens: int, digest: bytes) -> Offer:
    return Offer(transfer=TRANSFER, num_tokens=num_tokens, digest=digest, source_dp=0)


def unpacked(rank: int, source_rank: int, chunk: int, cause: Cause | None = None) -> Unpacked:
    return Unpacked(grant=GRANT_ID, rank=rank, source_rank=source_rank, chunk=chunk, cause=cause)


def aux(*, is_final: bool) -> AuxRecord:
    return AuxRecord(transfer=TRANSFER, grant=GRANT_ID, aux=AUX, is_final=is_final)


def closed(rank: int, *, is_quiet: bool) -> Closed:
    return Closed(grant=GRANT_ID, rank=rank, is_quiet=is_quiet)


def landed(chunk: int, box: Rectangle, source: int = 0, staged: dict[int, int] | None = None) -> Landed:
    return Landed(
        transfer=TRANSFER,
        grant=GRANT_ID,
        source_rank=source,
        chunk=chunk,
        layers=box.layers,
        tokens=box.tokens,
        staged=staged or {},
    )


def commit(source: int, num_chunks: int, num_bytes: dict[int, dict[str, int]]) -> Commit:
    return Commit(
        transfer=TRANSFER, grant=GRANT_ID, source_rank=source, num_chunks=num_chunks, num_bytes=num_bytes
    )


def cause(why: Why, stage: Stage, text: str, rank: int = -1) -> Cause:
    return Cause(why, stage, TARGET, rank, text)


def differs(text: str) -> Cause:
    advice = "give every rank of the group the same request"
    return cause(Why.REFUSED_PROMPT, Stage.GRANT, f"rank 1 asks for {text}; {advice}", 1)


def corrupted(text: str) -> Cause:
    return cause(Why.CORRUPTED, Stage.COMMIT, text)


def abort(found: Cause, grant_id: bytes = GRANT_ID) -> ToSource:
    return ToSource(Abort(transfer=TRANSFER, grant=grant_id, cause=found))


def waiting_for_quiet(since: float = NOW, **fields: object) -> Closing:
    return replace(Closing(interval_s=1.0, ask_at=since + 1.0), **fields)


COMMITS = {0: commit(0, 2, {0: {"k": 64}, 1: {"k": 32}}), 1: commit(1, 0, {})}
HEAD_LANDED = landed(0, HEAD)
TAIL_LANDED = landed(1, TAIL, staged={1: 128})
WITH_HEAD = LEDGER.entered((0, 0), HEAD).entered((0, 1), HEAD)
WITH_TAIL = WITH_HEAD.entered((0, 0), TAIL)
FULL = WITH_TAIL.entered((0, 1), TAIL)
ALMOST = Account(FULL, {(0, 0): HEAD, (0, 1): TAIL}, frozenset(), COMMITS)
UNPACKING = Account(WITH_TAIL, {(0, 0): HEAD, (0, 1): TAIL}, frozenset({(0, 1, 1)}), COMMITS, AUX)

PREPARING = TargetCoordinator(asked(0), TARGET, RANKS, WAITS)
OPENING = replace(PREPARING, state=S.OPENING, grant=GRANT, terms=TERMS, account=Account(LEDGER))
GRANTED = replace(OPENING, state=S.GRANTED, opened=RANKS, deadlines=deadlines())
DONE = replace(GRANTED, state=S.READY, account=replace(ALMOST, aux=AUX), outcome=READY)
DONE = replace(DONE, closing=Closing(is_quiet=True, is_asked=True))
QUARANTINED = replace(GRANTED, state=S.QUARANTINED, outcome=FAILED, closing=waiting_for_quiet(99.0))
CLOSING = replace(QUARANTINED, closing=replace(QUARANTINED.closing, is_quiet=True, is_asked=True))
PROVING = replace(QUARANTINED, closing=replace(QUARANTINED.closing, must_prove_quiet=True, is_asked=True))
RELEASED = replace(CLOSING, state=S.RELEASED)

ADMITTED = (Conclude(READY), Release(), ToSource(settled(READY)), CloseRanks((0, 1), must_prove_quiet=False))
ADMIT = {"state": S.READY, "outcome": READY, "closing": Closing(is_quiet=True, is_asked=True)}
OTHER_DIGEST = b"\xd2" * 16
WRONG_PROMPT = cause(
    Why.REFUSED_PROMPT,
    Stage.OFFER,
    f"granted for 8 tokens (digest {DIGEST.hex()}), offered 8 ({OTHER_DIGEST.hex()})",
)
STRANGER = cause(
    Why.REFUSED_LAYOUT,
    Stage.GRANT,
    "pages of ranks [2], but ranks [0, 1] receive this transfer; ask on the ranks of one dp group",
    1,
)
UNGRANTED = cause(
    Why.DEADLINE, Stage.GRANT, f"no progress for {TIMINGS.offer_s:g} s; raise offer_s if it is only slow"
)
STUCK = cause(
    Why.DEADLINE, Stage.COPY, f"no progress for {TIMINGS.progress_s:g} s; raise progress_s if it is only slow"
)
REFUSED = Cause(Why.OUT_OF_PAGES, Stage.GRANT, TARGET, 1, "no room in staging")

RECORDS = {one.state: one for one in (PREPARING, OPENING, GRANTED, DONE, QUARANTINED, RELEASED)}
QUEUED = Queued(transfer=TRANSFER)
RENEWED = replace(WAITS, began=NOW, moved=NOW)
EVENTS = {
    type(event): event
    for event in (
        asked(1),
        Prepared(GRANT, TERMS, LEDGER),
        opened(0, ()),
        opened(1, cause=REFUSED),
        offered(NUM_TOKENS, DIGEST),
        QUEUED,
        HEAD_LANDED,
        unpacked(1, 0, 1),
        COMMITS[0],
        aux(is_final=False),
        SourceAborted(GIVEN_UP),
        QUIET,
        UNQUIET,
        CallerAborted(GIVEN_UP),
        SessionLost(GONE),
        closed(0, is_quiet=True),
        QUERY,
        Ticked(),
    )
}


def dropped(found: Cause, *told: object) -> tuple[dict[str, object], tuple[object, ...]]:
    """Nobody was let in: everything is given back at once."""
    outcome = Failed(found)
    return {"state": S.RELEASED, "outcome": outcome}, (*told, Conclude(outcome), Release())


def failed(found: Cause, *told: object, now: float = NOW) -> tuple[dict[str, object], tuple[object, ...]]:
    """Writers may be at work: concluded at once, released later."""
    outcome = Failed(found)
    changes = {"state": S.QUARANTINED, "outcome": outcome, "closing": waiting_for_quiet(now)}
    return changes, (*told, Conclude(outcome))


def unopened(
    found: Cause, *told: object, now: float = NOW, **closing: object
) -> tuple[dict[str, object], tuple[object, ...]]:
    """The grant was not sent: ranks only undo what they opened."""
    outcome = Failed(found)
    found_closing = waiting_for_quiet(now, is_quiet=True, is_asked=True, **closing)
    changes = {"state": S.QUARANTINED, "outcome": outcome, "closing": found_closing}
    return changes, (*told, Conclude(outcome), CloseRanks((0, 1), must_prove_quiet=False))


def drops(about: str, event: Receive, found: Cause) -> Case:
    """A rank that disagrees with its group: the source gets the reason at once."""
    return Case(about, PREPARING, event, *dropped(found, abort(found, b"")))


JOINING_CASES = (
    Case("another rank asks for the same", PREPARING, asked(1)),
    drops(
        "another rank asks for another prompt",
        asked(1, digest=OTHER_DIGEST),
        differs(f"digest {OTHER_DIGEST.hex()} (others: {DIGEST.hex()})"),
    ),
    drops(
        "another rank asks for a longer prompt",
        asked(1, num_tokens=9, digest=OTHER_DIGEST),
        differs(f"tokens 9 (others: 8), digest {OTHER_DIGEST.hex()} (others: {DIGEST.hex()})"),
    ),
    drops(
        "another rank asks another source",
        asked(1, source="prefill-2"),
        differs("source prefill-2 (others: prefill)"),
    ),
    drops(
        "another rank holds another prefix",
        asked(1, held={"kv": 4}),
        differs("held {'kv': 4} (others: {})"),
    ),
    drops("another rank asks for ranks of another group", asked(1, 2), STRANGER),
)
PREPARING_CASES = (
    *JOINING_CASES,
    Case(
        "ranks are to open",
        PREPARING,
        Prepared(GRANT, TERMS, LEDGER),
        {
            "state": S.OPENING,
            "grant": GRANT,
            "terms": TERMS,
            "account": Account(LEDGER),
            "deadlines": replace(WAITS, moved=NOW),
        },
        (OpenRanks(GRANT),),
    ),
    Case(
        "the grant goes ahead, and the ranks are to open",
        PREPARING,
        Prepared(GRANT, UNSTAGED, LEDGER, is_ahead=True),
        {
            "state": S.GRANTED,
            "is_ahead": True,
            "grant": GRANT,
            "terms": UNSTAGED,
            "account": Account(LEDGER),
            "deadlines": replace(WAITS, moved=NOW),
        },
        (ToSource(GRANT), OpenRanks(GRANT)),
    ),
    Case("the source's queue moves", PREPARING, QUEUED, {"deadlines": RENEWED}),
    Case("the source has it", PREPARING, offered(NUM_TOKENS, DIGEST), {"deadlines": MOVED}),
    Case(
        "another prompt",
        PREPARING,
        offered(NUM_TOKENS, OTHER_DIGEST),
        *dropped(WRONG_PROMPT, abort(WRONG_PROMPT, b"")),
    ),
    Case("the source failed", PREPARING, SourceAborted(GIVEN_UP), *dropped(GIVEN_UP)),
    Case("the source hears", PREPARING, CallerAborted(GIVEN_UP), *dropped(GIVEN_UP, abort(GIVEN_UP, b""))),
    Case("never reached", PREPARING, SessionLost(GONE), *dropped(GONE)),
    Case("there is time", PREPARING, Ticked(), now=95.0 + TIMINGS.offer_s - 0.1),
    Case(
        "there is none left",
        PREPARING,
        Ticked(),
        *dropped(UNGRANTED, abort(UNGRANTED, b"")),
        now=95.0 + TIMINGS.offer_s,
    ),
)
OPENING_CASES = (
    Case("one of two", OPENING, opened(0, ()), {"opened": frozenset({0})}),
    Case(
        "the last: the grant goes out with the staging that was leased",
        replace(OPENING, opened=frozenset({0})),
        opened(1, (LEASED,)),
        {
            "state": S.GRANTED,
            "opened": RANKS,
            "grant": LEASED_GRANT,
            "deadlines": replace(WAITS, moved=NOW),
        },
        (ToSource(LEASED_GRANT),),
    ),
    Case("a rank cannot open", OPENING, opened(1, cause=REFUSED), *unopened(REFUSED, abort(REFUSED, b""))),
    Case("the source's queue moves", replace(OPENING, deadlines=WAITS), QUEUED, {"deadlines": RENEWED}),
    Case("the source has it", OPENING, offered(NUM_TOKENS, DIGEST), {"deadlines": MOVED}),
    Case(
        "another prompt",
        OPENING,
        offered(NUM_TOKENS + 1, DIGEST),
        *unopened(
            found := cause(
                Why.REFUSED_PROMPT,
                Stage.OFFER,
                f"granted for 8 tokens (digest {DIGEST.hex()}), offered 9 ({DIGEST.hex()})",
            ),
            abort(found, b""),
        ),
    ),
    Case("the source failed", OPENING, SourceAborted(GIVEN_UP), *unopened(GIVEN_UP)),
    Case("the source hears", OPENING, CallerAborted(GIVEN_UP), *unopened(GIVEN_UP, abort(GIVEN_UP, b""))),
    Case("nobody to be still", OPENING, SessionLost(GONE), *unopened(GONE, must_prove_quiet=True)),
    Case("there is time", OPENING, Ticked(), now=95.0 + TIMINGS.offer_s - 0.1),
    Case(
        "there is none left",
        OPENING,
        Ticked(),
        *unopened(UNGRANTED, abort(UNGRANTED, b""), now=95.0 + TIMINGS.offer_s),
        now=95.0 + TIMINGS.offer_s,
    ),
)


def with_account(account: Account, **fields: object) -> TargetCoordinator:
    return replace(GRANTED, account=replace(account, **fields))


def entered(account: Account, **fields: object) -> dict[str, object]:
    return {"account": replace(account, **fields), "deadlines": MOVED}


def rejected(text: str) -> tuple[dict[str, object], tuple[object, ...]]:
    return failed(corrupted(text), abort(corrupted(text)))


ONE_HEAD = Account(WITH_HEAD, {(0, 0): HEAD})
LANDED_CASES = (
    Case(
        "entered for both pairs",
        GRANTED,
        HEAD_LANDED,
        {"account": ONE_HEAD, "deadlines": MOVED},
    ),
    Case(
        "where it is staged it counts after the unpack",
        with_account(ONE_HEAD),
        TAIL_LANDED,
        entered(
            ONE_HEAD,
            chunks={(0, 0): HEAD, (0, 1): TAIL},
            ledger=WITH_TAIL,
            unpacking=frozenset({(0, 1, 1)}),
        ),
        (UnpackAt(1, TAIL_LANDED),),
    ),
    Case(
        "a checksum makes work too",
        with_account(ONE_HEAD),
        found := msgspec.structs.replace(landed(1, TAIL), checksums={1: {"k": b"\x00" * 8}}),
        entered(
            ONE_HEAD,
            chunks={(0, 0): HEAD, (0, 1): TAIL},
            ledger=WITH_TAIL,
            unpacking=frozenset({(0, 1, 1)}),
        ),
        (UnpackAt(1, found),),
    ),
    Case("said twice", with_account(ONE_HEAD), HEAD_LANDED),
    Case(
        "from a rank that sends nothing",
        with_account(ONE_HEAD),
        landed(0, HEAD, source=1),
        entered(ONE_HEAD, chunks={(0, 0): HEAD, (1, 0): HEAD}),
    ),
    Case(
        "the last, after the commit that it was overtaken by",
        replace(with_account(ALMOST, ledger=WITH_HEAD, chunks={(0, 0): HEAD}, aux=AUX), terms=UNSTAGED),
        landed(1, TAIL),
        {**ADMIT, **entered(ALMOST, aux=AUX)},
        ADMITTED,
    ),
    Case(
        "through staging, although the source does not say so: the rank will look",
        with_account(ONE_HEAD),
        landed(1, TAIL),
        entered(
            ONE_HEAD,
            ledger=WITH_HEAD.entered((0, 0), TAIL),
            chunks={(0, 0): HEAD, (0, 1): TAIL},
            unpacking=frozenset({(0, 1, 1)}),
        ),
        (UnpackAt(1, landed(1, TAIL)),),
    ),
    Case(
        "twice, and different",
        with_account(ONE_HEAD),
        landed(0, TAIL),
        *rejected("chunk 0 of rank 0 came twice, and differs"),
    ),
    Case(
        "the same cells twice",
        with_account(ONE_HEAD),
        landed(1, Rectangle((1, 2), (3, 5))),
        *rejected("ranks (0, 0): layers (1, 2) x tokens (3, 5) came twice"),
    ),
    Case(
        "outside of the prompt",
        GRANTED,
        landed(0, Rectangle((0, 2), (4, 9))),
        *rejected("chunk (0, 2) x (4, 9) is not of this prompt"),
    ),
    Case(
        "a stranger",
        GRANTED,
        landed(0, HEAD, source=5),
        *rejected("rank 5 has no part in this transfer"),
    ),
    Case(
        "more than its rank committed",
        with_account(ONE_HEAD, commits={1: COMMITS[1]}),
        landed(0, HEAD, source=1),
        *rejected("rank 1 committed 0 chunks, 1 came"),
    ),
    Case(
        "the last, and there is a gap",
        replace(with_account(ONE_HEAD, commits={0: COMMITS[0]}), terms=UNSTAGED),
        landed(1, Rectangle((0, 2), (4, 7))),
        *rejected("rank 0 committed, but pairs ((0, 0), (0, 1)) lack something"),
    ),
)
AHEAD = replace(GRANTED, terms=UNSTAGED, opened=frozenset(), is_ahead=True)
HALF_OPENED = replace(AHEAD, opened=frozenset({0}))
AHEAD_CASES = (
    Case("one of two", AHEAD, opened(0, ()), {"opened": frozenset({0})}),
    Case("the last; something is lacking", HALF_OPENED, opened(1, ()), {"opened": RANKS}),
    Case(
        "the last, and everything is there",
        replace(HALF_OPENED, account=replace(ALMOST, aux=AUX)),
        opened(1, ()),
        {**ADMIT, "opened": RANKS},
        ADMITTED,
    ),
    Case(
        "everything is there, but one of two has opened",
        replace(AHEAD, account=replace(ALMOST, aux=AUX)),
        opened(1, ()),
        {"opened": frozenset({1})},
    ),
    Case(
        "everything is there, but a rank has not opened",
        replace(HALF_OPENED, account=ALMOST),
        aux(is_final=False),
        entered(ALMOST, aux=AUX),
        (ToCallers(aux(is_final=False)),),
    ),
    Case(
        "a rank cannot open: the source may have written",
        HALF_OPENED,
        opened(1, cause=REFUSED),
        *failed(REFUSED, abort(REFUSED)),
    ),
    Case(
        "the engine gives up before a rank has opened: the source may have written",
        AHEAD,
        CallerAborted(GIVEN_UP),
        *failed(GIVEN_UP, abort(GIVEN_UP)),
    ),
)
GRANTED_CASES = (
    *AHEAD_CASES,
    Case("the source's queue moves", replace(GRANTED, deadlines=WAITS), QUEUED, {"deadlines": RENEWED}),
    Case("a late word of the queue, with the work under way", GRANTED, QUEUED),
    Case(
        "the source has it in its queue: nothing has to move yet",
        replace(GRANTED, deadlines=WAITS),
        msgspec.structs.replace(offered(NUM_TOKENS, DIGEST), is_queued=True),
        {"deadlines": RENEWED},
    ),
    Case("the source has it", GRANTED, offered(NUM_TOKENS, DIGEST), {"deadlines": MOVED}),
    Case(
        "the first word of the source: from here on it has to move",
        replace(GRANTED, deadlines=WAITS),
        offered(NUM_TOKENS, DIGEST),
        {"deadlines": MOVED},
    ),
    Case(
        "another prompt",
        GRANTED,
        offered(NUM_TOKENS, OTHER_DIGEST),
        *failed(WRONG_PROMPT, abort(WRONG_PROMPT)),
    ),
    *LANDED_CASES,
    Case(
        "one of more",
        with_account(UNPACKING, commits={}),
        unpacked(1, 0, 1),
        entered(UNPACKING, commits={}, ledger=FULL, unpacking=frozenset()),
    ),
    Case(
        "the last",
        with_account(UNPACKING),
        unpacked(1, 0, 1),
        {**ADMIT, **entered(ALMOST, aux=AUX)},
        ADMITTED,
    ),
    Case("said twice", with_account(ALMOST), unpacked(1, 0, 1)),
    Case(
        "two staged chunks were of the same cells",
        with_account(UNPACKING, ledger=FULL),
        unpacked(1, 0, 1),
        *rejected("ranks (0, 1): layers (0, 2) x tokens (4, 8) came twice"),
    ),
    Case(
        "one of two",
        with_account(ALMOST, commits={1: COMMITS[1]}),
        COMMITS[0],
        entered(ALMOST),
    ),
    Case(
        "the last",
        with_account(ALMOST, commits={1: COMMITS[1]}, aux=AUX),
        COMMITS[0],
        {**ADMIT, **entered(ALMOST, aux=AUX)},
        ADMITTED,
    ),
    Case(
        "of a rank that has nothing to send",
        GRANTED,
        COMMITS[1],
        entered(Account(LEDGER), commits={1: COMMITS[1]}),
    ),
    Case(
        "saying zero is saying nothing",
        GRANTED,
        found := commit(1, 0, {0: {"k": 0}, 1: {}}),
        entered(Account(LEDGER), commits={1: found}),
    ),
    Case(
        "before its chunks",
        GRANTED,
        COMMITS[0],
        entered(Account(LEDGER), commits={0: COMMITS[0]}),
    ),
    Case(
        "full, but a chunk is still to be heard of",
        with_account(ALMOST, commits={1: COMMITS[1]}, aux=AUX),
        found := commit(0, 3, {0: {"k": 64}, 1: {"k": 32}}),
        entered(ALMOST, commits={**COMMITS, 0: found}, aux=AUX),
    ),
    Case("said twice", with_account(ALMOST), COMMITS[0]),
    Case(
        "twice, and different",
        with_account(ALMOST),
        commit(0, 3, {0: {"k": 64}, 1: {"k": 32}}),
        *rejected("rank 0 committed twice, and differs"),
    ),
    Case(
        "not what the plan expects",
        with_account(ALMOST, commits={}),
        commit(0, 2, {0: {"k": 64}, 1: {"k": 31}}),
        *rejected(
            "rank 0 says it sent {0: {'k': 64}, 1: {'k': 31}}, the plan expects {0: {'k': 64}, 1: {'k': 32}}"
        ),
    ),
    Case(
        "not to whom the plan says",
        with_account(ALMOST, commits={}),
        commit(1, 0, {0: {"k": 1}}),
        *rejected("rank 1 says it sent {0: {'k': 1}}, the plan expects {}"),
    ),
    Case(
        "a stranger",
        GRANTED,
        commit(5, 0, {}),
        *rejected("rank 5 has no part in this transfer"),
    ),
    Case(
        "there is a gap",
        with_account(ONE_HEAD),
        commit(0, 1, {0: {"k": 64}, 1: {"k": 32}}),
        *rejected("rank 0 committed, but pairs ((0, 0), (0, 1)) lack something"),
    ),
    Case(
        "kept, and told at once",
        GRANTED,
        aux(is_final=False),
        entered(Account(LEDGER), aux=AUX),
        (ToCallers(aux(is_final=False)),),
    ),
    Case(
        "told once",
        with_account(Account(LEDGER), aux=AUX),
        aux(is_final=False),
        {"deadlines": MOVED},
    ),
    Case(
        "the last word",
        with_account(ALMOST),
        aux(is_final=False),
        {**ADMIT, **entered(ALMOST, aux=AUX)},
        ADMITTED,
    ),
    Case(
        "the answer ended: pages come back later",
        GRANTED,
        aux(is_final=True),
        {"state": S.QUARANTINED, "outcome": FINISHED, "closing": waiting_for_quiet()},
        (ToSource(settled(FINISHED)), Conclude(FINISHED)),
    ),
    Case("a rank found it wrong", GRANTED, unpacked(1, 0, 1, REFUSED), *failed(REFUSED, abort(REFUSED))),
    Case(
        "the source hears that it is heard",
        GRANTED,
        SourceAborted(GIVEN_UP),
        *failed(GIVEN_UP, ToSource(settled(FAILED))),
    ),
    Case(
        "the source was quiet before",
        replace(GRANTED, closing=Closing(is_quiet=True)),
        SourceAborted(GIVEN_UP),
        {
            "state": S.QUARANTINED,
            "outcome": FAILED,
            "closing": waiting_for_quiet(is_quiet=True, is_asked=True),
        },
        (ToSource(settled(FAILED)), Conclude(FAILED), CloseRanks((0, 1), must_prove_quiet=False)),
    ),
    Case(
        "the source could not vouch before",
        replace(GRANTED, closing=Closing(must_prove_quiet=True)),
        SourceAborted(GIVEN_UP),
        {
            "state": S.QUARANTINED,
            "outcome": FAILED,
            "closing": waiting_for_quiet(must_prove_quiet=True, is_asked=True),
        },
        (ToSource(settled(FAILED)), Conclude(FAILED), CloseRanks((0, 1), must_prove_quiet=True)),
    ),
    Case("the source hears", GRANTED, CallerAborted(GIVEN_UP), *failed(GIVEN_UP, abort(GIVEN_UP))),
    Case(
        "the transport has to prove it",
        GRANTED,
        SessionLost(GONE),
        {
            "state": S.QUARANTINED,
            "outcome": Failed(GONE),
            "closing": waiting_for_quiet(must_prove_quiet=True, is_asked=True),
        },
        (Conclude(Failed(GONE)), CloseRanks((0, 1), must_prove_quiet=True)),
    ),
    Case(
        "the source was quiet before",
        replace(GRANTED, closing=Closing(is_quiet=True)),
        SessionLost(GONE),
        {
            "state": S.QUARANTINED,
            "outcome": Failed(GONE),
            "closing": waiting_for_quiet(is_quiet=True, must_prove_quiet=True, is_asked=True),
        },
        (Conclude(Failed(GONE)), CloseRanks((0, 1), must_prove_quiet=False)),
    ),
    Case("it overtook the reason", GRANTED, QUIET, {"closing": Closing(is_quiet=True)}),
    Case("it overtook the reason", GRANTED, UNQUIET, {"closing": Closing(must_prove_quiet=True)}),
    Case("there is time", GRANTED, Ticked(), now=LATE - 0.1),
    Case("more of it while the source has not spoken", replace(GRANTED, deadlines=WAITS), Ticked(), now=LATE),
    Case("no progress", GRANTED, Ticked(), *failed(STUCK, abort(STUCK), now=LATE), now=LATE),
    *ignored(RECORDS, EVENTS, S.GRANTED, OutcomeQuery),
)
LATE_WORDS = (
    Opened,
    Offer,
    Queued,
    Landed,
    Unpacked,
    Commit,
    AuxRecord,
    SourceAborted,
    CallerAborted,
)
DONE_CASES = (
    Case(
        "one of two",
        DONE,
        closed(0, is_quiet=True),
        {"closing": replace(DONE.closing, closed=frozenset({0}))},
    ),
    Case(
        "the last; the pages were given away before",
        replace(DONE, closing=replace(DONE.closing, closed=frozenset({0}))),
        closed(1, is_quiet=True),
        {"state": S.RELEASED, "closing": replace(DONE.closing, closed=RANKS)},
    ),
    Case("repeated", DONE, QUERY, {}, (ToSource(settled(READY)),)),
    *ignored(RECORDS, EVENTS, S.READY, *LATE_WORDS, Quiet, Unquiet, SessionLost, Ticked),
)
BOTH_CLOSED = replace(CLOSING.closing, closed=RANKS)
ONE_CLOSED = replace(CLOSING, closing=replace(CLOSING.closing, closed=frozenset({0})))
QUARANTINED_CASES = (
    Case(
        "one of two",
        CLOSING,
        closed(0, is_quiet=True),
        {"closing": replace(CLOSING.closing, closed=frozenset({0}))},
    ),
    Case(
        "the last: now the pages are free",
        ONE_CLOSED,
        closed(1, is_quiet=True),
        {"state": S.RELEASED, "closing": BOTH_CLOSED},
        (Release(),),
    ),
    Case("it cannot say so", PROVING, closed(0, is_quiet=False)),
    Case(
        "ranks take the permissions back",
        QUARANTINED,
        QUIET,
        {"closing": replace(QUARANTINED.closing, is_quiet=True, is_asked=True)},
        (CloseRanks((0, 1), must_prove_quiet=False),),
    ),
    Case(
        "ranks no longer have to prove it",
        replace(PROVING, closing=replace(PROVING.closing, closed=frozenset({0}))),
        QUIET,
        {"closing": replace(PROVING.closing, is_quiet=True, closed=frozenset({0}))},
        (CloseRanks((1,), must_prove_quiet=False),),
    ),
    Case("said twice", CLOSING, QUIET),
    Case(
        "the transport has to prove it",
        QUARANTINED,
        UNQUIET,
        {"closing": replace(QUARANTINED.closing, must_prove_quiet=True, is_asked=True)},
        (CloseRanks((0, 1), must_prove_quiet=True),),
    ),
    Case("said twice", PROVING, UNQUIET),
    Case("it was quiet before", CLOSING, UNQUIET),
    Case(
        "the transport has to prove it",
        QUARANTINED,
        SessionLost(GONE),
        {"closing": replace(QUARANTINED.closing, must_prove_quiet=True, is_asked=True)},
        (CloseRanks((0, 1), must_prove_quiet=True),),
    ),
    Case("it was quiet before", CLOSING, SessionLost(GONE)),
    Case("repeated", QUARANTINED, QUERY, {}, (ToSource(settled(FAILED)),)),
    Case("not yet", QUARANTINED, Ticked(), now=99.9),
    Case(
        "the source is asked again, less and less often",
        QUARANTINED,
        Ticked(),
        {"closing": replace(QUARANTINED.closing, interval_s=2.0, ask_at=102.0)},
        (ToSource(QuietQuery(grant=GRANT_ID)),),
    ),
    Case(
        "but often enough",
        replace(QUARANTINED, closing=replace(QUARANTINED.closing, interval_s=3.0)),
        Ticked(),
        {"closing": replace(QUARANTINED.closing, interval_s=4.0, ask_at=104.0)},
        (ToSource(QuietQuery(grant=GRANT_ID)),),
    ),
    Case(
        "both are asked again",
        PROVING,
        Ticked(),
        {"closing": replace(PROVING.closing, interval_s=2.0, ask_at=102.0)},
        (ToSource(QuietQuery(grant=GRANT_ID)), CloseRanks((0, 1), must_prove_quiet=True)),
    ),
    Case(
        "ranks that have not answered are asked again",
        ONE_CLOSED,
        Ticked(),
        {"closing": replace(ONE_CLOSED.closing, interval_s=2.0, ask_at=102.0)},
        (CloseRanks((1,), must_prove_quiet=False),),
    ),
    *ignored(RECORDS, EVENTS, S.QUARANTINED, *LATE_WORDS),
)
RELEASED_CASES = (
    Case("repeated", RELEASED, QUERY, {}, (ToSource(settled(FAILED)),)),
    Case("there was no grant", replace(RELEASED, grant=None), QUERY),
    *ignored(
        RECORDS,
        EVENTS,
        S.RELEASED,
        *LATE_WORDS,
        Prepared,
        Closed,
        Quiet,
        Unquiet,
        SessionLost,
        Ticked,
    ),
)
SUITE = Suite(
    TARGET_COORDINATOR,
    (
        *PREPARING_CASES,
        *OPENING_CASES,
        *GRANTED_CASES,
        *DONE_CASES,
        *QUARANTINED_CASES,
        *RELEASED_CASES,
    ),
    RECORDS,
    EVENTS,
)


def test_the_cases_are_complete():
    assert gaps(SUITE) == []


@pytest.mark.parametrize("case", SUITE.cases, ids=str)
def test_cell(case: Case):
    check(TARGET_COORDINATOR, case)


@pytest.mark.parametrize("key", SUITE.missing(), ids=name_of)
def test_missing_cell(key):
    check_missing(SUITE, key)


@pytest.mark.parametrize("left_out", ["ledger", "unpacking", "commits", "aux", "chunks", "opened"])
def test_ready_needs_everything(left_out: str):
    """Each part of a complete account, taken away alone, keeps a transfer from being ready."""
    lacking = {
        "ledger": {"ledger": WITH_TAIL},
        "unpacking": {"unpacking": frozenset({(0, 1, 1)})},
        "commits": {"commits": {0: COMMITS[0]}},
        "aux": {"aux": None},
        "chunks": {"chunks": {(0, 0): HEAD}},
        "opened": {},
    }[left_out]
    record = with_account(replace(ALMOST, aux=AUX), **lacking)
    if left_out == "opened":
        record = replace(record, opened=frozenset({1}))
    if left_out == "aux":
        event: object = HEAD_LANDED
    else:
        event = aux(is_final=False)
    after, effects = TARGET_COORDINATOR.step(record, event, NOW)
    assert after.state is S.GRANTED
    assert effects == ()


def test_what_is_asked_again_never_stops_being_asked():
    record, asked = QUARANTINED, []
    for tenth in range(1000, 2000):
        record, effects = TARGET_COORDINATOR.step(record, Ticked(), tenth / 10)
        asked += [tenth / 10 for _ in effects]
    waits = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert waits[:2] == pytest.approx([2.0, 4.0])
    assert set(map(round, waits[2:])) == {4}
    assert len(asked) > 20
