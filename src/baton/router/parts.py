"""What the conversations of a router share."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.router.choosing import Choosing
from baton.router.config import RouterConfig
from baton.router.fleet import Fleet
from baton.router.metrics import Metrics
from baton.router.timelines import Tried
from baton.router.waiting import Waiting
from baton.router.wire.pool import Pool

NUM_SERVED_MAX = 4096


class Served:
    """The attempts of recent requests, by the id of the response."""

    def __init__(self, num_max: int = NUM_SERVED_MAX) -> None:
        self._attempts: OrderedDict[str, list[Tried]] = OrderedDict()
        self._num_max = num_max

    def add(self, identity: str, tried: Tried) -> None:
        """An attempt begins."""
        self._attempts.setdefault(identity, []).append(tried)
        if len(self._attempts) > self._num_max:
            self._attempts.popitem(last=False)

    def attempts(self, identity: str) -> list[Tried]:
        """All of them, in order; none where the request is not known any more."""
        return self._attempts.get(identity, [])


@dataclass(frozen=True, slots=True)
class Parts:
    """One of each."""

    config: RouterConfig
    pool: Pool
    fleet: Fleet
    choosing: Choosing
    waiting: Waiting
    metrics: Metrics
    served: Served
