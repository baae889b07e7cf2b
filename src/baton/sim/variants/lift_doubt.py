"""A source that could not vouch for a grant forgets that when it hears of the grant again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.session.outbound import OutboundTransfers
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_bury = OutboundTransfers._retire


def _forgetful(self: OutboundTransfers, transfer: str, grant: bytes, doubt: str) -> None:
    self.tombstones.pop(grant, None)
    _bury(self, transfer, grant, doubt)


@contextmanager
def broken() -> Iterator[None]:
    """Digs a new grave over the old one."""
    with patched(OutboundTransfers, _retire=_forgetful):
        yield


VARIANT = Variant(
    "a doubt is lifted by hearing of the grant again",
    broken,
    ("final_quiet", "no_late_write"),
    scenario="doubt-stays",
    num_tries=10,
)
