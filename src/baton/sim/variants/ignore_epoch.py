"""A source accepts grants of a channel that is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from baton.session.outbound import OutboundTransfers
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_fault = OutboundTransfers._fault


def _blind(self: OutboundTransfers, session: Any, grant: Any) -> Any:
    return _fault(self, session, msgspec.structs.replace(grant, channel=session.channel))


@contextmanager
def broken() -> Iterator[None]:
    """Takes the channel of every grant for the right one."""
    with patched(OutboundTransfers, _fault=_blind):
        yield


VARIANT = Variant(
    "a source accepts grants of a channel that is gone",
    broken,
    ("final_quiet",),
    scenario="old-channel",
    num_tries=10,
)
