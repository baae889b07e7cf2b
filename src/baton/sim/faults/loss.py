"""Frames get lost on links that stand."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.network import Frame

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often."""

    probability: float


def draw(chance: random.Random) -> Config:
    """Rarely or often."""
    return Config(chance.choice((0.01, 0.05, 0.2)))


@dataclass(frozen=True, slots=True)
class Loss:
    """Takes arrivals away."""

    world: World
    config: Config
    chance: random.Random

    def bend(self, frame: Frame) -> None:
        """Loses a frame."""
        if not self.world.are_faults_over() and self.chance.random() < self.config.probability:
            frame.arrivals = []


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.network.faults.append(Loss(world, config, world.chance.of("fault/loss")))
