"""Hand-overs that are begun by who computes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.rank.handing import Handing
from baton.engine.steps import Abort, Answer, Send
from baton.errors import LocalProtocolError
from baton.plan import parse_layout
from baton.protocol.outcomes import Failed
from baton.session import Digest, Sending

PAGES = {"full": [3, 4]}


class Endpoint:
    """One rank's end of nothing: it notes what it is asked."""

    def __init__(self, *, is_closed: bool = False) -> None:
        self.config = SimpleNamespace(
            rank=0, instance="here", spec=SimpleNamespace(layout=parse_layout("tp1"))
        )
        self.asked: list[str] = []
        self._is_closed = is_closed

    def on_change(self, callback: object) -> None:
        """Nothing changes."""

    def send(self, transfer: str, digest: Digest) -> Sending:
        """Begins."""
        if self._is_closed:
            raise LocalProtocolError("closed")
        self.asked.append(f"send {transfer}")
        return Sending(transfer, digest.num_tokens, Calls(self.asked), lambda action: action())


@dataclass
class Calls:
    """What a handle asks of its driver."""

    asked: list[str]

    def read_pages(self, pages: Any) -> Any:
        """As they are."""
        return pages

    def chunk_ready(self, sending: Sending, offered: Any) -> None:
        """Notes it."""
        self.asked.append(f"ready {offered.layers} {offered.tokens}")

    def abort_sending(self, sending: Sending, text: str) -> None:
        """Notes it."""
        self.asked.append(f"abort {text}")


def handing(endpoint: Endpoint, told: list[Answer], *, is_begun_later: bool = True) -> Handing:
    return Handing(endpoint, (0, 4), told.append, is_begun_later=is_begun_later)


def order(num_cached: int = 0) -> Send:
    return Send(7, 0, "t", bytes(16), 32, num_cached, PAGES)


@pytest.mark.parametrize("is_begun_later", [False, True])
def test_a_hand_over_is_begun_once_and_what_is_cached_is_ready(is_begun_later: bool) -> None:
    endpoint, told = Endpoint(), []
    hands = handing(endpoint, told, is_begun_later=is_begun_later)
    hands.send(order(num_cached=16))
    assert bool(endpoint.asked) is not is_begun_later
    for _ in range(2):
        hands.begin(hands._out[7])
    assert endpoint.asked == ["send t", "ready (0, 4) (0, 16)"]


def test_what_is_given_up_before_it_is_begun_is_told_of() -> None:
    endpoint, told = Endpoint(), []
    hands = handing(endpoint, told)
    hands.send(order())
    hands.abort(Abort(7, "enough"))
    assert endpoint.asked == ["send t", "abort enough"]


def test_what_cannot_be_begun_is_told_of_and_waited_for_by_nobody() -> None:
    told: list[Answer] = []
    hands = handing(Endpoint(is_closed=True), told)
    hands.send(order())
    found = hands._out[7]
    hands.begin(found)
    assert found.answered.is_set()
    assert found.sending is None
    (changed,) = told
    assert isinstance(changed.outcome, Failed)
    assert changed.is_released
