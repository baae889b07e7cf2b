"""Neither side minds that the other prefilled something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.arrival import Offered, ReceiverState
from baton.protocol.departure import Departure
from baton.protocol.machine import replace
from baton.protocol.receiver import RECEIVER, _offered
from baton.sim.faults import tokeniser
from baton.sim.variants.patching import acting, patched
from baton.sim.variants.variant import Variant


def _any(one: Any, event: Any, now: float) -> Any:
    return _offered(one, replace(event, num_tokens=one.num_tokens, digest=one.digest), now)


@contextmanager
def broken() -> Iterator[None]:
    """Takes every prompt for the right one, at both ends."""
    states = (ReceiverState.PREPARING, ReceiverState.OPENING, ReceiverState.GRANTED)
    with (
        patched(Departure, mismatch=lambda one, prefill: None),
        acting(RECEIVER, states[0], Offered, _any),
        acting(RECEIVER, states[1], Offered, _any),
        acting(RECEIVER, states[2], Offered, _any),
    ):
        yield


VARIANT = Variant(
    "a differing digest is accepted",
    broken,
    ("bytes_right",),
    {"faults": {"tokeniser": tokeniser.Config(1.0, False)}, "held_share": 0.0},
)
