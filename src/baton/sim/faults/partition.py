"""Instances cannot reach each other for a while, in one direction or both; copies stall too."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many cuts, how long at most, and whether one way only."""

    count: int
    duration_s_max: float
    is_one_way: bool


def draw(chance: random.Random) -> Config:
    """Short and long ones."""
    return Config(chance.choice((1, 1, 3)), chance.choice((0.05, 0.4, 1.5)), chance.random() < 0.5)


def install(world: World, config: Config) -> None:
    """Lays out the cuts."""
    chance = world.chance.of("fault/partition")
    names = sorted(world.instances)
    for _ in range(config.count):
        start_s = chance.random() * world.options.faults_s
        pair = tuple(chance.sample(names, 2))
        cuts = {(pair[0], pair[1])} if config.is_one_way else {(pair[0], pair[1]), (pair[1], pair[0])}
        world.schedule.at(start_s, _cut, world, cuts)
        stop_s = min(start_s + config.duration_s_max * chance.random(), world.options.faults_s)
        world.schedule.at(stop_s, _heal, world, cuts)


def _cut(world: World, cuts: set[tuple[str, str]]) -> None:
    world.note("network", "cut", detail=str(sorted(cuts)))
    world.network.cuts |= cuts


def _heal(world: World, cuts: set[tuple[str, str]]) -> None:
    world.note("network", "heal", detail=str(sorted(cuts)))
    world.network.cuts -= cuts
