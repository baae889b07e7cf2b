"""Requests that are tried again under a new transfer id when a leg fails."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many attempts a request has, and how soon the next one comes."""

    attempts_max: int
    delay_s: float


def draw(chance: random.Random) -> Config:
    """At once, or after a while."""
    return Config(chance.choice((2, 3)), chance.choice((0.0, 0.05)))


def install(world: World, config: Config) -> None:
    """The router tries again."""
    world.router.attempts_max = config.attempts_max
    world.router.retry_s = config.delay_s
