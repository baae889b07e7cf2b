"""When copies ended, as a transfer tells it."""

from types import SimpleNamespace
from typing import Any

import pytest

from baton.session.flights import Flight, Flights, Leg, Way
from baton.transport import Completion, Done, FailedQuiet, Peer, Ticket

HEARD_S = 9.0


@pytest.mark.parametrize(
    ("event", "ended_s"),
    [
        (Done(Ticket(1), 5.0), 5.0),
        (Done(Ticket(1)), HEARD_S),
        (FailedQuiet(Ticket(1), "broken"), HEARD_S),
    ],
)
def test_a_copy_ended_when_its_transport_knew(event: Completion, ended_s: float):
    rank: Any = SimpleNamespace(
        ports=SimpleNamespace(now=lambda: HEARD_S), cause=lambda *why: why, transport=None
    )
    found: Any = SimpleNamespace(handle=SimpleNamespace(copies=[]), flights={})
    flight = Flight(3, tickets={1: Leg(Way(Peer(1, "target"), {}, num_tickets=1), 2, 100, 1.0)})
    flights = Flights(rank, ended=lambda *what: None, failing=lambda *what: None)
    flights.tickets[1] = (found, flight)
    flights.moved(event)
    (copied,) = found.handle.copies
    assert (copied.target_rank, copied.index, copied.num_bytes) == (2, 3, 100)
    assert (copied.submitted_s, copied.ended_s) == (1.0, ended_s)
    assert copied.is_done == isinstance(event, Done)
