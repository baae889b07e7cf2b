"""One event after another, and one failure for one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from baton.errors import RemoteProtocolError
from baton.session.dispatcher import Dispatcher


@dataclass
class Item:
    name: str
    record: Any = None
    is_forgotten: bool = False


class Walk:
    """A table that notes its events; an exception among them is raised, a list is fed by the effects."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []
        self.items = {name: Item(name) for name in "ab"}
        self.dispatcher: Dispatcher[Item] = Dispatcher(self, lambda: 0.0, self.perform, self.end)  # type: ignore[arg-type]

    def step(self, record: Any, event: object, now: float) -> tuple[Any, tuple[object, ...]]:
        return record, (event,)

    def perform(self, item: Item, event: object) -> None:
        self.seen.append((item.name, event))
        if isinstance(event, Exception):
            raise event
        for inner in event if isinstance(event, list) else ():
            self.dispatcher.feed(item, inner)

    def feed(self, name: str, event: object) -> None:
        self.dispatcher.feed(self.items[name], event)

    @staticmethod
    def end(text: str) -> str:
        return f"given up: {text}"


def test_events_of_effects_wait_for_their_turn() -> None:
    walk = Walk()
    walk.feed("a", [["first"], "second"])
    assert [event for _, event in walk.seen] == [[["first"], "second"], ["first"], "second", "first"]


def test_a_failure_ends_its_own_transfer() -> None:
    walk = Walk()
    walk.feed("a", [ValueError("bad luck"), "after"])
    walk.feed("b", "as ever")
    assert [one for one in walk.seen if isinstance(one[1], str)] == [
        ("a", "after"),
        ("a", "given up: ValueError: bad luck"),
        ("b", "as ever"),
    ]


def test_a_forgotten_transfer_gets_no_events() -> None:
    walk = Walk()
    walk.items["a"].is_forgotten = True
    walk.feed("a", "late")
    assert not walk.seen


def test_a_peer_is_blamed_when_the_rest_is_done() -> None:
    walk = Walk()
    with pytest.raises(RemoteProtocolError, match="rubbish"):
        walk.feed("a", [RemoteProtocolError("rubbish"), "after"])
    assert walk.seen[-1] == ("a", "after")
    walk.feed("b", "as ever")
    assert walk.seen[-1] == ("b", "as ever")


def test_what_cannot_even_be_given_up_is_a_bug() -> None:
    walk = Walk()

    def perform(item: Item, event: object) -> None:
        raise ValueError(event)

    dispatcher: Dispatcher[Item] = Dispatcher(walk, lambda: 0.0, perform, Walk.end)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="given up: int: 1"):
        dispatcher.feed(Item("a"), 1)
