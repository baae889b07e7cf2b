"""An instance that speaks another version until it is restarted: every peer refuses it, with the reason."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """Which of the instances it is, as a share of all."""

    which: float


def draw(chance: random.Random) -> Config:
    """Any."""
    return Config(chance.random())


def install(world: World, config: Config) -> None:
    """Has the instance start under the wrong version, and restarts it when faults end."""
    names = sorted(world.instances)
    instance = world.instances[names[int(config.which * len(names))]]
    instance.versions = (7, 9)
    world.schedule.at(world.options.faults_s, _upgrade, world, instance.name)


def _upgrade(world: World, name: str) -> None:
    instance = world.instances[name]
    instance.versions = None
    world.note(name, "upgrade")
    for process in instance.processes:
        process.kill()
