"""A registry that does not answer for a while."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """When it goes away, as a share of the time of faults, and for how long."""

    start: float
    duration_s: float


def draw(chance: random.Random) -> Config:
    """From the start, or later."""
    return Config(chance.choice((0.0, 0.0, 0.3)), chance.choice((0.05, 0.5)))


def install(world: World, config: Config) -> None:
    """Lays out the loss."""
    start_s = config.start * world.options.faults_s
    world.schedule.at(start_s, _set, world, False)
    world.schedule.at(min(start_s + config.duration_s, world.options.faults_s), _set, world, True)


def _set(world: World, is_up: bool) -> None:
    world.note("registry", "up" if is_up else "down")
    world.registry.is_up = is_up
