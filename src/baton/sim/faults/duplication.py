"""Frames arrive twice."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.network import Frame

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often, and how much later the second one comes at most."""

    probability: float
    delay_s_max: float


def draw(chance: random.Random) -> Config:
    """Rarely or often, at once or much later."""
    return Config(chance.choice((0.05, 0.3)), chance.choice((0.001, 0.1)))


@dataclass(frozen=True, slots=True)
class Duplication:
    """Adds arrivals."""

    world: World
    config: Config
    chance: random.Random

    def bend(self, frame: Frame) -> None:
        """Has a frame arrive once more; a handshake does not stand that, and no framing would let it in."""
        if self.world.are_faults_over() or self.chance.random() >= self.config.probability:
            return
        if frame.arrivals and frame.message is not None:
            frame.arrivals.append(frame.arrivals[0] + self.config.delay_s_max * self.chance.random())


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.network.faults.append(Duplication(world, config, world.chance.of("fault/duplication")))
