"""A coordinator goes on without a rank that it lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol.instance import INSTANCE, InstanceState, RankLost
from baton.sim.faults import crash
from baton.sim.variants.patching import acting
from baton.sim.variants.variant import Variant


def _stay(one: Any, event: Any, now: float) -> Any:
    return one, ()


@contextmanager
def broken() -> Iterator[None]:
    """Has the loss of a rank change nothing."""
    serving = InstanceState.SERVING
    with acting(INSTANCE, serving, RankLost, _stay, serving):
        yield


VARIANT = Variant(
    "an instance goes on without a rank",
    broken,
    ("one_fate", "settles"),
    {"faults": {"crash": crash.Config(2, 0.01, 0.0)}},
)
