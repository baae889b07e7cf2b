"""Sides that tokenise a prompt differently."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How often, and whether the lengths differ too."""

    probability: float
    has_other_length: bool


def draw(chance: random.Random) -> Config:
    """Sometimes or always."""
    return Config(chance.choice((0.3, 1.0)), chance.random() < 0.5)


def install(world: World, config: Config) -> None:
    """The router's requests differ."""
    world.router.mismatch = (config.probability, config.has_other_length)
