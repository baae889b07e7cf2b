"""Copies that are slow, fail, hang, or land after they failed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.transport.fate import End, Fate
from baton.sim.transport.flight import Flight

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often a copy fails, in which ways, how late the rest lands, and how slow all of them are."""

    probability: float
    ends: tuple[str, ...]
    late_s: float
    slowness: float = 1.0


def draw(chance: random.Random) -> Config:
    """One or several ways to fail."""
    ways = [end.value for end in End if end is not End.DONE]
    return Config(
        probability=chance.choice((0.0, 0.05, 0.2)),
        ends=tuple(chance.sample(ways, chance.randint(1, len(ways)))),
        late_s=chance.choice((0.01, 0.1, 0.5)),
        slowness=chance.choice((1.0, 1.0, 5.0, 40.0)),
    )


@dataclass(frozen=True, slots=True)
class Copies:
    """Changes fates."""

    world: World
    config: Config
    chance: random.Random

    def strike(self, flight: Flight, fate: Fate) -> None:
        """Has a batch fail, or take long."""
        del flight
        if self.world.are_faults_over():
            return
        fate.duration_s *= self.config.slowness
        if self.chance.random() < self.config.probability:
            fate.end = End(self.chance.choice(self.config.ends))
            fate.share = self.chance.random()
            fate.late_s = self.config.late_s
            fate.num_pieces += 1


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.fabric.faults.append(Copies(world, config, world.chance.of("fault/copies")))
