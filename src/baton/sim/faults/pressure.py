"""Pools that other work has filled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How much of a pool is gone; there is always room for one prompt."""

    source_share: float
    target_share: float


def draw(chance: random.Random) -> Config:
    """One side, or both."""
    return Config(chance.choice((0.0, 0.5, 0.8)), chance.choice((0.0, 0.5, 0.8)))


def install(world: World, config: Config) -> None:
    """Pools that are made from now on are filled."""
    world.facts.pressure = (config.source_share, config.target_share)
