"""Processes that stop for a while and go on as if nothing had happened."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many times, and for how long at most."""

    count: int
    duration_s_max: float


def draw(chance: random.Random) -> Config:
    """A hiccup, or longer than anybody waits."""
    return Config(chance.choice((1, 2)), chance.choice((0.05, 0.5, 1.2)))


def install(world: World, config: Config) -> None:
    """Lays out the moments."""
    chance = world.chance.of("fault/halt")
    for _ in range(config.count):
        world.schedule.at(chance.random() * world.options.faults_s * 0.5, _halt, world, config, chance)


def _halt(world: World, config: Config, chance: random.Random) -> None:
    instance = world.instances[chance.choice(sorted(world.instances))]
    living = [process for process in instance.processes if process.is_alive]
    if living:
        process = chance.choice(living)
        world.note(process.name, "halt")
        process.stop()
        until_s = min(world.schedule.now + config.duration_s_max * chance.random(), world.options.faults_s)
        world.schedule.at(until_s, process.go_on)
