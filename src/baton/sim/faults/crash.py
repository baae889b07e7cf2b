"""Processes die and their instance comes back under the same name and address."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many, how soon they come back at most, and how often their copies outlive them."""

    count: int
    restart_s_max: float
    linger_share: float


def draw(chance: random.Random) -> Config:
    """One or two, at once or after a while."""
    return Config(chance.choice((1, 1, 2)), chance.choice((0.01, 0.3)), chance.choice((0.0, 0.5, 1.0)))


def install(world: World, config: Config) -> None:
    """Lays out the crashes."""
    chance = world.chance.of("fault/crash")
    for _ in range(config.count):
        # Early on, when there is most to break.
        moment_s = chance.random() ** 2 * world.options.faults_s
        world.schedule.at(moment_s, _crash, world, config, chance)


def _crash(world: World, config: Config, chance: random.Random) -> None:
    instance = world.instances[chance.choice(sorted(world.instances))]
    living = [process for process in instance.processes if process.is_alive]
    if living:
        instance.restart_s = config.restart_s_max * chance.random()
        instance.lingers = chance.random() < config.linger_share
        process = chance.choice(living)
        world.note(process.name, "crash")
        process.kill()
