"""Frames overtake each other."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.sim.network import Frame

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often a frame leaves its place, and how late it may be."""

    probability: float
    delay_s_max: float


def draw(chance: random.Random) -> Config:
    """By a little or by a lot."""
    return Config(chance.choice((0.1, 0.5)), chance.choice((0.002, 0.05)))


@dataclass(frozen=True, slots=True)
class Reordering:
    """Lets arrivals out of their order."""

    world: World
    config: Config
    chance: random.Random

    def bend(self, frame: Frame) -> None:
        """Holds a frame back, but not those behind it; a handshake keeps its order, or it would never end."""
        if self.world.are_faults_over() or frame.message is None or not frame.receiver.is_linked:
            return
        if self.chance.random() < self.config.probability:
            late_s = self.config.delay_s_max * self.chance.random()
            frame.arrivals = [arrival + late_s for arrival in frame.arrivals]
            frame.is_ordered = False


def install(world: World, config: Config) -> None:
    """Begins it."""
    world.network.faults.append(Reordering(world, config, world.chance.of("fault/reordering")))
