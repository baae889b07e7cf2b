"""How drivers feed events to the machines of their transfers, one event after another."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from baton.errors import RemoteProtocolError
from baton.protocol.machine import Table

log = logging.getLogger(__name__)


class Tracked(Protocol):
    """A transfer as its driver keeps it; events for one that was forgotten are dropped."""

    record: Any
    is_forgotten: bool


Item = TypeVar("Item", bound=Tracked)


class Dispatcher(Generic[Item]):
    """Steps a machine and performs its effects; events that effects bring about wait for their turn.

    An exception in a transfer ends that transfer and nothing else: `give_up` makes the event that ends it. A
    peer that broke the protocol is reported after all waiting events were fed.
    """

    def __init__(
        self,
        table: Table[Any],
        now: Callable[[], float],
        perform: Callable[[Item, object], None],
        give_up: Callable[[str], object],
    ) -> None:
        self._table = table
        self._now = now
        self._perform = perform
        self._give_up = give_up
        self._events: deque[tuple[Item, object]] = deque()
        self._is_busy = False

    def feed(self, item: Item, event: object) -> None:
        """Feeds an event, and whatever follows from it."""
        self._events.append((item, event))
        if self._is_busy:
            return
        self._is_busy = True
        peer_error: RemoteProtocolError | None = None
        try:
            while self._events:
                item, event = self._events.popleft()
                if item.is_forgotten:
                    continue
                try:
                    item.record, effects = self._table.step(item.record, event, self._now())
                    for effect in effects:
                        self._perform(item, effect)
                except RemoteProtocolError as error:
                    peer_error = error
                except Exception as error:
                    log.exception("a transfer failed while handling %s", type(event).__name__)
                    end = self._give_up(f"{type(event).__name__}: {error}")
                    if type(end) is type(event):
                        raise
                    self._events.append((item, end))
        finally:
            self._is_busy = False
        if peer_error is not None:
            raise peer_error
