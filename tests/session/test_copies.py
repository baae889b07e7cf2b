"""When copies ended, as a transfer tells it."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests.session.handoff_world import CACHE, Side

from baton.protocol.ledger import Rectangle
from baton.session.copies import ChunkCopy, Connection, SourceCopies, SubmittedCopy
from baton.transport import Completion, Done, FailedQuiet, Peer, Ticket

HEARD_S = 9.0
BOX = Rectangle((0, 1), (0, 1))


@pytest.mark.parametrize(
    ("event", "ended_s"),
    [
        (Done(Ticket(1), 5.0), 5.0),
        (Done(Ticket(1)), HEARD_S),
        (FailedQuiet(Ticket(1), "broken"), HEARD_S),
    ],
)
def test_a_copy_ended_when_its_transport_knew(event: Completion, ended_s: float):
    spec = Side().spec(CACHE)
    config: Any = SimpleNamespace(cause=lambda *why: why, spec=spec, rank=0, ungranted_share_max=0.5)
    ports: Any = SimpleNamespace(now=lambda: HEARD_S)
    source = SourceCopies(config, ports, transport=None, pools=None, peers={}, send=None)  # type: ignore[arg-type]
    transfer: Any = SimpleNamespace(handle=SimpleNamespace(copies=[]), copying={})
    connection = Connection(Peer(1, "target"), {}, num_copies=1)
    source.tickets[1] = ChunkCopy(transfer, 3, BOX, copies={1: SubmittedCopy(connection, 2, 100, 1.0)})
    source.on_completion(event)
    (timing,) = transfer.handle.copies
    assert (timing.target_rank, timing.index, timing.num_bytes) == (2, 3, 100)
    assert (timing.submitted_s, timing.ended_s) == (1.0, ended_s)
    assert timing.is_done == isinstance(event, Done)
