"""One event after another, and one failure for one transfer."""

from __future__ import annotations

import pytest

from baton.errors import RemoteProtocolError
from baton.session.stepping import Stepping


class Walk:
    """Notes what it is fed; an event that is an exception is raised, a list is fed from inside."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []
        self.stepping: Stepping[str] = Stepping(self.step, self.end)

    def step(self, item: str, event: object) -> None:
        self.seen.append((item, event))
        if isinstance(event, Exception):
            raise event
        for inner in event if isinstance(event, list) else ():
            self.stepping.feed(item, inner)

    @staticmethod
    def end(text: str) -> str:
        return f"given up: {text}"


def test_what_effects_bring_waits_for_its_turn() -> None:
    walk = Walk()
    walk.stepping.feed("a", [["first"], "second"])
    assert [event for _, event in walk.seen] == [[["first"], "second"], ["first"], "second", "first"]


def test_a_failure_ends_its_own_transfer() -> None:
    walk = Walk()
    walk.stepping.feed("a", [ValueError("bad luck"), "after"])
    walk.stepping.feed("b", "as ever")
    assert [one for one in walk.seen if isinstance(one[1], str)] == [
        ("a", "after"),
        ("a", "given up: ValueError: bad luck"),
        ("b", "as ever"),
    ]


def test_a_peer_is_blamed_when_the_rest_is_done() -> None:
    walk = Walk()
    with pytest.raises(RemoteProtocolError, match="rubbish"):
        walk.stepping.feed("a", [RemoteProtocolError("rubbish"), "after"])
    assert walk.seen[-1] == ("a", "after")
    walk.stepping.feed("b", "as ever")
    assert walk.seen[-1] == ("b", "as ever")


def test_what_cannot_even_be_given_up_is_a_bug() -> None:
    def step(item: str, event: object) -> None:
        raise ValueError(event)

    with pytest.raises(ValueError, match="given up: int: 1"):
        Stepping(step, Walk.end).feed("a", 1)
