"""What joins all transports of a world: who lives, what is cut, what befalls copies, and who watches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from baton.plan.execution import Bytes
from baton.plan.tokens import Ints
from baton.sim.schedule import Schedule
from baton.sim.transport.fate import Fate
from baton.sim.transport.flight import Flight

if TYPE_CHECKING:
    from baton.sim.transport.inbox import Inbox


class CopyFault(Protocol):
    """A fault that changes what becomes of copies."""

    def strike(self, flight: Flight, fate: Fate) -> None:
        """Changes the fate of a batch that begins to move."""


class Watcher(Protocol):
    """Who is told of copies."""

    def submitted(self, flight: Flight) -> None:
        """A batch was queued."""

    def landing(self, flight: Flight, inbox: Inbox, index: Ints, read: Ints) -> None:
        """A piece is about to be written: bytes of the target's region, and of the source's."""

    def ended(self, flight: Flight, how: str) -> None:
        """A batch came to its completion."""


@dataclass(slots=True)
class Fabric:
    """The wires between transports."""

    schedule: Schedule
    chance: random.Random
    watcher: Watcher
    is_cut: Callable[[str, str], bool]
    """Whether nothing passes from one node to another now."""
    faults: list[CopyFault] = field(default_factory=list)
    living: dict[str, Inbox] = field(default_factory=dict)
    copy_s: float = 0.0005
    spoil: Callable[[Bytes], Bytes] | None = None
    """What a bad wire makes of the bytes of a piece."""
    num_opened: int = 0
    num_pieces: int = 0
    num_pending: int = 0
    """Pieces that may still land."""

    def draw(self, flight: Flight) -> Fate:
        """What becomes of a batch."""
        chance = self.chance
        fate = Fate(
            duration_s=self.copy_s * (0.2 + 1.6 * chance.random()),
            num_pieces=chance.choice((1, 1, 2, 3)),
        )
        for fault in self.faults:
            fault.strike(flight, fate)
        return fate

    def next_piece(self) -> int:
        """A number for a piece that may land from now on."""
        self.num_pieces += 1
        self.num_pending += 1
        return self.num_pieces

    def incarnation(self) -> str:
        """A name that no transport had before."""
        self.num_opened += 1
        return f"{self.num_opened:04x}{self.chance.getrandbits(32):08x}"
