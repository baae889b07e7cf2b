"""A target does not wait for the aux record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.protocol import target_coordinator
from baton.protocol.machine import replace
from baton.protocol.outcomes import Aux
from baton.sim.faults import reordering
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_admit = target_coordinator._admit
_complete = target_coordinator.is_complete


def _is_complete(account: Any, terms: Any) -> bool:
    return _complete(replace(account, aux=account.aux or Aux()), terms)


def _admit_anyhow(one: Any, account: Any) -> Any:
    return _admit(one, replace(account, aux=account.aux or Aux()))


@contextmanager
def broken() -> Iterator[None]:
    """Makes an empty record do."""
    with patched(target_coordinator, is_complete=_is_complete, _admit=_admit_anyhow):
        yield


VARIANT = Variant(
    "a transfer is ready without its aux record",
    broken,
    ("agreement",),
    {"faults": {"reordering": reordering.Config(0.5, 0.05)}},
)
