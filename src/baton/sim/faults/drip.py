"""Copies that go on and on: always a little progress, never an end in time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.transport.fate import Fate
from baton.sim.transport.flight import Flight

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often, in how many pieces, over how long."""

    probability: float
    num_pieces: int
    duration_s: float


def draw(chance: random.Random) -> Config:
    """Longer than the progress deadline, or than the total one."""
    return Config(chance.choice((0.1, 0.5)), 40, chance.choice((0.9, 4.0)))


@dataclass(frozen=True, slots=True)
class Drip:
    """Changes fates."""

    world: World
    config: Config
    chance: random.Random

    def strike(self, flight: Flight, fate: Fate) -> None:
        """Has a batch land in many pieces, slowly."""
        del flight
        if not self.world.are_faults_over() and self.chance.random() < self.config.probability:
            fate.num_pieces = self.config.num_pieces
            fate.duration_s = self.config.duration_s


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.fabric.faults.append(Drip(world, config, world.chance.of("fault/drip")))
