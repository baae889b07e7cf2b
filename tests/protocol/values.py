"""Small values that the tests of the machines share."""

from __future__ import annotations

from baton.protocol.messages import Grant, Lane, Settled
from baton.protocol.outcomes import Aux, Cause, Failed, Finished, Ready, Stage, Why
from baton.protocol.timings import Deadlines, Timings

TRANSFER = "room-7"
GRANT_ID = b"\x11" * 16
OTHER_ID = b"\x22" * 16
DIGEST = b"\xd1" * 16
NUM_TOKENS = 8
TIMINGS = Timings(
    offer_s=50.0,
    progress_s=20.0,
    total_s=300.0,
    silence_s=3.0,
    ask_again_s=1.0,
    ask_again_s_max=4.0,
    linger_s=60.0,
)
AUX = Aux(tokens=(42,), cached_tokens=8)
GIVEN_UP = Cause(Why.ABORTED, Stage.COPY, "prefill", 1, "the client went away")
BROKEN = Cause(Why.COPY_FAILED, Stage.COPY, "prefill", 0, "the wire broke")
GONE = Cause(Why.PEER_LOST, Stage.COPY, "decode", -1, "its link is gone")
READY = Ready(AUX)
FINISHED = Finished(AUX)
FAILED = Failed(GIVEN_UP)


def deadlines(began: float = 90.0, moved: float = 95.0, *, has_begun: bool = True) -> Deadlines:
    return Deadlines(TIMINGS, began, moved, has_begun)


def grant(grant_id: bytes = GRANT_ID, lanes: tuple[Lane, ...] = (), **fields: object) -> Grant:
    values: dict[str, object] = {
        "transfer": TRANSFER,
        "grant": grant_id,
        "channel": b"\xcc" * 16,
        "num_tokens": NUM_TOKENS,
        "digest": DIGEST,
        "source_dp": 0,
        "target_dp": 0,
        "held": {},
        "offset": 0,
        "tables": {},
        "lanes": lanes,
    }
    return Grant(**{**values, **fields})  # type: ignore[arg-type]


def settled(outcome: Ready | Finished | Failed, grant_id: bytes = GRANT_ID) -> Settled:
    return Settled(transfer=TRANSFER, grant=grant_id, outcome=outcome)
