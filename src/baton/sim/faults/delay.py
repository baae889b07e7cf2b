"""Frames take longer, in bursts or always."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.network import Frame

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often and by how much at most."""

    probability: float
    delay_s_max: float


def draw(chance: random.Random) -> Config:
    """A few frames much later, or many a little later."""
    return chance.choice((Config(0.05, 0.2), Config(0.3, 0.02), Config(0.9, 0.004)))


@dataclass(frozen=True, slots=True)
class Delay:
    """Moves arrivals back."""

    world: World
    config: Config
    chance: random.Random

    def bend(self, frame: Frame) -> None:
        """Delays a frame, and those behind it."""
        if not self.world.are_faults_over() and self.chance.random() < self.config.probability:
            late_s = self.config.delay_s_max * self.chance.random()
            frame.arrivals = [arrival + late_s for arrival in frame.arrivals]


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.network.faults.append(Delay(world, config, world.chance.of("fault/delay")))
