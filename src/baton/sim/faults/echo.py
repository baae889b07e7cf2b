"""Messages of a link that is gone arrive on the link that took its place."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.sim.world import World


@dataclass(frozen=True, slots=True)
class Config:
    """How many messages."""

    count: int


def draw(chance: random.Random) -> Config:
    """A few or many."""
    return Config(chance.choice((3, 10, 30)))


def install(world: World, config: Config) -> None:
    """Lays out the moments."""
    chance = world.chance.of("fault/echo")
    for _ in range(config.count):
        world.schedule.at(chance.random() * world.options.faults_s, _echo, world, chance)


def _echo(world: World, chance: random.Random) -> None:
    """The framing would keep such a message out; here it is let in, because the drivers have to stand it."""
    if not world.network.past:
        return
    sender, receiver, message = chance.choice(world.network.past)
    for end in world.network.standing():
        for one in (end, end.peer):
            assert one is not None
            assert one.peer is not None
            ends = (one.peer.host.process.instance, one.host.process.instance)
            if ends == (sender, receiver) and one.is_linked:
                world.note(one.host.name, "echo", getattr(message, "transfer", ""), type(message).__name__)
                one.host.process.do(one.deliver, message)
                return
