"""Instances that are told to drain, end by themselves and start anew."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """When, as a share of the time of faults, and which of the instances, as a share of all."""

    moment: float
    which: float


def draw(chance: random.Random) -> Config:
    """Early or late, any of them."""
    return Config(chance.choice((0.03, 0.1, 0.5)), chance.random())


def install(world: World, config: Config) -> None:
    """Lays out the moment."""
    names = sorted(world.instances)
    name = names[int(config.which * len(names))]
    world.schedule.at(config.moment * world.options.faults_s, _drain, world, name)


def _drain(world: World, name: str) -> None:
    incarnation = world.instances[name].incarnation
    if incarnation is not None and incarnation.is_alive:
        world.note(name, "drain")
        incarnation.drain()
