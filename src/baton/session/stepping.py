"""One event after another: how drivers step the machines of their transfers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from baton.errors import RemoteProtocolError

log = logging.getLogger(__name__)

Item = TypeVar("Item")


class Stepping(Generic[Item]):
    """Feeds events to transfers; effects may bring new events, which wait for their turn.

    Whatever goes wrong in a transfer ends that transfer and nothing else: `giving_up` makes the event that
    does it. A peer that broke the protocol is reported when everything that waited has been done.
    """

    def __init__(self, step: Callable[[Item, object], None], giving_up: Callable[[str], object]) -> None:
        self._step = step
        self._giving_up = giving_up
        self._events: deque[tuple[Item, object]] = deque()
        self._is_busy = False

    def feed(self, item: Item, event: object) -> None:
        """Steps until nothing is left to step."""
        self._events.append((item, event))
        if self._is_busy:
            return
        self._is_busy = True
        blame: RemoteProtocolError | None = None
        try:
            while self._events:
                blame = self._confined(*self._events.popleft()) or blame
        finally:
            self._is_busy = False
        if blame is not None:
            raise blame

    def _confined(self, item: Item, event: object) -> RemoteProtocolError | None:
        try:
            self._step(item, event)
        except RemoteProtocolError as error:
            return error
        except Exception as error:
            log.exception("%s", type(event).__name__)
            end = self._giving_up(f"{type(event).__name__}: {error}")
            if type(end) is type(event):
                raise
            self._events.append((item, end))
        return None
