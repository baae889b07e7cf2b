"""A target takes any word about a transfer for one under the present grant."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from baton.session.inbound import InboundTransfers
from baton.sim.variants.patching import patched
from baton.sim.variants.variant import Variant

_received = InboundTransfers.on_message


def _by_transfer(self: InboundTransfers, session: Any, message: Any) -> None:
    coming = self.transfers.get(getattr(message, "transfer", ""))
    grant = getattr(message, "grant", None)
    if coming is not None and coming.record.grant is not None and grant:
        self.grants[grant] = coming
    _received(self, session, message)


@contextmanager
def broken() -> Iterator[None]:
    """Finds the transfer by its id, whatever the grant."""
    with patched(InboundTransfers, on_message=_by_transfer):
        yield


VARIANT = Variant(
    "a target takes words under an old grant for words under the new one",
    broken,
    ("bytes_right", "full_ledger", "written_once", "id-reused"),
    scenario="id-reused",
    num_tries=10,
)
