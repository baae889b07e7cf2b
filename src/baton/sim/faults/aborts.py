"""Clients that go away, and requests that are preempted, at any stage."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.request import Attempt
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often, and how long after the request at most."""

    probability: float
    delay_s_max: float
    is_preemption: bool


def draw(chance: random.Random) -> Config:
    """Early or late; by the client, or at the source."""
    return Config(chance.choice((0.3, 0.9)), chance.choice((0.002, 0.01, 0.2)), chance.random() < 0.3)


def install(world: World, config: Config) -> None:
    """Every attempt may be aborted."""
    chance = world.chance.of("fault/aborts")

    def begun(attempt: Attempt) -> None:
        if not world.are_faults_over() and chance.random() < config.probability:
            delay_s = config.delay_s_max * chance.random()
            sides = (
                ("source",) if config.is_preemption else chance.choice((("source", "target"), ("target",)))
            )
            world.schedule.after(delay_s, world.router.abort, attempt, sides)

    world.router.on_attempt.append(begun)
