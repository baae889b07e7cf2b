"""Clocks that disagree, and run fast or slow."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """By how much at most."""

    offset_s_max: float
    drift_max: float


def draw(chance: random.Random) -> Config:
    """Hours apart, and up to a twentieth fast or slow."""
    return Config(chance.choice((5.0, 1e5)), chance.choice((0.0, 0.001, 0.05)))


def install(world: World, config: Config) -> None:
    """Every process that starts from now on gets a clock of its own."""
    chance = world.chance.of("fault/skew")
    world.facts.draw_clock = lambda: (
        config.offset_s_max * chance.random(),
        1.0 + config.drift_max * (2 * chance.random() - 1),
    )
