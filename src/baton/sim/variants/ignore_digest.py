"""Neither side minds that the other prefilled something else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.machine import replace
from baton.protocol.messages import Offer
from baton.protocol.source_coordinator import SourceCoordinator
from baton.protocol.target_coordinator import TARGET_COORDINATOR, TargetCoordinatorState, _offered
from baton.sim.faults import tokeniser
from baton.sim.variants.patching import acting, patched
from baton.sim.variants.variant import Variant


def _any(one: Any, event: Any, now: float) -> Any:
    return _offered(one, replace(event, num_tokens=one.num_tokens, digest=one.digest), now)


@contextmanager
def broken() -> Iterator[None]:
    """Takes every prompt for the right one, at both ends."""
    states = (
        TargetCoordinatorState.PREPARING,
        TargetCoordinatorState.OPENING,
        TargetCoordinatorState.GRANTED,
    )
    with (
        patched(SourceCoordinator, mismatch=lambda one, prefill: None),
        acting(TARGET_COORDINATOR, states[0], Offer, _any),
        acting(TARGET_COORDINATOR, states[1], Offer, _any),
        acting(TARGET_COORDINATOR, states[2], Offer, _any),
    ):
        yield


VARIANT = Variant(
    "a differing digest is accepted",
    broken,
    ("bytes_right",),
    {"faults": {"tokeniser": tokeniser.Config(1.0, False)}, "held_share": 0.0},
)
