"""No transfer is ready before every target rank has opened its grant, whenever the source heard of it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from baton.protocol.messages import AnyMessage, Grant, Open, Opened, Settled
from baton.protocol.outcomes import Ready
from baton.sim.checkers.base import Checker
from baton.sim.host import Host
from baton.sim.links import SessionEnd

if TYPE_CHECKING:
    from baton.sim.world import World


class AllOpened(Checker):
    """Counts, by grant, the ranks that were asked to open and those that said that they have."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.num_ahead = 0
        """Grants that the source was given before any rank had opened."""
        self._asked: Counter[bytes] = Counter()
        self._opened: Counter[bytes] = Counter()

    def sent(self, end: SessionEnd, message: AnyMessage) -> None:
        """A word to another instance."""
        del end
        if isinstance(message, Grant) and not self._opened[message.grant]:
            self.num_ahead += 1

    def told(self, host: Host, message: AnyMessage) -> None:
        """A word inside of an instance."""
        match message:
            case Open(grant=found):
                self._asked[found.grant] += 1
            case Opened(grant=grant, cause=None):
                self._opened[grant] += 1
            case Settled(grant=grant, outcome=Ready()) if self._opened[grant] < self._asked[grant]:
                text = f"{self._opened[grant]} of {self._asked[grant]} ranks have opened"
                self.fail(f"{message.transfer}: {host.name} says that it is ready, but {text}")


CHECKER = AllOpened
