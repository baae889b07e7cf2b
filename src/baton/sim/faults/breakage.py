"""Connections break under links that stand; both ends live on and dial again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many times."""

    count: int


def draw(chance: random.Random) -> Config:
    """Once or a few times."""
    return Config(chance.choice((1, 2, 5)))


def install(world: World, config: Config) -> None:
    """Lays out the moments."""
    chance = world.chance.of("fault/breakage")
    for _ in range(config.count):
        world.schedule.at(chance.random() * world.options.faults_s * 0.5, _break, world, chance)


def _break(world: World, chance: random.Random) -> None:
    standing = world.network.standing()
    if standing:
        end = chance.choice(standing)
        world.note("network", "break", detail=end.host.name)
        world.network.sever(end)
