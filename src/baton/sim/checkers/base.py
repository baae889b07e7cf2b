"""What checkers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from baton.sim.violation import Violation

if TYPE_CHECKING:
    from baton.sim.world import World


class Checker:
    """Watches one promise over one world."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def fail(self, text: str) -> NoReturn:
        """The promise was broken."""
        raise Violation(self.world.seed, self.name, f"at {self.world.schedule.now:.4f} s: {text}")
