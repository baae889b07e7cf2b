"""Quiet is final: under a grant of which a source said so nothing moves, and no rank is ever given it.

Also, no rank is given a grant of another channel than the one that it came by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.protocol.messages import AnyMessage, Grant, Quiet
from baton.sim.checkers.base import Checker
from baton.sim.host import Host
from baton.sim.links import SessionEnd
from baton.sim.watch import Write

if TYPE_CHECKING:
    from baton.sim.world import World


class FinalQuiet(Checker):
    """Follows every grant from the link that it comes by to the ranks of the source, and to its end."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self._strange: set[tuple[str, bytes]] = set()
        self._quiet: set[tuple[str, bytes]] = set()
        self._given: dict[tuple[str, str], bytes] = {}
        """By incarnation of the source and transfer: the grant that ranks were given."""

    def received(self, end: SessionEnd, message: AnyMessage) -> None:
        """A grant comes in."""
        if isinstance(message, Grant) and message.channel != end.link.handshake.channel:
            self._strange.add((_life(end.host), message.grant))

    def sent(self, end: SessionEnd, message: AnyMessage) -> None:
        """The source says quiet."""
        if isinstance(message, Quiet):
            self._quiet.add((_life(end.host), message.grant))

    def told(self, host: Host, message: AnyMessage) -> None:
        """A coordinator passes a grant on to a rank."""
        if not isinstance(message, Grant) or host.driver is None:
            return
        key = (_life(host), message.grant)
        if key in self._strange:
            self.fail(f"{message.transfer}: {host.name} passes on a grant of another channel")
        if key in self._quiet:
            self.fail(f"{message.transfer}: {host.name} passes on a grant of which it had said quiet")
        self._given[key[0], message.transfer] = message.grant

    def landing(self, write: Write) -> None:
        """A piece is about to land."""
        if write.flight.mark <= 0:
            return
        life = write.flight.outbox.life
        transfer = self.world.router.attempts[write.flight.mark - 1].transfer
        grant = self._given.get((life, transfer))
        if grant is not None and (life, grant) in self._quiet:
            self.fail(f"{transfer}: {write.flight.outbox.node} writes after quiet was said")


def _life(host: Host) -> str:
    return host.process.life


CHECKER = FinalQuiet
