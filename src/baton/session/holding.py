"""What a target instance holds for transfers: how many are live, and which pages wait for quiet."""

from __future__ import annotations

from collections.abc import Iterable

from baton.plan import Storage
from baton.protocol.arrival import ReceiverState
from baton.session.granting import Coming

PAGE_ID_BYTES = 4


def num_live(comings: Iterable[Coming]) -> int:
    """Transfers whose pages are not all the engine's again."""
    return sum(1 for coming in comings if coming.is_live)


def num_active(comings: Iterable[Coming]) -> int:
    """Transfers without a verdict."""
    return sum(1 for coming in comings if coming.record.outcome is None)


def quarantined(comings: Iterable[Coming]) -> dict[str, int]:
    """Transfers whose pages wait for quiet, with the number of pages on all ranks together."""
    return {
        coming.record.transfer: sum(
            len(raw) // PAGE_ID_BYTES for table in coming.tables.values() for raw in table.values()
        )
        for coming in comings
        if coming.record.state is ReceiverState.QUARANTINED
    }


def stuck_share(comings: Iterable[Coming], storage: Storage, since: float) -> float:
    """The largest share of a group's pages that some rank has in quarantine since then or longer."""
    counts: dict[tuple[int, str], int] = {}
    for coming in comings:
        is_quarantined = coming.record.state is ReceiverState.QUARANTINED
        if not is_quarantined or coming.concluded is None or coming.concluded > since:
            continue
        for rank, table in coming.tables.items():
            for group, raw in table.items():
                counts[rank, group] = counts.get((rank, group), 0) + len(raw) // PAGE_ID_BYTES
    return max((count / storage.pages_of(group) for (_, group), count in counts.items()), default=0.0)
